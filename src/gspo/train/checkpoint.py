"""Checkpoints: safetensors by parameter name, a JSON state, and a manifest that vouches for every byte.

    checkpoints/step_000120/  model.safetensors  optimizer.safetensors  state.json  manifest.json

A checkpoint is written aside, synced, and renamed into place; it is whole or it is not there. Nothing in it depends on
the number of ranks. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gspo.errors import CheckpointError
from gspo.train.rundir import writing

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    config: str,
) -> Path:
    """Publish step's checkpoint; returns its folder. `config` is the digest of the resolved configuration."""
    target = root / f"step_{step:06d}"
    aside = root / f".{target.name}.tmp"
    try:
        with writing(target):
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            save_file(_weights(model), aside / FILES[0])
            save_file(_moments(model, optimizer) if optimizer is not None else {}, aside / FILES[1])
            (aside / FILES[2]).write_text(json.dumps(state, indent=1, allow_nan=False))
            manifest = {
                "format": FORMAT,
                "step": step,
                "config": config,
                "files": {
                    name: {"sha256": _sha256(aside / name), "bytes": (aside / name).stat().st_size} for name in FILES
                },
            }
            manifest["sha256"] = _own_sha256(manifest)
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for name in (*FILES, "manifest.json"):
                _sync(aside / name)
            _sync(aside)
            # An older checkpoint of the same step can only be one that a resumed run is replacing.
            if target.exists():
                shutil.rmtree(target)
            os.rename(aside, target)
            _sync(root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


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
        if own != _own_sha256(manifest) or set(listed) != set(FILES):
            raise CheckpointError(f"{file} is damaged: its sha256 is not its own")
        if folder.name != f"step_{manifest['step']:06d}":
            raise CheckpointError(f"{folder} holds step {manifest['step']}: folders were renamed or swapped")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"{file} is missing or damaged ({cause})") from cause
    for name in FILES:
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


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Put a verified checkpoint's weights and moments into place; returns its state."""
    weights = load_file(folder / FILES[0])
    own = _weights(model)
    if set(weights) != set(own):
        odd = sorted(set(weights) ^ set(own))[:4]
        raise CheckpointError(f"{folder} belongs to another model: tensors {', '.join(odd)} are not in both")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the model has {own[name].dtype} "
                f"{tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    if optimizer is not None:
        _load_moments(model, optimizer, load_file(folder / FILES[1]))
    return json.loads((folder / FILES[2]).read_text())


def prune(root: Path, step: int, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` and the best; called only after the checkpoint of `step` was published.

    One that lies beyond it was found damaged when the run resumed from an older one, and must not count as the newest.
    """
    found = steps(root)
    whole = [s for s in found if s <= step]
    for s in found:
        if s not in whole[-keep:] and s != best:
            shutil.rmtree(root / f"step_{s:06d}", ignore_errors=True)
    for debris in root.glob(".step_*.tmp"):
        shutil.rmtree(debris, ignore_errors=True)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    # named_parameters lists a tied weight once.
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": value.detach().contiguous()
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
        # The step counter stays where the fused kernel wants it: with the parameter, in float32.
        optimizer.state[p][moment] = value.to(p.device)


def _own_sha256(manifest: Mapping[str, Any]) -> str:
    """The manifest vouches for itself, too."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
