"""New weights for a sampler that holds its own: written whole, checked whole, then copied into the tensors it has.

A version travels as one safetensors file with the names of the model's checkpoint on disk, or by a broadcast from the
trainer's memory; who reads it compares its sha256 first. Nothing is written into a model before all of it is checked.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo import rng
from gspo.errors import WeightSyncError
from gspo.faults import reached
from gspo.models.cache import quiet
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.sampling.remote.discovery import forget

# Largest |log-prob difference| of two right computations of the probe, by the type of the weights.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
MESSAGE_S = 60.0  # for a message, or for a process to come to it


class Published(NamedTuple):
    """A version as others find it: a file."""

    version: int
    path: Path
    sha256: str
    wait_s = 1.0  # between two questions whether a server has it

    def address(self, index: int, boot: str = "") -> str:
        """Where server `index`, started as `boot`, finds it."""
        return str(self.path.resolve())

    def deliver(self, index: int, boot: str = "") -> None:
        """A file is there, whoever comes for it."""

    def forget(self, newer: Published | Offer | None = None) -> None:
        """Remove it and its folder, but for a newer version that lies there."""
        keep = newer.path if isinstance(newer, Published) and newer.path.parent == self.path.parent else None
        forget(self.path.parent, keep=keep)


class Offer(NamedTuple):
    """A version in the trainer's memory, sent to every server that calls for it."""

    version: int
    sha256: str
    tensors: Mapping[str, Tensor]
    store: Any
    timeout_s: float
    answered: set[str]  # calls
    wait_s = 0.05  # as it is sent between two questions

    def address(self, index: int, boot: str = "") -> str:
        key, terms = self._key(index, boot), {"timeout_s": self.timeout_s}
        self.store.set(f"{key}/offer", json.dumps({"manifest": collective.manifest(self.tensors), **terms}))
        return f"{collective.SCHEME}{self.store.host}:{self.store.port}/{key}"

    def deliver(self, index: int, boot: str = "") -> None:
        """Send it, if the server has called; RuntimeError where its processes are gone or late."""
        call = collective.caller(self.store, self._key(index, boot))
        if call is None or call["call"] in self.answered:
            return
        self.answered.add(call["call"])
        # A store waits for one thing at a time, and servers are not to wait for each other.
        collective.send(self.store.clone(), call, self.tensors, self.timeout_s)

    def forget(self, newer: Published | Offer | None = None) -> None:
        """The tensors go with the last reference; what the store was told goes now."""
        own = (f"{self._key()}/", *(f"{call}/" for call in self.answered))
        for key in self.store.list_keys():
            if key.startswith(own):
                self.store.delete_key(key)

    def _key(self, *parts: object) -> str:
        """A server that has started anew is another one: nobody waits for the one before."""
        return "/".join(map(str, (f"{self.version}-{self.sha256[:16]}", *parts)))


class Hub:
    """Where servers meet the trainer for a broadcast: a store that listens at `host` alone.

    A server that is gone or late fails the sending to it after `timeout_s`, within which any message must arrive.
    """

    def __init__(self, host: str, timeout_s: float = MESSAGE_S) -> None:
        self.host, self._store, self._timeout_s = host, collective.meeting_place(host), timeout_s

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Offer:
        whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        return Offer(version, collective.digest(whole), whole, self._store, self._timeout_s, set())


