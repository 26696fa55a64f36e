"""The figure of a run, `training.png`: reward and held-out score, clipping, log s, lengths, entropy.

Needs matplotlib (`pip install 'gspo[report]'`). It uses its own figure objects: no display, no global state.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gspo.report.read import (
    Row,
    evaluations,
    has_sequence_ratio,
    is_graded,
    read_config,
    read_metrics,
    score_interval,
    score_text,
)
from gspo.report.summary import change_text
from gspo.system import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: distinguishable with any kind of colour vision; every curve has a label too.
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
COLORS = (BLUE, RED, GREEN, ORANGE, SKY, "#CC79A7", "#000000")  # of arms
FAINT = "#6b6b6b"  # of secondary text
STYLE = Path(__file__).with_name("figures.mplstyle")

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]  # steps, values (NaN where nothing was measured)


def plot_run(run: Path, to: Path | None = None) -> Path | None:
    """Draw RUN/training.png and return its path; None before the first step. ImportError without matplotlib."""
    figure = draw_run(run)
    if figure is None:
        return None
    target = to or run / "training.png"
    with _style(), atomic_write(target) as tmp:
        figure.savefig(tmp, dpi=130, format="png")
    return target


def draw_run(run: Path) -> Figure | None:
    """The six panels of a run; None before the first step. ImportError without matplotlib."""
    rows = read_metrics(run)
    steps = [row for row in rows if row["step"] > 0]
    if not steps:
        return None
    whole = has_sequence_ratio(run)
    with _style():
        figure, grid = _grid(2, 3, (13, 7.4))
        _learning(grid[0, 0], steps, rows)
        _clipping(grid[0, 1], steps, whole)
        _movement(grid[0, 2], steps, whole)
        _scales(grid[1, 0], steps, whole)
        _lengths(grid[1, 1], steps)
        _entropy(grid[1, 2], steps)
        _finish(grid, steps[-1]["step"])
        figure.suptitle(_title(run, rows), x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def draw_curves(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """A panel for each metric: its values, and their running mean. ImportError without matplotlib."""
    with _style():
        across = min(len(names), 3)
        down = -(-len(names) // across)
        figure, grid = _grid(down, across, (4.4 * across, 3.0 * down))
        for axes, name in zip(grid.flat, names, strict=False):
            axes.set_title(name.replace("$", r"\$"), loc="left")
            seen = [row for row in rows if isinstance(row.get(name), int | float)]
            _smoothed(axes, *_curve(seen, name), BLUE, name)
        for axes in grid.flat[len(names) :]:
            axes.set_axis_off()
        _finish(grid, max((row["step"] for row in rows), default=1))
    return figure


def _style() -> Any:
    """Our settings, for the time of a `with`: the caller's matplotlib settings stay unchanged."""
    from matplotlib import style

    return style.context(STYLE)


