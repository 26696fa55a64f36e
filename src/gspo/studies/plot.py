"""The figures of docs/baselines.md: mean curves with 95 % bands over seeds. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from gspo.report import COLORS, STYLE
from gspo.stats import t_half
from gspo.studies.plan import Study
from gspo.studies.results import Record
from gspo.system import atomic_write, in_lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 8  # curves in one panel
_TITLES = {
    "accuracy": ("held-out accuracy", "samples drawn"),
    "reward": ("mean training reward", "samples drawn"),
    "clip_tokens": ("share of tokens clipped", "samples drawn"),
    "entropy": ("entropy per token, nats", "samples drawn"),
}

Panel = tuple[str, Callable[["Axes"], Any]]  # title, and what is drawn


def draw_study(study: Study, records: Sequence[Record], target: Path) -> Path | None:
    """One panel per plot, task and part of the arms; None if there is no result to draw."""
    if not any(r["stage"] == "test" for r in records):
        return None
    panels = in_lab("lab.studies.computed:panels") if study.compute else _panels
    _paint(panels(study, records), target)
    return target


def _panels(study: Study, records: Sequence[Record]) -> list[Panel]:
    found: list[Panel] = [
        (kind, partial(in_lab("lab.studies.computed:over_key"), study=study, records=records, kind=kind))
        for kind in study.plots
        if " by " in kind
    ]
    for task in list(study.tasks) or [""]:
        here = [arm.partition(" @ ")[0] for arm in study.arm_names() if arm.partition(" @ ")[2] == task]
        for kind in study.plots:
            for name, arms in _readable(here).items() if " by " not in kind else ():
                title = ", ".join(filter(None, (_TITLES[kind][0], task, name)))
                found.append((title, partial(_curves, arms=arms, records=records, kind=kind, task=task)))
    return found


def _paint(panels: Sequence[Panel], target: Path) -> None:
    with style.context(STYLE):
        columns = min(len(panels), 2)
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(5.6 * columns, 3.7 * lines), layout="constrained", facecolor="white")
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (title, paint) in zip(grid.flat, panels, strict=False):
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            paint(axes)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as tmp:
            figure.savefig(tmp, dpi=90, format="png")


def _readable(arms: Sequence[str]) -> dict[str, list[str]]:
    """The arms in parts of at most `_MOST` curves, by as few of their first words as possible.

    >>> _readable([f"{a} η={n} {c}" for a in ("gspo", "grpo") for n in (4, 8, 12) for c in "abcd"])["gspo η=8"]
    ['gspo η=8 a', 'gspo η=8 b', 'gspo η=8 c', 'gspo η=8 d']
    >>> _readable(["gspo", "grpo"])
    {'': ['gspo', 'grpo']}
    """
    for num_words in range(max(len(arm.split()) for arm in arms) + 1):
        parts: dict[str, list[str]] = {}
        for arm in arms:
            parts.setdefault(" ".join(arm.split()[:num_words]).rstrip(","), []).append(arm)
        if max(map(len, parts.values())) <= _MOST:
            return parts
    return {"": list(arms)}


def _curves(axes: Axes, arms: Sequence[str], records: Sequence[Record], kind: str, task: str) -> None:
    for number, arm in enumerate(arms):
        full = f"{arm} @ {task}" if task else arm
        runs = [r["curves"][kind] for r in records if r["arm"] == full and r["stage"] == "test" and r.get("curves")]
        runs = [run for run in runs if run]
        if not runs:
            continue
        # Runs that refill groups draw more samples, so all curves are interpolated at the same numbers of samples.
        x = np.linspace(0.0 if kind == "accuracy" else runs[0][0][0], min(run[-1][0] for run in runs), 60)
        y = np.array([np.interp(x, *np.array(run).T) for run in runs])
        color, dash = COLORS[number % len(COLORS)], ("-", "--", ":")[number // len(COLORS) % 3]
        axes.plot(x, y.mean(axis=0), color=color, linestyle=dash, linewidth=1.6, label=arm)
        if len(runs) > 2:  # of two runs the interval is wider than the figure
            half = t_half(y)
            axes.fill_between(x, y.mean(axis=0) - half, y.mean(axis=0) + half, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel(_TITLES[kind][1])
    if kind == "accuracy":
        axes.set_ylim(0, 1.02)
    if kind == "clip_tokens":
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, ncols=2)
