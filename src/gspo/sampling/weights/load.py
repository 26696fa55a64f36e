"""Load a published weight version, all of it or nothing, and prove by a probe that it is the trainer's."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo import rng
from gspo.errors import WeightSyncError
from gspo.faults import reached
from gspo.models import quiet
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.system import files

# Log-probs of every token but the first of each sequence.
ScoreSequences = Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]]

_PART = 256  # positions whose log-probs are computed together

# Largest |log-prob difference| between two correct computations of the probe, by the dtype of the weights.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


def probe_sequences(num_vocab: int, count: int = 3, length: int = 12) -> list[list[int]]:
    """`count` fixed random sequences of `length` tokens."""
    return rng.generator(0, "weights probe").integers(0, num_vocab, (count, length)).tolist()


def sequence_logp(model: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Log-probs of every token but the first of each sequence, by a plain forward pass."""
    values = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([list(tokens)], device=model.device)  # [1, T]
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]  # [T−1, V]
            # float64, so that the result depends on the logits and not on the rounding of the softmax; in parts, as it
            # takes eight bytes per token and word.
            parts = [
                torch.log_softmax(part.double(), -1).gather(1, chosen)[:, 0].float()
                for part, chosen in zip(logits.split(_PART), ids[0, 1:, None].split(_PART), strict=True)
            ]
            values.append(torch.cat(parts).cpu().numpy())  # [T−1]
    return values


def mismatch(one: Sequence[NDArray], other: Sequence[NDArray], dtype: torch.dtype) -> str | None:
    """Why two probe results come from different weights; None if they agree."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return "the probe result has another number of log-probs"
    gap = float(np.abs(np.concatenate(one) - np.concatenate(other)).max())  # largest difference of any token
    bound = TOLERANCE.get(dtype, 0.2)
    if gap <= bound:  # False for NaN
        return None
    return f"log-probs of the probe differ by {gap:.2g} (allowed {bound:g}): it samples from another model"


class ProbeCheck:
    """Compares the probe results of servers with the trainer's, or with the first server's if `reference` is None."""

    def __init__(self, num_vocab: int, dtype: torch.dtype, reference: ScoreSequences | None) -> None:
        self.sequences = probe_sequences(num_vocab)
        self.expected: list[NDArray] | None = None  # for the version published last
        self._dtype, self.reference = dtype, reference

    def mismatch(self, values: Any) -> str | None:
        """Why a server's result is wrong; None if it agrees. The first result is the reference if there is none."""
        try:
            rows = [np.array(row, dtype=np.float64) for row in values]
        except (TypeError, ValueError):
            rows = []
        if not rows:
            return "it did not report the log-probs of the probe"
        if self.expected is None:
            self.expected = rows
        return mismatch(rows, self.expected, self._dtype)


def fetch_weights(address: str, sha256: str) -> dict[str, Tensor]:
    """The tensors of a published version, from its file or by broadcast. WeightSyncError if they are not intact."""
    if not address.startswith(collective.SCHEME):
        return read_published(address, sha256)
    try:
        return collective.receive(address, sha256, 0, 1)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as cause:  # any malformed offer
        raise WeightSyncError(f"{cause}; the sampler keeps its weights") from cause


def read_published(path: str | Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a published file. WeightSyncError if its bytes are not those that were published."""
    path = Path(path)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # reading a pipe would never end
            raise WeightSyncError(f"{path} is not a file; the sampler keeps its weights")
        if (got := files.sha256(path)) != sha256:
            raise WeightSyncError(
                f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}… "
                f"({path.stat().st_size} bytes); the sampler keeps its weights"
            )
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as cause:  # ValueError: a path with a null byte
        raise WeightSyncError(f"{path} cannot be read ({cause}); the sampler keeps its weights") from cause


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightSyncError(f"weight {name!r} holds NaN or inf; the sampler keeps its weights")


def copy_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into the model's parameters, all or nothing.

    Every trainable parameter must arrive, under one of its names, with its shape and dtype, and finite. Nothing is
    written before everything is checked.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    arrived: dict[Tensor, tuple[str, Tensor]] = {}  # parameter → the name and tensor that it becomes
    for name, tensor in _as_parameters(model, dict(tensors), by_name).items():
        parameter = by_name.get(name)
        if parameter is None:
            raise WeightSyncError(f"weight {name!r} is not a parameter of {type(model).__name__}")
        _check_form(name, tensor, parameter)
        check_finite({name: tensor})
        if parameter in arrived and not torch.equal(arrived[parameter][1], tensor):  # tied weights
            raise WeightSyncError(
                f"weights {name!r} and {arrived[parameter][0]!r} are one tensor of the model but arrived with "
                "different values"
            )
        arrived[parameter] = (name, tensor)
    _check_complete(n for n, p in model.named_parameters() if p.requires_grad and p not in arrived)
    with torch.no_grad():
        for parameter, (_, tensor) in arrived.items():
            reached("weights.copy")
            parameter.copy_(tensor)


def _as_parameters(model: Any, tensors: dict[str, Tensor], by_name: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors by parameter name. Files hold one tensor per expert; transformers holds one tensor per layer for all."""
    if set(tensors) <= set(by_name):
        return tensors
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    # The model's own weights in the form of a file: names and shapes that must arrive.
    own = revert_weight_conversion(model, {n: p.detach() for n, p in by_name.items() if n not in tied})
    for name, tensor in tensors.items():
        if name not in own and name not in tied:
            raise WeightSyncError(f"weight {name!r} is not a parameter of {type(model).__name__}")
        if name in own:
            _check_form(name, tensor, own[name])
    _check_complete(set(own) - set(tensors))
    # transformers converts the tensors of a file into parameters when it loads a model; this uses the same code.
    with quiet():
        converted = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=tensors, dtype=model.dtype
        )
    return dict(converted.named_parameters())


def _check_form(name: str, tensor: Tensor, own: Tensor) -> None:
    if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
        raise WeightSyncError(
            f"weight {name!r} is {tuple(tensor.shape)} {tensor.dtype}, the sampler holds {tuple(own.shape)} {own.dtype}"
        )


def _check_complete(missing: Iterable[str]) -> None:
    if names := sorted(missing):
        raise WeightSyncError(f"{len(names)} weights did not arrive, first {names[0]!r}; the sampler keeps its own")