def _grid(down: int, across: int, size: tuple[float, float]) -> tuple[Figure, NDArray[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no display is needed

    class Shown(Figure):
        """Without pyplot a notebook does not show a figure: this method does."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            with _style():
                self.savefig(file, dpi=80, format="png")
            return file.getvalue()

    figure = Shown(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    return figure, figure.subplots(down, across, squeeze=False)


def _finish(grid: NDArray[Any], last: int) -> None:
    for axes in grid.flat:
        axes.set_xlim(0, 1.015 * max(last, 2))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(y=0.08)
    for axes in grid[-1]:
        axes.set_xlabel("step")


def _title(run: Path, rows: Sequence[Row]) -> str:
    # matplotlib would read $ as the start of a formula.
    name = f"{run.parent.name}/{run.name}".replace("$", r"\$")
    parts = [name]
    with contextlib.suppress(Exception):  # the algorithm's name is optional
        if algorithm := read_config(run).get("algorithm"):
            parts.append(str(algorithm).replace("$", r"\$"))
    graded = is_graded(rows)
    if seen := [score_text(score_interval(row, graded)[0], graded) for row in evaluations(rows, graded)]:
        parts.append(f"held-out {'reward' if graded else 'accuracy'} {change_text(seen[0], seen[-1], len(seen))}")
    parts.append(f"{rows[-1]['step']:,} steps")
    return "   ·   ".join(parts)


def _learning(axes: Axes, steps: Sequence[Row], rows: Sequence[Row]) -> None:
    if not any("reward/mean" in row for row in steps):  # supervised fine-tuning
        _head(axes, "Does it learn?", "negative log-likelihood per token of the data set's completions")
        _smoothed(axes, *_curve(steps, "loss/mean"), BLUE, "training")
        held = [(row["step"], row["eval/loss"]) for row in rows if row.get("eval/loss") is not None]
        axes.plot(*np.array(held).reshape(-1, 2).T, color=RED, marker="o", markersize=3.5, label="held-out")
        axes.legend(loc="upper right")
        return
    graded = is_graded(rows)
    what = "reward" if graded else "accuracy"
    _head(axes, "Does it learn?", f"reward of the samples; {what} on held-out problems, 95 % interval")
    x, reward = _curve(steps, "reward/mean")
    _smoothed(axes, x, reward, BLUE, "reward, mean of the batch")
    evals = evaluations(rows, graded)
    if evals:
        # [evals, 3] → three arrays [evals].
        score, low, high = np.array([score_interval(row, graded) for row in evals]).T
        arms = [score - low, high - score]
        axes.errorbar(
            [row["step"] for row in evals], score, yerr=arms, color=RED, marker="o", markersize=3.5, linewidth=1.4,
            elinewidth=1, capsize=2, label=f"held-out {what}", zorder=4,
        )  # fmt: skip
        if np.nanmin(reward) >= 0 and np.nanmax(reward) <= 1:
            axes.set_ylim(0, 1.04)
    axes.legend(loc="lower right")


def _clipping(axes: Axes, steps: Sequence[Row], whole: bool) -> None:
    low_eps, high_eps = _last(steps, "clip/eps_low"), _last(steps, "clip/eps_high")
    x, low = _curve(steps, "clip/sequences_low")
    _, high = _curve(steps, "clip/sequences_high")
    # A stack plot cannot contain NaN.
    low, high = np.nan_to_num(low), np.nan_to_num(high)
    has_eps = low_eps is not None and high_eps is not None
    if not has_eps and not (low.any() or high.any()):
        _head(axes, "What is clipped?", "this objective does not clip the ratio")
        return
    what = "that give no gradient" if whole else "with a clipped token"
    _head(axes, "What is clipped?", f"share of the sequences of mini-batches ≥ 2 {what}")
    ratio = "s" if whole else "w"
    labels = ["A < 0", "A > 0"]
    if has_eps:
        labels = [f"A < 0 and {ratio} < 1 − {low_eps:.2g}", f"A > 0 and {ratio} > 1 + {high_eps:.2g}"]
    axes.stackplot(x, low, high, colors=[ORANGE, SKY], alpha=0.9, linewidth=0, labels=labels)
    axes.set_ylim(0, max(1.15 * float((low + high).max()), 0.05))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="upper right", reverse=True)


def _movement(axes: Axes, steps: Sequence[Row], whole: bool) -> None:
    _head(
        axes, "How far do sequences move?", "log s in mini-batches ≥ 2" + (" against the clip range" if whole else "")
    )
    x, median = _curve(steps, "ratio/log_s_p50")
    _, p05 = _curve(steps, "ratio/log_s_p05")
    _, p95 = _curve(steps, "ratio/log_s_p95")
    _, low = _curve(steps, "clip/eps_low")
    _, high = _curve(steps, "clip/eps_high")
    if whole and np.isfinite(low).any():  # ε of token ratios is not a bound of log s
        axes.fill_between(x, -low, high, color=GREEN, alpha=0.13, linewidth=0, label="clip range")
        for edge in (-low, high):
            axes.plot(x, edge, color=GREEN, linewidth=1.1)
    axes.fill_between(x, p05, p95, color=BLUE, alpha=0.22, linewidth=0, label="5–95 % of sequences")
    axes.plot(x, median, color=BLUE, linewidth=1.5, label="median")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.2 * (top - bottom))  # room for the legend above the curves
    axes.legend(loc="upper right", ncols=3, columnspacing=1.0)


def _scales(axes: Axes, steps: Sequence[Row], whole: bool) -> None:
    if whole:
        _head(axes, "Is ε sensible?", "|log s|: ε should be between the noise and the largest |log s|")
    else:
        _head(axes, "Is drift above the noise?", "|log s| per sequence; this objective clips tokens, not sequences")
    shown = [
        ("ratio/log_s_max_abs", "largest of a sequence", FAINT, 1.0, "-"),
        ("ratio/log_s_std", "standard deviation", BLUE, 1.6, "-"),
        ("clip/eps_high", "ε high", GREEN, 1.4, "--"),
        ("clip/eps_low", "ε low", GREEN, 1.4, ":"),
    ]
    drawn: list[NDArray[np.float64]] = []
    for name, label, color, width, dash in shown if whole else shown[:2]:
        x, y = _curve(steps, name)
        # A logarithmic axis cannot show 0.
        y[y <= 0] = np.nan
        if np.isfinite(y).any():
            axes.plot(x, y, color=color, linewidth=width, linestyle=dash, label=label)
            drawn.append(y)
    x, noise = _curve(steps, "noise/log_s_p95_abs")
    noise[noise <= 0] = np.nan
    if drawn or np.isfinite(noise).any():
        axes.set_yscale("log")
    if np.isfinite(noise).any():
        floor = float(np.nanmin(noise)) / 3
        axes.fill_between(x, np.full_like(noise, floor), noise, color=RED, alpha=0.25, linewidth=0, label="noise floor")
        axes.plot(x, noise, color=RED, linewidth=1.2)
        axes.set_ylim(bottom=floor)
    if drawn or np.isfinite(noise).any():
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.42))


def _lengths(axes: Axes, steps: Sequence[Row]) -> None:
    _head(axes, "How long are completions?", "tokens; those that hit max_new_tokens are truncated")
    x, mean = _curve(steps, "length/mean")
    _smoothed(axes, x, mean, BLUE, "mean")
    _, clipped = _curve(steps, "length/clipped_mean")
    if np.isfinite(clipped).any():
        axes.plot(
            x, clipped, color=ORANGE, marker=".", markersize=3, linewidth=0.8, alpha=0.9, label="mean of clipped ones"
        )
    _, longest = _curve(steps, "length/max")
    axes.plot(x, longest, color=FAINT, linewidth=1.0, linestyle=":", label="longest")
    top = np.nanmax(longest) if np.isfinite(longest).any() else 1.0
    axes.set_ylim(0, 1.3 * float(top))
    _, truncated = _curve(steps, "length/truncated")
    last = truncated[-5:]
    if np.isfinite(last).any():
        axes.text(0.02, 0.05, f"truncated, last 5 steps: {np.nanmean(last):.1%}", transform=axes.transAxes, color=FAINT)
    axes.legend(loc="upper right", ncols=3)


def _entropy(axes: Axes, steps: Sequence[Row]) -> None:
    _head(axes, "Does it still explore?", "entropy per token in nats; gradient norm before clipping")
    x, entropy = _curve(steps, "policy/entropy")
    _smoothed(axes, x, entropy, BLUE, "entropy")
    axes.set_ylim(0, 1.25 * max(float(np.nanmax(entropy)) if np.isfinite(entropy).any() else 1.0, 1e-6))
    # The gradient norm has another unit, so it has its own axis on the right.
    other = axes.twinx()
    other.grid(False)
    _, norm = _curve(steps, "grad/norm")
    other.plot(x, norm, color=ORANGE, linewidth=1.1, alpha=0.9, label="gradient norm (right)")
    other.set_ylim(0, 1.25 * max(float(np.nanmax(norm)) if np.isfinite(norm).any() else 1.0, 1e-6))
    other.tick_params(colors=ORANGE, length=0)
    other.spines["top"].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    more, names = other.get_legend_handles_labels()
    axes.legend([*handles, *more], [*labels, *names], loc="upper right", ncols=2)


def _head(axes: Axes, question: str, sentence: str) -> None:
    axes.set_title(question, loc="left", fontsize=10.5, fontweight="bold", pad=20)
    line = axes.text(0, 1.025, sentence, transform=axes.transAxes, fontsize=8, color=FAINT, va="bottom")
    line.set_in_layout(False)  # a long sentence must not make its panel narrow


def _smoothed(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], color: str, label: str) -> None:
    """The values as a light line, and their running mean."""
    width = max(1, len(y) // 12)
    if width > 1:
        axes.plot(x, y, color=color, linewidth=0.9, alpha=0.3)
    axes.plot(x, running_mean(y, width), color=color, linewidth=1.9, label=label)


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of the values in a window of `width` steps around each step; NaN values are left out.

    >>> running_mean(np.array([0.0, 3.0, 6.0]), 1).tolist(), running_mean(np.array([0.0, np.nan, 6.0]), 3).tolist()
    ([0.0, 3.0, 6.0], [0.0, 3.0, 6.0])
    """
    # values, out: [steps].
    half = width // 2
    out = np.full(len(values), np.nan)
    for index in range(len(values)):
        near = values[max(index - half, 0) : index + half + 1]
        if np.isfinite(near).any():
            out[index] = np.nanmean(near)
    return out


def _curve(rows: Sequence[Row], name: str) -> Curve:
    values = [row.get(name) for row in rows]
    return (
        np.array([row["step"] for row in rows], dtype=np.float64),
        np.array([np.nan if v is None or isinstance(v, str) else v for v in values], dtype=np.float64),
    )


def _last(rows: Sequence[Row], name: str) -> Any:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)
