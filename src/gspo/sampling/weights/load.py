"""Load a published weight version into a model: first check all of it, then copy. A bad version changes nothing."""

from __future__ import annotations

import copy
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo.errors import WeightSyncError
from gspo.faults import reached
from gspo.models.cache import quiet
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.system import files


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
    # Tied weights have several names: all of them are accepted.
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
    # Every check has passed before the first parameter is written.
    with torch.no_grad():
        for parameter, (_, tensor) in arrived.items():
            reached("weights.copy")
            parameter.copy_(tensor)


def _as_parameters(model: Any, tensors: dict[str, Tensor], by_name: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors by parameter name. Files hold one tensor per expert; transformers holds one tensor per layer for all."""
    # The names of the parameters themselves: nothing to convert.
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
