"""Checkpoints: safetensors by parameter name, a JSON state, and a manifest with the sha256 of every file.

    checkpoints/step_000120/  model.safetensors  optimizer.safetensors  state.json  manifest.json

With an adapter, model.safetensors holds the adapter alone, and the manifest holds the digest of the frozen weights.
A run with a critic adds critic.safetensors and critic_optimizer.safetensors. Groups that were sampled ahead of the step
are in waiting.safetensors and waiting.json. Only a resumed run reads these four.
A checkpoint is written to a temporary folder, synced and renamed, so it is complete or absent. It does not depend on
the number of ranks. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file as _load_file
from safetensors.torch import save_file as _save_file
from torch import nn

from gspo.errors import CheckpointError
from gspo.faults import reached
from gspo.learner import copy_into, like, whole
from gspo.system import by_name, fsync, read_json, sha256, step_name, step_of, write_errors

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
CRITIC_FILES = ("critic.safetensors", "critic_optimizer.safetensors")
PENDING_FILES = ("waiting.safetensors", "waiting.json")
_FILE_SETS = [{*FILES, *critic, *pending} for critic in ((), CRITIC_FILES) for pending in ((), PENDING_FILES)]
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

PendingGroups = tuple[Mapping[str, torch.Tensor], Sequence[Mapping[str, Any]]]  # as `rollout.storage.pack` returns them


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    config: str,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    pending_groups: PendingGroups | None = None,
) -> Path:
    """Publish the checkpoint of `step`; returns its folder. `config` is the digest of the resolved config."""
    names = (*FILES, *(CRITIC_FILES if critic is not None else ()), *(PENDING_FILES if pending_groups else ()))
    target = root / step_name(step)
    tmp = root / f".{target.name}.tmp"
    try:
        with write_errors(target):
            root.mkdir(parents=True, exist_ok=True)
            # A killed process may have left this folder.
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
            # Gathering a sharded tensor is a collective operation: `contribute` gathers in the same order on the other
            # ranks.
            _write(tmp / FILES[0], _weights(model))
            _write(tmp / FILES[1], _moments(model, optimizer) if optimizer is not None else {})
            if critic is not None:
                _write(tmp / CRITIC_FILES[0], _weights(critic[0]))
                _write(tmp / CRITIC_FILES[1], _moments(*critic))
            for name, content in zip(PENDING_FILES, pending_groups or (), strict=False):
                _write(tmp / name, content)
            _write(tmp / FILES[2], state)
            # The manifest is written last, because it holds the sha256 of every other file.
            manifest = {
                "format": FORMAT,
                "step": step,
                "config": config,
                "files": {name: {"sha256": sha256(tmp / name), "bytes": (tmp / name).stat().st_size} for name in names},
            }
            if (frozen := base(model)) is not None:
                manifest["base"] = frozen
            manifest["sha256"] = _own_sha256(manifest)
            _write(tmp / "manifest.json", manifest)
            # Sync the files and their folder before the rename: after a power failure the name must not exist without
            # the data.
            for name in (*names, "manifest.json"):
                _sync(tmp / name)
            _sync(tmp)
            # A resumed run replaces an older checkpoint of the same step.
            if target.exists():
                _remove(target, "checkpoint.replace")
            reached("checkpoint.rename")
            # The rename publishes the checkpoint atomically. It needs an absent target: a folder that is not empty
            # cannot be replaced.
            os.rename(tmp, target)
            # The new name itself is durable only after the parent folder is synced.
            _sync(root)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return target


def contribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> None:
    """Other ranks call this while rank 0 saves: they take part in gathering each tensor and keep none."""
    # The same order of collectives as in `save`; another order would deadlock or mix up tensors.
    for trained, moments in ((model, optimizer), *([critic] if critic is not None else [])):
        _weights(trained)
        _moments(trained, moments)


def steps(root: Path) -> list[int]:
    """Published checkpoints, oldest first."""
    if not root.is_dir():
        return []
    # A name with a dot is a temporary folder, which is not published.
    return sorted(step for p in root.iterdir() if "." not in p.name and (step := step_of(p.name)) is not None)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, if every file has the recorded size and sha256; else a CheckpointError that names the file."""
    file = folder / "manifest.json"
    try:
        manifest = read_json(file, CheckpointError)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {manifest['format']}, this version reads {FORMAT}")
        # The manifest's own sha256 covers all of it except this entry.
        listed, own = manifest["files"], manifest.pop("sha256")
        if own != _own_sha256(manifest) or set(listed) not in _FILE_SETS:
            raise CheckpointError(f"{file} is damaged: its own sha256 does not match")
        # Each file can be intact although the folder has another step's name.
        if folder.name != step_name(manifest["step"]):
            raise CheckpointError(f"{folder} holds step {manifest['step']}: folders were renamed or swapped")
        for name in listed:
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            # The size is compared first: a truncated file is found without reading it.
            if file.stat().st_size != listed[name]["bytes"] or sha256(file) != listed[name]["sha256"]:
                raise CheckpointError(f"{file} is damaged: its sha256 differs from the manifest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"{file} is missing or damaged ({cause})") from cause
    return manifest


def latest(root: Path) -> Iterator[tuple[Path, dict[str, Any] | CheckpointError]]:
    """Checkpoints from the newest to the oldest, each with its manifest or the error that `verify` raised."""
    for step in reversed(steps(root)):
        folder = root / step_name(step)
        try:
            yield folder, verify(folder)
        except CheckpointError as problem:
            yield folder, problem


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Load the weights and optimizer moments of a verified checkpoint; returns its state."""
    # Before any weights are loaded: an adapter would load into another base model without an error.
    _refuse_other_base(folder, model)
    _load_weights(folder, FILES[0], model)
    if optimizer is not None:
        _load_moments(model, optimizer, _read(folder / FILES[1]))
    if critic is not None:
        if not (folder / CRITIC_FILES[0]).is_file():
            raise CheckpointError(f"{folder} has no critic: its run had none; set trial_name to start another run")
        _load_weights(folder, CRITIC_FILES[0], critic[0])
        _load_moments(*critic, _read(folder / CRITIC_FILES[1]))
    return read_json(folder / FILES[2], CheckpointError)


def stored_dtype(folder: Path, default: torch.dtype) -> torch.dtype:
    """The dtype of the weights in a checkpoint, or of the frozen weights under its adapter. Verifies the checkpoint."""
    base = verify(folder).get("base")
    if base:
        return getattr(torch, base["dtype"])
    file = folder / FILES[0]
    try:
        # Only the header is read, not the tensors.
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            return _DTYPES.get(tensors.get_slice(names[0]).get_dtype(), default) if names else default
    except SafetensorError as cause:
        raise CheckpointError(f"{file} cannot be read as safetensors ({cause})") from cause


def load_pending_groups(folder: Path) -> PendingGroups | None:
    """The groups that a verified checkpoint holds, for `rollout.storage.unpack`; None if it holds none."""
    # A checkpoint without pending groups has neither of the two files.
    if not (folder / PENDING_FILES[1]).is_file():
        return None
    return _read(folder / PENDING_FILES[0]), read_json(folder / PENDING_FILES[1], CheckpointError, kind=list)


def _load_weights(folder: Path, file: str, model: nn.Module) -> None:
    weights = _read(folder / file)
    own = dict(_trained(model))
    # All names, shapes and dtypes are checked before the first tensor is copied, so the model is never half loaded.
    if set(weights) != set(own):
        odd = sorted(set(weights) ^ set(own))[:4]
        raise CheckpointError(f"{folder} belongs to another model: tensors {', '.join(odd)} are not in both")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the model has {own[name].dtype} "
                f"{tuple(own[name].shape)}"
            )
    for name, parameter in own.items():
        copy_into(parameter, weights[name])


def _refuse_other_base(folder: Path, model: nn.Module) -> None:
    """An adapter works only on the frozen weights that it was trained on."""
    theirs, own = read_json(folder / "manifest.json", CheckpointError).get("base"), base(model)
    if theirs != own:
        was = (
            "no adapter"
            if theirs is None
            else f"an adapter on frozen weights {theirs['sha256'][:12]} ({theirs['dtype']})"
        )
        now = "no adapter" if own is None else f"frozen weights {own['sha256'][:12]} ({own['dtype']})"
        raise CheckpointError(
            f"{folder} holds {was}, but the model of actor.path has {now}: it is not the base model of this run. Set "
            "actor.path (and actor.use_lora, actor.dtype) as in the run, or trial_name to start another run"
        )


def prune(root: Path, step: int, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best; call it after the checkpoint of `step` is published.

    A checkpoint after `step` is a damaged one that the resumed run ignored; it does not count as one of the newest.
    """
    found = steps(root)
    whole = [s for s in found if s <= step]
    for s in found:
        if s not in whole[-keep:] and s != best:
            _remove(root / step_name(s), "checkpoint.prune")
    # Folders that a killed process left, either while writing or while deleting.
    for debris in root.glob(".step_*.tmp"):
        shutil.rmtree(debris, ignore_errors=True)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # named_parameters lists a tied weight once. Frozen weights belong to the base model and are not saved.
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).contiguous() for name, p in _trained(model)}


