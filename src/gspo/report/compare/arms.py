"""Arms: runs whose configs differ only in seed, names and keys that do not change training; where arms differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gspo.report.compare.runs import ComparedRun
from gspo.stats import Floats, t_half

# Runs of one arm may differ in these keys: seed, names, and keys that do not change training.
NAMES = ("seed", "experiment_name", "trial_name", "cluster.fileroot")
NO_EFFECT_ON_TRAINING = ("stats_logger", "saver", "recover", "profile", "stall_timeout", "on_alarm", "strict")


class _Missing:
    def __repr__(self) -> str:
        return "—"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class Band:
    """A metric of an arm: mean over its runs and the ends of the 95 % t interval (equal to the mean for one run)."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[ComparedRun, ...]

    def band(self, metric: str) -> Band:
        """Over the steps that all runs with this metric cover; values between two measured steps are interpolated."""
        curves = [curve for run in self.runs if len((curve := run.curve(metric))[0])]
        if not curves:
            return Band(*(np.empty(0) for _ in range(4)))
        first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        # steps: [S], all measured steps in the range that every run covers; values: [runs, S].
        steps = np.unique(np.concatenate([x for x, _ in curves]))
        steps = steps[(steps >= first) & (steps <= last)]
        values = np.stack([np.interp(steps, x, y) for x, y in curves])
        mean, half = values.mean(0), t_half(values)
        return Band(steps, mean, mean - half, mean + half)

    @cached_property
    def figures(self) -> dict[str, Floats]:
        """Each figure over the runs that have it."""
        seen = [run.figures() for run in self.runs]
        return {name: np.array([f[name] for f in seen if f[name] is not None], dtype=np.float64) for name in seen[0]}


def group(runs: Sequence[ComparedRun]) -> list[Arm]:
    """Arms in the order of their first run."""
    arms: dict[str, list[ComparedRun]] = {}
    for run in runs:
        # repr: config values may be lists and mappings, which are not hashable.
        arms.setdefault(repr(sorted(_training_keys(run.config).items())), []).append(run)
    names = _arm_names(list(arms.values()))
    return [Arm(name, tuple(members)) for name, members in zip(names, arms.values(), strict=True)]


def _training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    apart = (*NAMES, *NO_EFFECT_ON_TRAINING)
    return {k: v for k, v in config.items() if not any(k == a or k.startswith(f"{a}.") for a in apart)}


def _arm_names(arms: Sequence[Sequence[ComparedRun]]) -> list[str]:
    """The common prefix of the runs' names; with the experiment's name, then a number, where that is not unique."""

    def common(names: Sequence[str]) -> str:
        shared = names[0]
        for name in names[1:]:
            shared = "".join(a for a, _ in _same_start(shared, name))
        return shared.rstrip("0123456789").removesuffix("seed").rstrip("-_. /=") if len(names) > 1 else shared

    short = [common([run.path.name for run in runs]) for runs in arms]
    # Names of the trials alone are not unique: add the experiment's name.
    if len(set(short)) < len(short) or not all(short):
        short = [common([run.name for run in runs]) or runs[0].name for runs in arms]
    return [f"{name} ({short[:i].count(name) + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]


def _same_start(a: str, b: str) -> list[tuple[str, str]]:
    pairs = list(zip(a, b, strict=False))
    return pairs[: next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))]


def differences(arms: Sequence[Arm]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Keys whose value differs between arms, with the value in each arm."""
    configs = [_training_keys(arm.runs[0].config) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = ((key, tuple(config.get(key, MISSING) for config in configs)) for key in keys)
    return tuple((key, values) for key, values in rows if any(repr(v) != repr(values[0]) for v in values))
