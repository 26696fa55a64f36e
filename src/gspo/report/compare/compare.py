"""Runs side by side, `gspo compare`: which differ only in their seed, where configs differ, what each came to.

Runs whose configs are equal but for seed, names and what only watches form one arm: its curves are the mean over its
runs with a 95 % t-interval. Reads run directories alone; `compare_view` and `compare_page` show what this finds.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import ConfigError
from gspo.report.read import Row, accuracy_interval, is_run, open_run, read_config, read_metrics
from gspo.report.summary import ENDS
from gspo.stats import Floats, percent, spread, t_half, welch_half

# What two runs of one arm may differ in: the draw, their names, and keys that look on without touching what is learnt.
NAMES = ("seed", "experiment_name", "trial_name", "cluster.fileroot")
WATCHING = ("stats_logger", "saver", "recover", "profile", "stall_timeout", "on_alarm", "strict")
CURVES = (
    "eval/accuracy", "reward/mean", "clip/sequences", "policy/entropy", "length/mean", "policy/kl_behavior",
    "grad/norm", "time/step_s",
)  # fmt: skip
GOAL = 0.8  # held-out accuracy whose cost in samples is told


@dataclass(frozen=True)
class Run:
    """One run directory: its config as dotted keys, its rows by step."""

    path: Path
    config: Mapping[str, Any]
    rows: Mapping[int, Row]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def steps(self) -> int:
        return max(self.rows, default=0)

    @property
    def planned(self) -> int | None:
        total = self.config.get("total_train_steps")
        return total if isinstance(total, int) else None

    def curve(self, metric: str) -> tuple[Floats, Floats]:
        """Steps and values of a metric, where it was measured; clip/sequences is both sides together."""
        seen = [(step, value_of(row, metric)) for step, row in self.rows.items()]
        kept = [(step, value) for step, value in seen if value is not None]
        steps, values = zip(*kept, strict=True) if kept else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def figures(self) -> dict[str, float | None]:
        """What it came to; None where nothing was measured."""
        at, accuracy = self.curve("eval/accuracy")
        best = int(np.argmax(accuracy)) if len(accuracy) else None
        seconds = [
            value - (value_of(row, "time/eval_s") or 0.0)
            for row in self.rows.values()
            if (value := value_of(row, "time/step_s")) is not None
        ]
        return {
            "accuracy_start": _first(accuracy),
            "accuracy_end": _first(accuracy[::-1]),
            "accuracy_best": None if best is None else float(accuracy[best]),
            "best_step": None if best is None else float(at[best]),
            "samples_to_goal": self.samples_to(GOAL),
            "reward_end": _mean(self.curve("reward/mean")[1][-ENDS:]),
            "clipped_low": _mean(self.curve("clip/sequences_low")[1]),
            "clipped_high": _mean(self.curve("clip/sequences_high")[1]),
            "entropy_end": _mean(self.curve("policy/entropy")[1][-ENDS:]),
            "length_end": _mean(self.curve("length/mean")[1][-ENDS:]),
            "seconds": float(np.median(seconds)) if seconds else None,  # a pause of the machine is no step
        }

    def samples_to(self, accuracy: float) -> float | None:
        """Samples drawn until an evaluation first reached this accuracy, refilled groups among them."""
        at, seen = self.curve("eval/accuracy")
        reached = at[seen >= accuracy]
        prompts = self.config.get("rollout.consumer_batch_size") or self.config.get("train_dataset.batch_size")
        group = self.config.get("gconfig.n_samples")
        if not len(reached) or not isinstance(prompts, int) or not isinstance(group, int):
            return None
        step = int(reached[0])
        refilled = sum(value_of(row, "reward/refilled_groups") or 0 for at, row in self.rows.items() if at <= step)
        return float((step * prompts + refilled) * group)

    def accuracy_at(self, step: int) -> float | None:
        """Of the last evaluation up to `step`."""
        at, seen = self.curve("eval/accuracy")
        return _first(seen[at <= step][::-1])

    def accuracy_ends(self) -> tuple[float, float] | None:
        """The 95 % interval of its last evaluation, over problems."""
        rows = [row for row in self.rows.values() if value_of(row, "eval/accuracy") is not None]
        return accuracy_interval(rows[-1])[1:] if rows else None


@dataclass(frozen=True)
class Band:
    """A metric of an arm: the mean over its runs, the ends of the 95 % t-interval (equal to it for one run)."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone."""

    name: str
    runs: tuple[Run, ...]

    def band(self, metric: str) -> Band:
        """Over the steps that all runs with this metric have; between evaluations at other steps, a straight line."""
        curves = [curve for run in self.runs if len((curve := run.curve(metric))[0])]
        if not curves:
            return Band(*(np.empty(0) for _ in range(4)))
        first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        steps = np.unique(np.concatenate([x for x, _ in curves]))
        steps = steps[(steps >= first) & (steps <= last)]
        values = np.stack([np.interp(steps, x, y) for x, y in curves])
        mean, half = values.mean(0), t_half(values)
        return Band(steps, mean, mean - half, mean + half)

    @cached_property
    def figures(self) -> dict[str, Floats]:
        """Each figure of the runs that have it."""
        seen = [run.figures() for run in self.runs]
        return {name: np.array([f[name] for f in seen if f[name] is not None], dtype=np.float64) for name in seen[0]}


