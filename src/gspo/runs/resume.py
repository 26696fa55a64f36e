"""Going on where a run was left: the last good checkpoint, if it is this run's. Never a silent start from scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gspo.config import Config, load
from gspo.errors import CheckpointError, ConfigError
from gspo.runs import checkpoint
from gspo.runs.directory import RunDir
from gspo.runs.state import State

# Keys that may change between a run and its resumption: they decide when to look and what to show, not what is learnt.
FREE = (
    "total_train_steps", "total_train_epochs", "strict", "on_alarm", "stall_timeout", "profile", "saver", "recover",
    "evaluator", "stats_logger", "rollout.dump_to_file", "rollout.request_timeout", "rollout.request_retries",
    "reward.timeout", "reward.workers", "cluster", "scheduler", "actor.backend",
)  # fmt: skip


def resume(
    run: RunDir,
    config: Config,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    say: Callable[[str], None],
    critic: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> State | None:
    """The state of the newest whole checkpoint, its weights and moments put into place; None in a new directory."""
    found = checkpoint.steps(run.checkpoints)
    used = bool(found) or (run.path / "metrics.jsonl").exists()
    if used and config.recover.mode == "disabled":
        raise ConfigError(
            f"{run.path} holds a run already; set recover.mode=auto to resume it, trial_name to start another, "
            "or remove the folder"
        )
    if not found:
        if used:
            say(f"{run.path} was left before its first checkpoint: starting again from step 0")
        run.cut_back(-1)
        return None
    for folder, manifest in checkpoint.latest(run.checkpoints):
        if isinstance(manifest, CheckpointError):
            say(f"ignored: {manifest}")
            continue
        _refuse_other_settings(run, config)
        stored = checkpoint.load(folder, policy, optimizer, critic)
        theirs = stored.pop("identity")
        before, now = theirs.pop("ranks", 1), identity.get("ranks", 1)
        # Threads decide how sums round; so do ranks, and where these change nothing is bit for bit any more.
        free = ("ranks",) if before == now else ("ranks", "threads")
        if odd := [f"{k}: {theirs.get(k)} → {v}" for k, v in identity.items() if k not in free and theirs.get(k) != v]:
            raise ConfigError(f"{folder} is of another run ({'; '.join(odd)}); set trial_name to start a new one")
        state = State(**stored)
        run.cut_back(state.step)
        say(f"resumed from {folder} at step {state.step}")
        if before != now:
            say(f"its ranks were {before} and are {now}: the run goes on up to rounding, not bit for bit")
        return state
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {run.checkpoints} can be used; move them away to start afresh"
    )


def _refuse_other_settings(run: RunDir, config: Config) -> None:
    file = run.path / "config.yaml"
    if file.exists() and (changes := changed_keys(load(file).config, config)):
        raise ConfigError(
            f"{run.path} was started with other settings:\n  "
            + "\n  ".join(changes)
            + "\nset trial_name to start another run, or undo the change"
        )


def changed_keys(before: Config, after: Config) -> list[str]:
    """`key: before → after` for every key that decides what is learnt."""
    had, has = _flat(before.model_dump()), _flat(after.model_dump())
    optimizers = [after.actor.optimizer, *([after.critic.optimizer] if after.critic is not None else [])]
    # A schedule and a warm-up are shares of the whole: then its length decides every learning rate.
    scheduled = any(o.lr_scheduler_type != "constant" or o.warmup_steps_proportion > 0 for o in optimizers)
    free = tuple(f for f in FREE if not (scheduled and f.startswith("total_train")))
    return [
        f"{key}: {had.get(key)!r} → {has.get(key)!r}"
        for key in sorted(had.keys() | has.keys())
        if had.get(key) != has.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
