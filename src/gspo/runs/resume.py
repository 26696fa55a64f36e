"""Resume a run from its newest valid checkpoint. A run directory with damaged checkpoints never restarts silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gspo.errors import CheckpointError, ConfigError
from gspo.runs import checkpoint
from gspo.runs.directory import RunDir
from gspo.runs.state import State


def resume(
    run: RunDir,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None,
    *,
    identity: Mapping[str, Any],
    say: Callable[[str], None],
    allowed: bool = True,
    changed_settings: Callable[[Path], list[str]],
) -> State | None:
    """The state of the newest valid checkpoint, after loading its weights and moments; None in a new directory.

    identity: what must be equal to the checkpoint's; changed_settings: given the run's config.yaml, the settings that
    differ from this run's, as `key: before → after`.
    """
    # A run that ended before its first checkpoint has metrics only, and still counts as used.
    found = checkpoint.steps(run.checkpoints)
    used = bool(found) or (run.path / "metrics.jsonl").exists()
    if used and not allowed:
        raise ConfigError(
            f"{run.path} already holds a run; set recover.mode=auto to resume it, trial_name to start another run, "
            "or remove the folder"
        )
    if not found:
        if used:
            say(f"{run.path} has no checkpoint (the run ended before its first one): starting again from step 0")
        # Also deletes the rows and samples of step 0, because training starts again there.
        run.cut_back(-1)
        return None
    for folder, manifest in checkpoint.latest(run.checkpoints):
        # Damaged: report it and try the next older checkpoint.
        if isinstance(manifest, CheckpointError):
            say(f"ignored: {manifest}")
            continue
        # Before the load: a changed setting gives a clearer message than tensors that do not match.
        _refuse_other_settings(run, changed_settings)
        stored = checkpoint.load_checkpoint(folder, policy, optimizer, critic)
        # The identity is stored beside the fields of State, which does not have it.
        theirs = {"products": "torch", **stored.pop("identity")}  # checkpoints of 0.1 have no products
        before, now = theirs.pop("ranks", 1), identity.get("ranks", 1)
        # Threads decide how sums round, and so do ranks: with other ranks the threads need not be equal either.
        free = ("ranks",) if before == now else ("ranks", "threads")
        if odd := {k: (theirs.get(k), v) for k, v in identity.items() if k not in free and theirs.get(k) != v}:
            raise ConfigError(_other_identity(folder, odd))
        state = State.from_json(stored)
        # The steps after the checkpoint are trained again, so their metrics and samples would appear twice.
        run.cut_back(state.step)
        say(f"resumed from {folder} at step {state.step}")
        if before != now:
            say(f"ranks changed from {before} to {now}: the run continues up to rounding, not bit for bit")
        return state
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {run.checkpoints} is valid; move them away to start again"
    )


def _other_identity(folder: Path, odd: Mapping[str, tuple[Any, Any]]) -> str:
    changes = "; ".join(f"{name}: {before} → {now}" for name, (before, now) in odd.items())
    if odd.keys() == {"products"}:
        before, now = odd["products"]
        remedy = "install the version of gspo that began the run (environment.json)"
        if before == "torch":
            remedy = "set the environment variable GSPO_NATIVE=0"
        elif now == "torch":
            remedy = "install a C compiler (gcc) and unset GSPO_NATIVE"
        return (
            f"{folder} was sampled with other compiled operators ({changes}), which round differently; {remedy} to "
            "resume, or set trial_name to start a new run"
        )
    if odd.keys() == {"objective"}:
        return (
            f"the file that defines the objective (algorithm) has changed since {folder} was written: it is another "
            "objective. Undo the change to resume, or set trial_name to start a new run"
        )
    same = f"threads={odd['threads'][0]} to continue this one, or " if odd.keys() == {"threads"} else ""
    return f"{folder} belongs to another run ({changes}); set {same}trial_name to start a new one"


def _refuse_other_settings(run: RunDir, changed_settings: Callable[[Path], list[str]]) -> None:
    file = run.path / "config.yaml"
    if file.exists() and (changes := changed_settings(file)):
        raise ConfigError(
            f"{run.path} was started with other settings:\n  "
            + "\n  ".join(changes)
            + "\nset trial_name (or pass --new to gspo train) to start another run, or undo the change"
        )