_bases: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # frozen weights are hashed once


def base(model: nn.Module) -> dict[str, str] | None:
    """Digest and dtype of the frozen weights; None if all weights are trained."""
    # The digest needs whole tensors: `train/build/learner.py` calls this before the model is sharded.
    # Codes of quantised weights are integers; the dtype is that of the computation.
    frozen = next((p for p in model.parameters() if not p.requires_grad and p.is_floating_point()), None)
    if frozen is None:
        return None
    if model not in _bases:
        _bases[model] = {
            "sha256": by_name("gspo.models.lora:base_digest")(model),
            "dtype": str(frozen.dtype).removeprefix("torch."),
        }
    return _bases[model]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    # The optimizer knows parameters as objects; names are stable across processes and ranks. Keys are
    # `parameter/moment`.
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": whole(value.detach()).contiguous()
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    by_name: dict[str, Any] = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        p = by_name[name]
        if (device := getattr(optimizer, "state_device", None)) is not None:
            optimizer.state[p][moment] = value.to(device)
            continue
        # Adam's step counter is one number; the other moments are sharded as the parameter is.
        optimizer.state[p][moment] = like(p, value) if value.shape == p.shape else value.to(p.device)


def _own_sha256(manifest: Mapping[str, Any]) -> str:
    """The sha256 of the manifest itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return _load_file(file)
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(f"{file} cannot be read as safetensors ({cause})") from cause


def _write(file: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Tensors as safetensors, anything else as JSON."""
    reached("checkpoint.file")
    if file.suffix == ".safetensors":
        _save_file(dict(content), file)
    else:
        # NaN is not valid JSON; fail here and not when a resumed run reads the file.
        file.write_text(json.dumps(content, indent=1, allow_nan=False))


def _remove(folder: Path, site: str) -> None:
    """Rename, then delete: a kill in between never leaves half a checkpoint under a valid name."""
    reached(site)
    tmp = folder.with_name(f".{folder.name}.gone.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        os.rename(folder, tmp)
    except FileNotFoundError:
        return
    shutil.rmtree(tmp, ignore_errors=True)


def _sync(path: Path) -> None:
    reached("checkpoint.sync")
    fsync(path)
