"""`gspo compare`: runs side by side, by arms and seeds."""

from __future__ import annotations

import contextlib
import difflib
import glob
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import ConfigError
from gspo.report.read import Row, evaluations, is_graded, is_run, open_run, read_config, read_metrics, score_interval
from gspo.report.summary import ENDS
from gspo.stats import Floats, t_half, welch_half
from gspo.system import flat, read_regular

GOAL = 0.8  # held-out accuracy; the table says how many samples a run needed to reach it


@dataclass(frozen=True)
class ComparedRun:
    """One run directory: its config as dotted keys, its rows by step."""

    path: Path
    config: Mapping[str, Any]
    rows: Mapping[int, Row]
    graded: bool = False  # the held-out score is the reward; False: the accuracy

    @property
    def score(self) -> str:
        """The metric of the held-out score."""
        return "eval/reward" if self.graded else "eval/accuracy"

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
        """Steps and values of a metric, where it was measured; clip/sequences is clipped low plus clipped high."""
        seen = [(step, metric_value(row, metric)) for step, row in self.rows.items()]
        kept = [(step, value) for step, value in seen if value is not None]
        steps, values = zip(*kept, strict=True) if kept else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def figures(self) -> dict[str, float | None]:
        """The row of numbers that the outcome table is made of; None where nothing was measured."""
        at, score = self.curve(self.score)
        best = int(np.flatnonzero(score == score.max())[-1]) if len(score) else None
        # Without evaluation: runs with other evaluation frequencies stay comparable.
        seconds = [
            value - (metric_value(row, "time/eval_s") or 0.0)
            for row in self.rows.values()
            if (value := metric_value(row, "time/step_s")) is not None
        ]
        return {
            "score_start": _first(score),
            "score_end": _first(score[::-1]),
            "score_best": None if best is None else float(score[best]),
            "best_step": None if best is None else float(at[best]),
            "samples_to_goal": self.samples_to(GOAL),
            "reward_end": _mean(self.curve("reward/mean")[1][-ENDS:]),
            "clipped_low": _mean(self.curve("clip/sequences_low")[1]),
            "clipped_high": _mean(self.curve("clip/sequences_high")[1]),
            "entropy_end": _mean(self.curve("policy/entropy")[1][-ENDS:]),
            "length_end": _mean(self.curve("length/mean")[1][-ENDS:]),
            "seconds": float(np.median(seconds)) if seconds else None,  # the median ignores pauses of the machine
        }

    def samples_to(self, accuracy: float) -> float | None:
        """Samples drawn until an evaluation first reached this accuracy, including resampled groups."""
        at, seen = self.curve("eval/accuracy")
        reached = at[seen >= accuracy]
        # Runs of earlier versions have the first key, which had priority.
        prompts = self.config.get("rollout.consumer_batch_size") or self.config.get("train_dataset.batch_size")
        group = self.config.get("gconfig.n_samples")
        if not len(reached) or not isinstance(prompts, int) or not isinstance(group, int):
            return None
        step = int(reached[0])
        refilled = sum(metric_value(row, "reward/refilled_groups") or 0 for at, row in self.rows.items() if at <= step)
        return float((step * prompts + refilled) * group)

    def score_at(self, step: int) -> float | None:
        """Score at the last evaluation up to `step`."""
        at, seen = self.curve(self.score)
        return _first(seen[at <= step][::-1])

    def score_ends(self) -> tuple[float, float] | None:
        """95 % interval of the last evaluation, over problems."""
        rows = evaluations(self.rows.values(), self.graded)
        return score_interval(rows[-1], self.graded)[1:] if rows else None


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories, each once: a run, the runs up to three levels below a folder, or what a pattern matches."""
    found: dict[Path, Path] = {}
    for given in map(str, paths):
        matches = [Path(given)]
        if glob.has_magic(given) and not Path(given).exists():
            matches = [Path(match) for match in sorted(glob.glob(given)) if Path(match).is_dir()]
            matches.sort(key=started)
            if not matches:
                raise ConfigError(f"no folder matches {given}")
        below = [run for match in matches for run in ([match] if is_run(match) else _below(match))]
        if not below:
            open_run(matches[0])  # raises: its message says what is missing
        for run in below:
            # By resolved path: a run that several arguments name appears once.
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    levels = ("*", "*/*", "*/*/*")
    found = {file.parent for level in levels for file in folder.glob(f"{level}/config.yaml")}
    # A folder inside a run is part of that run. Oldest first, so that new runs are compared with the older one.
    return sorted((run for run in found if not found & set(run.parents)), key=lambda run: (started(run), run))


def started(run: Path) -> float:
    """When a run was first started, in seconds: the time of the first line of log.txt, which a resume keeps."""
    with contextlib.suppress(OSError, ValueError):
        return time.mktime(time.strptime(read_regular(run / "log.txt")[:19].decode(), "%Y-%m-%d %H:%M:%S"))
    with contextlib.suppress(OSError):
        return (run / "config.yaml").stat().st_mtime
    return 0.0


def metric_value(row: Row, metric: str) -> float | None:
    """A finite number, or None."""
    if metric == "clip/sequences":
        low, high = metric_value(row, "clip/sequences_low"), metric_value(row, "clip/sequences_high")
        return None if low is None or high is None else low + high
    value = row.get(metric)
    with contextlib.suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _first(values: Floats) -> float | None:
    return float(values[0]) if len(values) else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


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

    def by_seed(self) -> dict[Any, float]:
        """The final score by the seed of the run, where both are known."""
        seen = ((run.config.get("seed"), run.figures()["score_end"]) for run in self.runs)
        return {seed: score for seed, score in seen if seed is not None and score is not None}


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
        return (
            shared.rstrip("0123456789").removesuffix("seed").removesuffix("-s").rstrip("-_. /=")
            if len(names) > 1
            else shared
        )

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


def outcome(arms: Sequence[Arm]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Rows of (name, one cell per arm); rows that no arm has measured are left out."""
    graded = arms[0].runs[0].graded
    score, form = ("held-out reward", "{:.3f}".format) if graded else ("accuracy", "{:.1%}".format)
    rows: list[tuple[str, Callable[[Arm], str]]] = [
        ("runs", lambda arm: f"{len(arm.runs)}"),
        ("steps", lambda arm: step_range([run.steps for run in arm.runs])),
        (f"{score}, start", lambda arm: spread(arm.figures["score_start"], form)),
        (f"{score}, end", _score_end),
    ]
    ends = [run.steps for arm in arms for run in arm.runs]
    if len(set(ends)) > 1:  # runs of unequal length: also compare at the last step that all have reached
        step = min(ends)
        rows.append((f"{score} at step {step:,}", lambda arm: spread(_scores_at(arm, step), form)))
    rows += [
        (f"end, against {arms[0].name}", lambda arm: "" if arm is arms[0] else gain(arms[0], arm)),
        (f"{score}, best", lambda arm: _best(arm, form)),
        (f"samples to {GOAL:.0%}", lambda arm: "—" if graded else _samples_to_goal(arm)),
        (f"reward, last {ENDS} steps", lambda arm: spread(arm.figures["reward_end"], "{:.3f}".format)),
        ("clipped low", lambda arm: spread(arm.figures["clipped_low"], "{:.1%}".format)),
        ("clipped high", lambda arm: spread(arm.figures["clipped_high"], "{:.1%}".format)),
        (f"entropy, last {ENDS} steps", lambda arm: spread(arm.figures["entropy_end"], "{:.3f}".format)),
        (f"length, last {ENDS} steps", lambda arm: spread(arm.figures["length_end"], "{:.1f}".format)),
        ("s/step, median", lambda arm: spread(arm.figures["seconds"], "{:.2f}".format)),
    ]
    # Compute every cell, then drop the rows in which no arm has a value.
    table = [(name, tuple(text(arm) for arm in arms)) for name, text in rows]
    return tuple((name, cells) for name, cells in table if any(cell not in ("", "—") for cell in cells))