def publish(folder: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
    """Write a version into `folder`, aside and then renamed: the file is whole or not there."""
    path = folder / f"weights_{version:08d}.safetensors"
    aside = folder / f".{path.name}.{os.getpid()}"
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # /dev/shm is everybody's
            raise PermissionError("somebody else has made this folder")
        with _private():
            save_file(whole, aside, metadata={"version": str(version)})
        digest = sha256_of(aside)
        reached("weights.publish")
        aside.replace(path)
    except (OSError, SafetensorError) as cause:
        aside.unlink(missing_ok=True)
        raise WeightSyncError(
            f"version {version} could not be written to {folder} ({cause}); make room there, or choose another place "
            "with actor.weight_update_mode (disk, shm)"
        ) from cause
    return Published(version, path, digest)


def read(path: str | Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a published file, if its bytes are those that were published; else WeightSyncError."""
    path = Path(path)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would never end
            raise WeightSyncError(f"{path} is not a file; the sampler keeps its weights")
        if (got := sha256_of(path)) != sha256:
            raise WeightSyncError(
                f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}… "
                f"({path.stat().st_size} bytes); the sampler keeps its weights"
            )
        return load_file(path)
    except (OSError, SafetensorError) as cause:
        raise WeightSyncError(f"{path} cannot be read ({cause}); the sampler keeps its weights") from cause


def fetch(address: str, sha256: str) -> dict[str, Tensor]:
    """The tensors of a published version, if they are what was published; else WeightSyncError."""
    if not address.startswith(collective.SCHEME):
        return read(address, sha256)
    try:
        return collective.receive(address, sha256, 0, 1)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as cause:  # whatever comes
        raise WeightSyncError(f"{cause}; the sampler keeps its weights") from cause


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightSyncError(f"weight {name!r} holds NaN or inf; the sampler keeps its weights")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into the model's parameters, all or nothing.

    Every trainable parameter must come, under one of its names, with its shape and dtype, and finite; nothing is
    written before all of it is checked.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    arrived: dict[Tensor, tuple[str, Tensor]] = {}
    for name, tensor in _as_parameters(model, dict(tensors), by_name).items():
        parameter = by_name.get(name)
        if parameter is None:
            raise WeightSyncError(f"weight {name!r} is not a parameter of {type(model).__name__}")
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise WeightSyncError(
                f"weight {name!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the sampler holds {tuple(parameter.shape)} {parameter.dtype}"
            )
        check_finite({name: tensor})
        if parameter in arrived and not torch.equal(arrived[parameter][1], tensor):
            raise WeightSyncError(f"weights {name!r} and {arrived[parameter][0]!r} are one tensor but came different")
        arrived[parameter] = (name, tensor)
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in arrived]
    if missing:
        raise WeightSyncError(f"{len(missing)} weights did not arrive, first {missing[0]!r}; the sampler keeps its own")
    with torch.no_grad():
        for parameter, (_, tensor) in arrived.items():
            reached("weights.copy")
            parameter.copy_(tensor)


def _as_parameters(model: Any, tensors: dict[str, Tensor], by_name: dict[str, Any]) -> dict[str, Tensor]:
    """Names of files to names of parameters: transformers holds the experts of a layer as one tensor, files do not."""
    if set(tensors) <= set(by_name):
        return tensors
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    own = revert_weight_conversion(model, {n: p.detach() for n, p in by_name.items() if n not in tied})
    for name, tensor in tensors.items():
        if name not in own and name not in tied:
            raise WeightSyncError(f"weight {name!r} is not a parameter of {type(model).__name__}")
        if name in own and (tensor.shape, tensor.dtype) != (own[name].shape, own[name].dtype):
            raise WeightSyncError(
                f"weight {name!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the sampler holds {tuple(own[name].shape)} {own[name].dtype}"
            )
    if missing := sorted(set(own) - set(tensors)):
        raise WeightSyncError(f"{len(missing)} weights did not arrive, first {missing[0]!r}; the sampler keeps its own")
    with quiet():
        converted = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=tensors, dtype=model.dtype
        )
    return dict(converted.named_parameters())


def probe_sequences(num_vocab: int, count: int = 3, length: int = 12) -> list[list[int]]:
    """Fixed random tokens whose log-probs tell whether two processes hold the same model."""
    return rng.generator(0, "weights probe").integers(0, num_vocab, (count, length)).tolist()


def sequence_logp(model: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Log-probs of every token but the first of each sequence, by a plain forward pass."""
    values = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([list(tokens)], device=model.device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
            logp = torch.log_softmax(logits.double(), -1).gather(1, ids[0, 1:, None])[:, 0]
            values.append(logp.float().cpu().numpy())
    return values


def differ(one: Sequence[NDArray], other: Sequence[NDArray], dtype: torch.dtype) -> str | None:
    """Why two probes are not of the same weights; None where they are."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return "the probe came back with another number of log-probs"
    gap = float(np.abs(np.concatenate(one) - np.concatenate(other)).max())
    bound = TOLERANCE.get(dtype, 0.2)
    if gap <= bound:  # NaN is not
        return None
    return f"log-probs of the probe differ by {gap:.2g} (allowed {bound:g}): it samples from another model"


@contextlib.contextmanager
def _private():
    """New files are for their owner alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


Score = Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]]
