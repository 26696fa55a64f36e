"""The figures of docs/baselines.md: mean curves with 95 % bands over seeds. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from gspo.report import STYLE
from gspo.stats import mean_interval, t_half
from gspo.studies import contrasts, results
from gspo.studies.plan import Study
from gspo.studies.results import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours; with more arms than colours, the arms also differ in their dash patterns.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
_MOST = 8  # curves in one panel
_TITLES = {
    "accuracy": ("held-out accuracy", "samples drawn"),
    "reward": ("mean training reward", "samples drawn"),
    "clip_tokens": ("share of tokens clipped", "samples drawn"),
    "entropy": ("entropy per token, nats", "samples drawn"),
}


def draw_study(study: Study, records: Sequence[Record], target: Path) -> Path | None:
    """One panel per plot, task and part of the arms; None if there is no result to draw."""
    tasks = list(study.tasks) or [""]
    panels: list[tuple[str, Callable[[Axes], Any]]] = []
    for kind in study.plots:
        if " by " in kind:
            panels.append((kind, lambda axes, kind=kind: _over_key(axes, study, records, kind)))
    for task in tasks:
        for kind in study.plots:
            if " by " in kind:
                continue
            if kind == "lengths":
                panels.append(("spread over pieces of a completion", lambda axes: _lengths(axes, records)))
            elif kind == "noise":
                panels.append(("does the gradient keep its direction?", lambda axes: _noise(axes, records)))
            elif kind == "signal":
                panels += _signal_panels(study, records)
            else:
                here = [arm.partition(" @ ")[0] for arm in study.arm_names() if arm.partition(" @ ")[2] == task]
                for name, arms in _readable(here).items():
                    title = ", ".join(filter(None, (_TITLES[kind][0], task, name)))
                    panels.append(
                        (title, lambda axes, kind=kind, task=task, arms=arms: _curves(axes, arms, records, kind, task))
                    )
    if not any(r["stage"] == "test" for r in records):
        return None
    with matplotlib.rc_context(STYLE):
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
        tmp = target.with_name(f".{target.name}.tmp")
        figure.savefig(tmp, dpi=90, format="png")
        os.replace(tmp, target)
    return target


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
        color, dash = _COLORS[number % len(_COLORS)], ("-", "--", ":")[number // len(_COLORS) % 3]
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


def _over_key(axes: Axes, study: Study, records: Sequence[Record], kind: str) -> None:
    """A measure over a key of the config, a line per arm; horizontal where an arm's value is no number (auto)."""
    measure, _, key = kind.partition(" by ")
    lines: dict[str, dict[float, list[float]]] = {}
    flat: dict[str, list[float]] = {}
    order = [arm.partition(" @ ")[0] for arm in study.arms]
    for record in sorted(records, key=lambda r: order.index(r["arm"].partition(" @ ")[0])):
        x, y = record["config"].get(key), record["measures"].get(measure)
        if record["stage"] == "test" and isinstance(x, int | float) and y is not None:
            arm, _, task = record["arm"].partition(" @ ")
            # The value over which is drawn comes first in a name: "gspo ε=0.1", or the task "470 tokens, 16 updates".
            name = ", ".join(filter(None, (arm.partition(" ε=")[0], task.partition(", ")[2])))
            lines.setdefault(name, {}).setdefault(float(x), []).append(y)
        elif record["stage"] == "test" and isinstance(x, str) and y is not None:
            flat.setdefault(record["arm"].partition(" @ ")[0], []).append(y)
    for (arm, values), color in zip(flat.items(), reversed(_COLORS), strict=False):
        mean, low, high = mean_interval(values)[:3]
        axes.axhline(mean, color=color, linestyle="--", linewidth=1.2, label=arm)
        if len(values) > 1:
            axes.axhspan(low, high, color=color, alpha=0.12, linewidth=0)
    for number, (arm, found_at) in enumerate(lines.items()):
        points = sorted(found_at.items())
        found = [mean_interval(y) for _, y in points]
        low, high = (
            [abs(f[0] - f[side]) if len(y) > 1 else 0.0 for f, (_, y) in zip(found, points, strict=True)]
            for side in (1, 2)
        )
        # Arms side by side, so that their bars do not cover each other.
        x = [value * 1.02 ** (number - len(lines) / 2) for value, _ in points]
        color = _COLORS[number % len(_COLORS)]
        axes.errorbar(
            x,
            [f[0] for f in found],
            yerr=[low, high],
            color=color,
            marker="o",
            markersize=3,
            linewidth=1.4,
            capsize=2,
            label=arm,
        )
    axes.set_xscale("log")
    values = sorted({x for found_at in lines.values() for x in found_at})
    if len(values) <= 6:  # the values themselves; powers of ten would say less
        axes.set_xticks(values, labels=[f"{x:g}" for x in values])
        axes.minorticks_off()
    axes.set_xlabel(key)
    if measure in ("final", "area", "collapsed"):
        axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=7)


