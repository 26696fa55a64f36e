"""`gspo compare`: runs side by side. Reads run directories only; `terminal.py` and `page.py` show the result."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.report.compare.arms import Arm, differences, group
from gspo.report.compare.outcome import outcome, step_range
from gspo.report.compare.runs import ComparedRun, find_runs, metric_value
from gspo.report.read import is_graded, read_config, read_metrics
from gspo.system.text import flat

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
