"""The measures that a study compares, computed from the metrics of a run: one number each, or None. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gspo.stats import COLLAPSE, has_collapsed
from gspo.system import parse_yaml

Row = Mapping[str, Any]

GOAL = 0.8  # "samples to 80 %"
CURVES = ("accuracy", "reward", "clip_tokens", "entropy")

MEASURES = parse_yaml(Path(__file__).with_name("measures.yaml").read_text(encoding="utf-8"))
MEANING = {name: row["words"].format(collapse=COLLAPSE) for name, row in MEASURES.items()}


def measures(rows: Sequence[Row], *, samples_per_group: int, groups_per_step: int, failed: bool) -> dict[str, Any]:
    """All measures of a run; None where the run has no value, for example because it never reached 80 %."""
    steps = [row for row in rows if row["step"] > 0]
    evals = evaluation_points(rows, samples_per_group=samples_per_group, groups_per_step=groups_per_step)
    reached = crossing([(samples, accuracy) for samples, _, accuracy in evals], GOAL)
    reached_s = crossing([(seconds, accuracy) for _, seconds, accuracy in evals], GOAL)
    train_s = [_train_seconds(row) for row in steps]
    out: dict[str, Any] = {
        **{name: _mean(steps, row["mean"]) for name, row in MEASURES.items() if "mean" in row},
        "start": evals[0][2] if evals else None,
        "final": evals[-1][2] if evals else None,
        "gain": evals[-1][2] - evals[0][2] if evals else None,
        "area": area([(samples, accuracy) for samples, _, accuracy in evals]),
        "samples_to_80": reached,
        "seconds_to_80": reached_s,
        "step_s": statistics.median(train_s) if train_s else None,
        "max_log_s": max(_values(steps, "ratio/log_s_max_abs"), default=None),
        "entropy": _mean(steps[-max(len(steps) // 4, 1) :], "policy/entropy"),
        "collapsed": float(failed or has_collapsed(_values(steps, "reward/mean"))),
    }
    low, high = out["clip_low"], out["clip_high"]
    out["clip_sequences"] = None if low is None or high is None else low + high
    return out


def curves(rows: Sequence[Row], *, samples_per_group: int, groups_per_step: int) -> dict[str, list[list[float]]]:
    """The curves of the plots: [samples drawn, value] pairs, rounded."""
    out: dict[str, list[list[float]]] = {
        "accuracy": [
            [samples, round(accuracy, 4)]
            for samples, _, accuracy in evaluation_points(
                rows, samples_per_group=samples_per_group, groups_per_step=groups_per_step
            )
        ]
    }
    for name, metric in (("reward", "reward/mean"), ("clip_tokens", "clip/tokens"), ("entropy", "policy/entropy")):
        points, drawn = [], 0
        for row in rows:
            drawn += _samples(row, samples_per_group, groups_per_step)
            if row.get(metric) is not None:
                points.append([drawn, float(f"{row[metric]:.4g}")])
        out[name] = points
    return out


def evaluation_points(
    rows: Sequence[Row], *, samples_per_group: int, groups_per_step: int
) -> list[tuple[int, float, float]]:
    """(samples drawn, seconds of training, held-out accuracy) at each evaluation; with graded rewards, the reward."""
    metric = "eval/reward" if any((row.get("eval/graded") or 0) > 0 for row in rows) else "eval/accuracy"
    found, samples, seconds = [], 0, 0.0
    for row in rows:
        samples += _samples(row, samples_per_group, groups_per_step)
        seconds += _train_seconds(row) if row["step"] > 0 else 0.0
        if row.get(metric) is not None:
            found.append((samples, seconds, float(row[metric])))
    return found


def area(points: Sequence[tuple[float, float]]) -> float | None:
    """The mean of a curve, by the trapezoidal rule.

    >>> area([(0, 0.0), (2, 1.0), (4, 1.0)])
    0.75
    """
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    return total / (points[-1][0] - points[0][0])


def crossing(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    """The x at which a curve first reaches the goal, by linear interpolation; None if it never does.

    >>> crossing([(0, 0.25), (10, 0.5), (20, 1.0)], 0.75), crossing([(0, 0.2)], 0.8)
    (15.0, None)
    """
    if points and points[0][1] >= goal:
        return float(points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= goal:
            return x0 + (x1 - x0) * (goal - y0) / (y1 - y0)
    return None


def _samples(row: Row, samples_per_group: int, groups_per_step: int) -> int:
    if not row["step"]:
        return 0
    return samples_per_group * (groups_per_step + int(row.get("reward/refilled_groups") or 0))


def _train_seconds(row: Row) -> float:
    return float(row["time/step_s"]) - float(row.get("time/eval_s") or 0.0)


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return statistics.fmean(values) if values else None
