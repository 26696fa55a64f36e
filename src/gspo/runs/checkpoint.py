"""Checkpoints: safetensors by parameter name, a JSON state, and a manifest that vouches for every byte.

    checkpoints/step_000120/  model.safetensors  optimizer.safetensors  state.json  manifest.json

With an adapter, model.safetensors holds the adapter alone and the manifest the digest of the frozen weights under it.
With a critic also critic.safetensors and critic_optimizer.safetensors, and with groups that were sampled ahead of the
step waiting.safetensors and waiting.json; only going on needs these.
A checkpoint is written aside, synced, and renamed into place; it is whole or it is not there. Nothing in it depends on
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
from safetensors import SafetensorError
from safetensors.torch import load_file as _load_file
from safetensors.torch import save_file as _save_file
from torch import nn

from gspo.errors import CheckpointError
from gspo.faults import reached
from gspo.learner.policy.sharding import like, put, whole
from gspo.models.lora import base_digest
from gspo.runs.directory import writing

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
CRITIC_FILES = ("critic.safetensors", "critic_optimizer.safetensors")
WAITING_FILES = ("waiting.safetensors", "waiting.json")
_FILE_SETS = [{*FILES, *critic, *waiting} for critic in ((), CRITIC_FILES) for waiting in ((), WAITING_FILES)]

Waiting = tuple[Mapping[str, torch.Tensor], Sequence[Mapping[str, Any]]]  # as `waiting.pack` makes it


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    config: str,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    waiting: Waiting | None = None,
) -> Path:
    """Publish step's checkpoint; returns its folder. `config` is the digest of the resolved configuration."""
    names = (*FILES, *(CRITIC_FILES if critic is not None else ()), *(WAITING_FILES if waiting else ()))
    target = root / f"step_{step:06d}"
    aside = root / f".{target.name}.tmp"
    try:
        with writing(target):
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            _write(aside / FILES[0], _weights(model))
            _write(aside / FILES[1], _moments(model, optimizer) if optimizer is not None else {})
            if critic is not None:
                _write(aside / CRITIC_FILES[0], _weights(critic[0]))
                _write(aside / CRITIC_FILES[1], _moments(*critic))
            for name, content in zip(WAITING_FILES, waiting or (), strict=False):
                _write(aside / name, content)
            _write(aside / FILES[2], state)
            manifest = {
                "format": FORMAT,
                "step": step,
                "config": config,
                "files": {
                    name: {"sha256": _sha256(aside / name), "bytes": (aside / name).stat().st_size} for name in names
                },
            }
            if (frozen := base(model)) is not None:
                manifest["base"] = frozen
            manifest["sha256"] = _own_sha256(manifest)
            _write(aside / "manifest.json", manifest)
            for name in (*names, "manifest.json"):
                _sync(aside / name)
            _sync(aside)
            # An older checkpoint of the same step can only be one that a resumed run is replacing.
            if target.exists():
                _remove(target, "checkpoint.replace")
            reached("checkpoint.rename")
            os.rename(aside, target)
            _sync(root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def contribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> None:
    """What every rank but the first does while that one saves: gather tensor after tensor, and keep none."""
    for trained, moments in ((model, optimizer), *([critic] if critic is not None else [])):
        _weights(trained)
        _moments(trained, moments)


def steps(root: Path) -> list[int]:
    """Published checkpoints, oldest first."""
    if not root.is_dir():
        return []
    names = (p.name.removeprefix("step_") for p in root.iterdir() if p.name.startswith("step_"))
    return sorted(int(name) for name in names if name.isdigit())


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, if every file is as it was written; else CheckpointError naming the file."""
    file = folder / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {manifest['format']}, this version reads {FORMAT}")
        listed, own = manifest["files"], manifest.pop("sha256")
        if own != _own_sha256(manifest) or set(listed) not in _FILE_SETS:
            raise CheckpointError(f"{file} is damaged: its sha256 is not its own")
        if folder.name != f"step_{manifest['step']:06d}":
            raise CheckpointError(f"{folder} holds step {manifest['step']}: folders were renamed or swapped")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"{file} is missing or damaged ({cause})") from cause
    for name in listed:
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != listed[name]["bytes"] or _sha256(file) != listed[name]["sha256"]:
            raise CheckpointError(f"{file} is damaged: its sha256 is not the manifest's")
    return manifest


def latest(root: Path) -> Iterator[tuple[Path, dict[str, Any] | CheckpointError]]:
    """Checkpoints from the newest back: each with its manifest, or with what is wrong with it."""
    for step in reversed(steps(root)):
        folder = root / f"step_{step:06d}"
        try:
            yield folder, verify(folder)
        except CheckpointError as problem:
            yield folder, problem


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Put a verified checkpoint's weights and moments into place; returns its state."""
    _refuse_other_base(folder, model)
    _load_weights(folder, FILES[0], model)
    if optimizer is not None:
        _load_moments(model, optimizer, _read(folder / FILES[1]))
    if critic is not None:
        if not (folder / CRITIC_FILES[0]).is_file():
            raise CheckpointError(
                f"{folder} has no critic: it is of a run without one; set trial_name to start another"
            )
        _load_weights(folder, CRITIC_FILES[0], critic[0])
        _load_moments(*critic, _read(folder / CRITIC_FILES[1]))
    return json.loads((folder / FILES[2]).read_text())


def load_waiting(folder: Path) -> Waiting | None:
    """The groups that a verified checkpoint holds, for `waiting.unpack`; None where it holds none."""
    if not (folder / WAITING_FILES[1]).is_file():
        return None
    return _read(folder / WAITING_FILES[0]), json.loads((folder / WAITING_FILES[1]).read_text())


def _load_weights(folder: Path, file: str, model: nn.Module) -> None:
    weights = _read(folder / file)
    own = dict(_trained(model))
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
        put(parameter, weights[name])


def _refuse_other_base(folder: Path, model: nn.Module) -> None:
    """An adapter means nothing on other weights than those it was trained on."""
    theirs, own = json.loads((folder / "manifest.json").read_bytes()).get("base"), base(model)
    if theirs != own:
        was = (
            "no adapter"
            if theirs is None
            else f"an adapter on frozen weights {theirs['sha256'][:12]} ({theirs['dtype']})"
        )
        now = "no adapter" if own is None else f"frozen weights {own['sha256'][:12]} ({own['dtype']})"
        raise CheckpointError(
            f"{folder} holds {was}, but the model of actor.path has {now}: it is not the base that this run was "
            "trained on. Set actor.path (and actor.use_lora, actor.dtype) as in the run, or trial_name to start another"
        )


def prune(root: Path, step: int, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` and the best; called only after the checkpoint of `step` was published.

    One that lies beyond it was found damaged when the run resumed from an older one, and must not count as the newest.
    """
    found = steps(root)
    whole = [s for s in found if s <= step]
    for s in found:
        if s not in whole[-keep:] and s != best:
            _remove(root / f"step_{s:06d}", "checkpoint.prune")
    for debris in root.glob(".step_*.tmp"):
        shutil.rmtree(debris, ignore_errors=True)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # named_parameters lists a tied weight once; what is frozen is the base model's, and not ours to keep.
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).contiguous() for name, p in _trained(model)}


_bases: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # frozen weights are read once


def base(model: nn.Module) -> dict[str, str] | None:
    """Digest and type of the frozen weights; None where all are trained."""
    # Read whole, before a model is cut over ranks: `train/setup.py` asks for it then.
    frozen = next((p for p in model.parameters() if not p.requires_grad), None)
    if frozen is None:
        return None
    if model not in _bases:
        _bases[model] = {"sha256": base_digest(model), "dtype": str(frozen.dtype).removeprefix("torch.")}
    return _bases[model]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
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
        # The step counter is one number for all of it; the rest is as the parameter is, cut or whole.
        optimizer.state[p][moment] = like(p, value) if value.shape == p.shape else value.to(p.device)


def _own_sha256(manifest: Mapping[str, Any]) -> str:
    """The manifest vouches for itself, too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
        file.write_text(json.dumps(content, indent=1, allow_nan=False))


def _remove(folder: Path, site: str) -> None:
    """First out of sight, then away: a kill in between leaves debris, never half a checkpoint under a good name."""
    reached(site)
    aside = folder.with_name(f".{folder.name}.gone.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    reached("checkpoint.sync")
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