def _lengths(axes: Axes, records: Sequence[Record]) -> None:
    arms = sorted({r["arm"] for r in records if r["arm"].isdecimal()}, key=int)
    x = [int(arm) for arm in arms]
    names = (("sd_sum_log_w", "Σ log w"), ("sd_log_w", "log w of a token"), ("sd_log_s", "log s"))
    for (name, label), color in zip(names, _COLORS, strict=False):
        found = [contrasts.interval(list(results.by_seed(records, arm, name).values())) for arm in arms]
        y = [f.mean if f else np.nan for f in found]
        axes.plot(x, y, color=color, marker="o", markersize=3, linewidth=1.5, label=label)
        if all(f and f.low is not None for f in found):
            low, high = ([max(getattr(f, side), 1e-9) for f in found] for side in ("low", "high"))
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("standard deviation")
    axes.legend(fontsize=8)


def _noise(axes: Axes, records: Sequence[Record]) -> None:
    """Cosine to the exact gradient over the sampler's error; a line per clip range."""
    edges = list(dict.fromkeys(r["arm"].rpartition(", ")[2] for r in records if not r["arm"].endswith("re-centred")))
    for edge, color in zip(edges, _COLORS, strict=False):
        arms = dict.fromkeys(r["arm"] for r in records if r["arm"].endswith(f", {edge}"))
        points = []
        for arm in arms:
            x = contrasts.interval(list(results.by_seed(records, arm, "noise_p95").values()))
            y = contrasts.interval(list(results.by_seed(records, arm, "cosine").values()))
            if x and y:
                points.append((x.mean, y.mean, 0.0 if y.high is None else y.high - y.mean))
        points.sort()
        axes.errorbar(*np.array(points).T, color=color, marker="o", markersize=3, linewidth=1.4, capsize=2, label=edge)
    axes.set_xscale("log")
    axes.set_xlabel("p95 of |log s| of the sampler's error")
    axes.set_ylabel("cosine to the gradient with π_old recomputed")
    axes.legend(fontsize=8)


def _signal_panels(study: Study, records: Sequence[Record]) -> list[tuple[str, Callable[[Axes], Any]]]:
    """Signal-to-noise ratios of the gradient over length: a panel per progress and clipping, a line per drift."""
    of = {"": ("gspo", "grpo"), ", not clipped": ("gspo unclipped", "grpo unclipped")}
    return [
        (f"signal-to-noise ratio, step {step}{ending}", partial(_signal, study, records, step, names))
        for step in study.settings["trained"]
        for ending, names in of.items()
    ]


def _signal(study: Study, records: Sequence[Record], step: int, of: Sequence[str], axes: Axes) -> None:
    lengths: set[float] = set()
    for name, color in zip(of, _COLORS, strict=False):
        for drift, dash in zip(study.settings["drifts"], (":", "--", "-"), strict=False):
            arms = [f"{name}, drift {drift}, {task}, step {step}" for task in study.settings["tasks"]]
            found = [
                [
                    contrasts.interval([*results.by_seed(records, arm, measure).values()])
                    for measure in ("tokens", "snr")
                ]
                for arm in arms
            ]
            points = [(x.mean, y.mean, 0.0 if y.high is None else y.high - y.mean) for x, y in found if x and y]
            lengths.update(x for x, _, _ in points)
            axes.errorbar(
                *np.array(points).T,
                color=color,
                linestyle=dash,
                marker="o",
                markersize=3,
                capsize=2,
                label=f"{name}, drift {drift}",
            )
    axes.set_xscale("log")
    axes.set_xticks(sorted(lengths), labels=[f"{length:.0f}" for length in sorted(lengths)])
    axes.minorticks_off()
    axes.set_xlabel("tokens of a completion")
    axes.legend(fontsize=7)
