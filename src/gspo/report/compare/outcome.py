"""The outcome table of a comparison, as text: means over an arm's runs with 95 % intervals, and Welch's differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gspo.report.compare.arms import Arm
from gspo.report.compare.runs import GOAL
from gspo.report.summary import ENDS
from gspo.stats import Floats, t_half, welch_half


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
    """Difference of the final score to the first arm; Welch's 95 % interval where both have two runs or more."""
    a, b = base.figures["score_end"], arm.figures["score_end"]
    if not len(a) or not len(b):
        return "—"
    graded = base.runs[0].graded
    gained = b.mean() - a.mean()
    text = f"{gained:+.3f}" if graded else f"{100 * gained:+.1f} points"
    if len(a) < 2 or len(b) < 2:
        return text
    half = welch_half(a, b)
    return f"{text} ± {half:.3f}" if graded else f"{text} ± {100 * half:.1f}"


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