@dataclass(frozen=True)
class Comparison:
    arms: tuple[Arm, ...]
    config: tuple[tuple[str, tuple[Any, ...]], ...]  # key, its value in each arm; MISSING where an arm has no such key
    outcome: tuple[tuple[str, tuple[str, ...]], ...]  # what, as text for each arm
    metrics: tuple[str, ...]  # whose curves to draw
    notes: tuple[str, ...]


class _Missing:
    def __repr__(self) -> str:
        return "—"


MISSING: Any = _Missing()


def compare(paths: Sequence[str | Path], metrics: Sequence[str] = ()) -> Comparison:
    """Read the runs that `paths` name (run directories, folders of them, glob patterns) and set them side by side."""
    runs, notes = [], []
    for path in find_runs(paths):
        rows = {row["step"]: row for row in read_metrics(path)}
        run = Run(path, flat(read_config(path)), dict(sorted(rows.items())))
        if not rows:
            notes.append(f"{run.name} has measured nothing yet: left out")
            continue
        if run.planned is not None and run.steps < run.planned:
            notes.append(f"{run.name} has {run.steps:,} of {run.planned:,} steps")
        runs.append(run)
    if len(runs) < 2:
        only = f"there is only {runs[0].path}, which `gspo report` shows" if runs else "; ".join(notes)
        raise ConfigError(f"nothing to compare: {only}. Give two runs or more, or a folder that holds them")
    arms = tuple(group(runs))
    shown, missing = choose_metrics(runs, metrics)
    return Comparison(arms, differences(arms), outcome(arms), shown, (*notes, *_lengths(arms), *missing))


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories, each once: a run, the runs up to three levels below a folder, or what a pattern matches."""
    found: dict[Path, Path] = {}
    for given in map(str, paths):
        matches = [Path(given)]
        if glob.has_magic(given) and not Path(given).exists():
            matches = [Path(match) for match in sorted(glob.glob(given)) if Path(match).is_dir()]
            if not matches:
                raise ConfigError(f"no folder matches {given}")
        below = [run for match in matches for run in ([match] if is_run(match) else _below(match))]
        if not below:
            open_run(matches[0])  # says what is missing
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    levels = ("*", "*/*", "*/*/*")
    found = {file.parent for level in levels for file in folder.glob(f"{level}/config.yaml")}
    return sorted(run for run in found if not found & set(run.parents))  # what lies in a run is its own


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys.

    >>> flat({"actor": {"lr": 1, "mb": {}}, "seed": 3})
    {'actor.lr': 1, 'actor.mb': {}, 'seed': 3}
    """
    out: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        out |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return out


def group(runs: Sequence[Run]) -> list[Arm]:
    """Arms in the order their first run was given."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(repr(sorted(_learnt(run.config).items())), []).append(run)
    names = _arm_names(list(arms.values()))
    return [Arm(name, tuple(members)) for name, members in zip(names, arms.values(), strict=True)]


def _learnt(config: Mapping[str, Any]) -> dict[str, Any]:
    apart = (*NAMES, *WATCHING)
    return {k: v for k, v in config.items() if not any(k == a or k.startswith(f"{a}.") for a in apart)}


def _arm_names(arms: Sequence[Sequence[Run]]) -> list[str]:
    """What the runs' names have in common; the experiment before it where that is not enough, then a number."""

    def common(names: Sequence[str]) -> str:
        shared = names[0]
        for name in names[1:]:
            shared = "".join(a for a, _ in _same_start(shared, name))
        return shared.rstrip("0123456789").removesuffix("seed").rstrip("-_. /=") if len(names) > 1 else shared

    short = [common([run.path.name for run in runs]) for runs in arms]
    if len(set(short)) < len(short) or not all(short):
        short = [common([run.name for run in runs]) or runs[0].name for runs in arms]
    return [f"{name} ({short[:i].count(name) + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]


def _same_start(a: str, b: str) -> list[tuple[str, str]]:
    pairs = list(zip(a, b, strict=False))
    return pairs[: next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))]