def spread(values: Floats, form: Callable[[float], str]) -> str:
    """Mean ± half of the 95 % t interval; the mean alone for a single run.

    >>> share = "{:.1%}".format
    >>> spread(np.array([0.5, 0.7]), share), spread(np.array([0.5]), share), spread(np.array([]), share)
    ('60.0% ± 127.1', '50.0%', '—')
    """
    if not len(values):
        return "—"
    half = f" ± {form(float(t_half(values))).removesuffix('%')}" if len(values) > 1 else ""
    return form(float(values.mean())) + half


def gain(base: Arm, arm: Arm) -> str:
    """Difference of the final score to the first arm, with its 95 % interval where both have two runs or more.

    Paired by seed, as in a study, where both arms have the same seeds, each once; else Welch's.
    """
    a, b = base.figures["score_end"], arm.figures["score_end"]
    if not len(a) or not len(b):
        return "—"
    graded = base.runs[0].graded
    gained = b.mean() - a.mean()
    text = f"{gained:+.3f}" if graded else f"{100 * gained:+.1f} points"
    if len(a) < 2 or len(b) < 2:
        return text
    ours, theirs = arm.by_seed(), base.by_seed()
    is_paired = ours.keys() == theirs.keys() and len(ours) == len(arm.runs) == len(base.runs)
    half = float(t_half([ours[seed] - theirs[seed] for seed in ours])) if is_paired else welch_half(a, b)
    shown = f"{half:.3f}" if graded else f"{100 * half:.1f}"
    return f"{text} ± {shown} ({'paired by seed' if is_paired else 'Welch'})"


