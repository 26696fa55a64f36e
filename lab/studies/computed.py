"""How the studies that measure directly (lab/studies/direct/) are shown: their measures in words, and their panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo.report import COLORS
from gspo.stats import mean_interval
from gspo.studies import MEANING as OF_RUNS
from gspo.studies import Record, Study, interval, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = tuple[str, Callable[["Axes"], Any]]  # title, and what is drawn

MEANING = {
    **OF_RUNS,
    "difference": "largest difference from GSPO's gradient, relative to its largest entry",
    "sd_log_w": "sd of a token's log-ratio",
    "sd_sum_log_w": "sd of the sum over a piece",
    "sd_log_s": "sd of log s, the mean over a piece",
    "mean_log_s": "mean log s",
    "cosine": "cosine of the gradient with π_old from the sampler and with π_old recomputed",
    "clip_negative": "share of the sequences with A < 0 clipped, π_old from the sampler",
    "clip_negative_exact": "the same, π_old recomputed",
    "clip_positive": "share of the sequences with A > 0 clipped, π_old from the sampler",
    "clip_positive_exact": "the same, π_old recomputed",
    "decisions_changed": "share of sequences clipped by one and not by the other",
    "eps_low": "ε_low in force",
    "noise_mean": "mean of log μ − log π_old per token at equal weights",
    "noise_p95": "p95 of |log s| of the sampler's error",
    "snr": "signal-to-noise ratio of the gradient of a batch, |E g|² over its variance; 0 or less: no signal was found",
    "halves": "cosine of the mean gradients of two halves of the groups",
    "tokens": "mean trained tokens of a completion",
    "clip_negative_excess": "clip_negative − clip_negative_exact",
}


def panels(study: Study, records: Sequence[Record]) -> list[Panel]:
    """The panels of `plots`."""
    found: list[Panel] = []
    for kind in study.plots:
        if kind == "lengths":
            found.append(("spread over pieces of a completion", partial(_lengths, records)))
        elif kind == "noise":
            found.append(("does the gradient keep its direction?", partial(_noise, records)))
        elif kind == "signal":
            found += _signal_panels(study, records)
    return found


def _lengths(records: Sequence[Record], axes: Axes) -> None:
    arms = sorted({r["arm"] for r in records if r["arm"].isdecimal()}, key=int)
    x = [int(arm) for arm in arms]
    names = (("sd_sum_log_w", "Σ log w"), ("sd_log_w", "log w of a token"), ("sd_log_s", "log s"))
    for (name, label), color in zip(names, COLORS, strict=False):
        found = [interval(list(results.by_seed(records, arm, name).values())) for arm in arms]
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


def _noise(records: Sequence[Record], axes: Axes) -> None:
    """Cosine to the exact gradient over the sampler's error; a line per clip range."""
    edges = list(dict.fromkeys(r["arm"].rpartition(", ")[2] for r in records if not r["arm"].endswith("re-centred")))
    for edge, color in zip(edges, COLORS, strict=False):
        arms = dict.fromkeys(r["arm"] for r in records if r["arm"].endswith(f", {edge}"))
        points = []
        for arm in arms:
            x = interval(list(results.by_seed(records, arm, "noise_p95").values()))
            y = interval(list(results.by_seed(records, arm, "cosine").values()))
            if x and y:
                points.append((x.mean, y.mean, 0.0 if y.high is None else y.high - y.mean))
        points.sort()
        axes.errorbar(*np.array(points).T, color=color, marker="o", markersize=3, linewidth=1.4, capsize=2, label=edge)
    axes.set_xscale("log")
    axes.set_xlabel("p95 of |log s| of the sampler's error")
    axes.set_ylabel("cosine to the gradient with π_old recomputed")
    axes.legend(fontsize=8)


def _signal_panels(study: Study, records: Sequence[Record]) -> list[Panel]:
    """Signal-to-noise ratios of the gradient over length: a panel per progress and clipping, a line per drift."""
    of = {"": ("gspo", "grpo"), ", not clipped": ("gspo unclipped", "grpo unclipped")}
    return [
        (f"signal-to-noise ratio, step {step}{ending}", partial(_signal, study, records, step, names))
        for step in study.settings["trained"]
        for ending, names in of.items()
    ]


def _signal(study: Study, records: Sequence[Record], step: int, of: Sequence[str], axes: Axes) -> None:
    lengths: set[float] = set()
    for name, color in zip(of, COLORS, strict=False):
        for drift, dash in zip(study.settings["drifts"], (":", "--", "-"), strict=False):
            arms = [f"{name}, drift {drift}, {task}, step {step}" for task in study.settings["tasks"]]
            found = [
                [interval([*results.by_seed(records, arm, measure).values()]) for measure in ("tokens", "snr")]
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


def over_key(axes: Axes, study: Study, records: Sequence[Record], kind: str) -> None:
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
    for (arm, values), color in zip(flat.items(), reversed(COLORS), strict=False):
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
        color = COLORS[number % len(COLORS)]
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