def differences(arms: Sequence[Arm]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The keys in which arms differ, with the value of each arm."""
    configs = [_learnt(arm.runs[0].config) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = ((key, tuple(config.get(key, MISSING) for config in configs)) for key in keys)
    return tuple((key, values) for key, values in rows if any(repr(v) != repr(values[0]) for v in values))


def outcome(arms: Sequence[Arm]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What each arm came to, as text: the mean over its runs and, for two or more, half the 95 % t-interval."""
    rows: list[tuple[str, Callable[[Arm], str]]] = [
        ("runs", lambda arm: f"{len(arm.runs)}"),
        ("steps", lambda arm: _span([run.steps for run in arm.runs])),
        ("accuracy, start", lambda arm: spread(arm.figures["accuracy_start"], percent)),
        ("accuracy, end", _accuracy_end),
    ]
    ends = [run.steps for arm in arms for run in arm.runs]
    if len(set(ends)) > 1:  # ends of unequal runs say little: also where all of them have been
        step = min(ends)
        rows.append((f"accuracy at step {step:,}", lambda arm: spread(_accuracies_at(arm, step), percent)))
    rows += [
        (f"end, against {arms[0].name}", lambda arm: "" if arm is arms[0] else gain(arms[0], arm)),
        ("accuracy, best", _best),
        (f"samples to {GOAL:.0%}", _samples_to_goal),
        (f"reward, last {ENDS} steps", lambda arm: spread(arm.figures["reward_end"], "{:.3f}".format)),
        ("clipped low", lambda arm: spread(arm.figures["clipped_low"], percent)),
        ("clipped high", lambda arm: spread(arm.figures["clipped_high"], percent)),
        (f"entropy, last {ENDS} steps", lambda arm: spread(arm.figures["entropy_end"], "{:.3f}".format)),
        (f"length, last {ENDS} steps", lambda arm: spread(arm.figures["length_end"], "{:.1f}".format)),
        ("s/step, median", lambda arm: spread(arm.figures["seconds"], "{:.2f}".format)),
    ]
    told = [(name, tuple(text(arm) for arm in arms)) for name, text in rows]
    return tuple((name, cells) for name, cells in told if any(cell not in ("", "—") for cell in cells))


def gain(base: Arm, arm: Arm) -> str:
    """Final accuracy less that of the first arm; with two runs or more each, Welch's 95 % interval."""
    a, b = base.figures["accuracy_end"], arm.figures["accuracy_end"]
    if not len(a) or not len(b):
        return "—"
    text = f"{100 * (b.mean() - a.mean()):+.1f} points"
    if len(a) < 2 or len(b) < 2:
        return text
    half = welch_half(a, b)
    return f"{text} ± {100 * half:.1f}"


def choose_metrics(runs: Sequence[Run], asked: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Metrics to draw, and notes about runs that lack one that was asked for; ConfigError for one that nobody has."""
    known = {name for run in runs for row in run.rows.values() for name in row if value_of(row, name) is not None}
    if "clip/sequences_low" in known:
        known.add("clip/sequences")
    notes = []
    for name in asked:
        if name not in known or name == "step":
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ConfigError(f"no run has measured {name!r}{hint}. docs/metrics.md has all names")
        lacking = [run.name for run in runs if not len(run.curve(name)[0])]
        if lacking:
            notes.append(f"{name} was not measured in {', '.join(lacking)}")
    return tuple(dict.fromkeys(asked)) or tuple(name for name in CURVES if name in known), notes


def value_of(row: Row, metric: str) -> float | None:
    """A finite number, or None."""
    if metric == "clip/sequences":
        low, high = value_of(row, "clip/sequences_low"), value_of(row, "clip/sequences_high")
        return None if low is None or high is None else low + high
    value = row.get(metric)
    with contextlib.suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _lengths(arms: Sequence[Arm]) -> list[str]:
    notes = []
    for arm in arms:
        ends = {run.steps for run in arm.runs}
        if len(ends) > 1:
            notes.append(f"{arm.name}: its runs have {_span(sorted(ends))} steps; mean and band end with the shortest")
    return notes


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _accuracy_end(arm: Arm) -> str:
    text = spread(arm.figures["accuracy_end"], percent)
    ends = arm.runs[0].accuracy_ends() if len(arm.runs) == 1 else None
    return f"{text} ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" if ends else text


def _accuracies_at(arm: Arm, step: int) -> Floats:
    seen = [run.accuracy_at(step) for run in arm.runs]
    return np.array([value for value in seen if value is not None], dtype=np.float64)


def _best(arm: Arm) -> str:
    text = spread(arm.figures["accuracy_best"], percent)
    steps = arm.figures["best_step"]
    return f"{text}, step {_span([int(s) for s in steps])}" if len(steps) else text


def _samples_to_goal(arm: Arm) -> str:
    reached = arm.figures["samples_to_goal"]
    if not len(arm.figures["accuracy_end"]):
        return "—"
    if not len(reached):
        return "not reached"
    few = "" if len(reached) == len(arm.runs) else f", {len(reached)} of {len(arm.runs)} runs"
    return spread(reached, "{:,.0f}".format) + few


def _first(values: Floats) -> float | None:
    return float(values[0]) if len(values) else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