def step_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _score_end(arm: Arm) -> str:
    graded = arm.runs[0].graded
    text = spread(arm.figures["score_end"], "{:.3f}".format if graded else "{:.1%}".format)
    ends = arm.runs[0].score_ends() if len(arm.runs) == 1 else None
    if ends is None:
        return text
    return f"{text} ({ends[0]:.3f} … {ends[1]:.3f})" if graded else f"{text} ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})"


def _scores_at(arm: Arm, step: int) -> Floats:
    seen = [run.score_at(step) for run in arm.runs]
    return np.array([value for value in seen if value is not None], dtype=np.float64)


def _best(arm: Arm, form: Callable[[float], str]) -> str:
    text = spread(arm.figures["score_best"], form)
    steps = arm.figures["best_step"]
    return f"{text}, step {step_range([int(s) for s in steps])}" if len(steps) else text


def _samples_to_goal(arm: Arm) -> str:
    reached = arm.figures["samples_to_goal"]
    if not len(arm.figures["score_end"]):
        return "—"
    if not len(reached):
        return "not reached"
    few = "" if len(reached) == len(arm.runs) else f", {len(reached)} of {len(arm.runs)} runs"
    return spread(reached, "{:,.0f}".format) + few


# Drawn besides the held-out score.
CURVES = (
    "reward/mean", "eval/loss", "clip/sequences", "policy/entropy", "length/mean", "policy/kl_behavior",
    "grad/norm", "time/step_s",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What `gspo compare` shows."""

    arms: tuple[Arm, ...]
    config: tuple[
        tuple[str, tuple[Any, ...]], ...
    ]  # key, its value in each arm; MISSING where an arm does not have the key
    outcome: tuple[tuple[str, tuple[str, ...]], ...]  # row name, text for each arm
    metrics: tuple[str, ...]  # whose curves to draw
    notes: tuple[str, ...]


def compare(paths: Sequence[str | Path], metrics: Sequence[str] = ()) -> Comparison:
    """Read the runs that `paths` name (run directories, folders of runs, glob patterns), and compare them."""
    runs, notes = [], []
    for path in find_runs(paths):
        rows = {row["step"]: row for row in read_metrics(path)}
        run = ComparedRun(path, flat(read_config(path)), dict(sorted(rows.items())))
        if not rows:
            notes.append(f"{run.name} is left out: it has no metrics yet")
            continue
        if run.planned is not None and run.steps < run.planned:
            notes.append(f"{run.name} has {run.steps:,} of {run.planned:,} steps")
        runs.append(run)
    if len(runs) < 2:
        only = f"there is only {runs[0].path} (`gspo report` shows a single run)" if runs else "; ".join(notes)
        raise ConfigError(
            f"nothing to compare: {only}. Pass two run directories or more, or a folder that contains them"
        )
    # One unit for all: the reward if the rewards of one run are graded.
    if any(is_graded(run.rows.values()) for run in runs):
        runs = [replace(run, graded=True) for run in runs]
    arms = tuple(group(runs))
    shown, missing = choose_metrics(runs, metrics)
    return Comparison(arms, differences(arms), outcome(arms), shown, (*notes, *_length_notes(arms), *missing))


def choose_metrics(runs: Sequence[ComparedRun], asked: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Metrics to draw, and a note for each run without a requested one; ConfigError if no run has it."""
    known = {name for run in runs for row in run.rows.values() for name in row if metric_value(row, name) is not None}
    if "clip/sequences_low" in known:
        known.add("clip/sequences")
    notes = []
    for name in asked:
        if name not in known or name == "step":
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"no run has the metric {name!r}.{hint} docs/metrics.md lists all metrics")
        lacking = [run.name for run in runs if not len(run.curve(name)[0])]
        if lacking:
            notes.append(f"{name} was not measured in {', '.join(lacking)}")
    return tuple(dict.fromkeys(asked)) or tuple(name for name in (runs[0].score, *CURVES) if name in known), notes


def _length_notes(arms: Sequence[Arm]) -> list[str]:
    notes = []
    for arm in arms:
        ends = {run.steps for run in arm.runs}
        if len(ends) > 1:
            notes.append(
                f"{arm.name}: its runs have {step_range(sorted(ends))} steps; mean and band end at the shortest"
            )
    return notes
