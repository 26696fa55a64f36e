"""A run in a Jupyter notebook: a panel that is updated in its cell, and its curves as SVG. Needs IPython only."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.monitor.display import FIGURES, Example, Pace, Silent
from gspo.system.text import inert

CURVES = (("reward", "reward/mean"), ("held-out accuracy", "eval/accuracy"), ("held-out reward", "eval/reward"))
WIDTH, HEIGHT = 260, 70


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. A program that only imports ipykernel is not."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookPanel(Silent):
    """Progress, time left, the figures of the last step, and curves; messages are printed below."""

    def __init__(self, title: str, total_steps: int) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._title, self._total, self._pace = title, total_steps, Pace(total_steps)
        self._rows: list[Mapping[str, Any]] = []
        self._handle: Any = display({"text/html": self._html()}, raw=True, display_id=True)

    def say(self, message: str) -> None:
        print(inert(message), flush=True)

    def step(self, metrics: Mapping[str, Any], example: Example | None) -> None:
        self._pace.add(metrics)
        self._rows.append(metrics)
        self._handle.update({"text/html": self._html()}, raw=True)

    def _html(self) -> str:
        last = self._rows[-1] if self._rows else {"step": 0}
        figures = [f"{figure.name} {text}" for figure in FIGURES if (text := figure.text(last)) is not None]
        left = self._pace.left(last["step"])
        line = " · ".join([f"step {last['step']}/{self._total}", *figures, *([f"{left} left"] if left else [])])
        bar = f"<progress value='{last['step']}' max='{self._total}' style='width:100%'></progress>"
        return (
            f"<div><b>{html.escape(inert(self._title))}</b>{bar}{html.escape(line)}<br>{curve_svgs(self._rows)}</div>"
        )


def curve_svgs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Reward and held-out results by step, each as a small SVG; a metric with fewer than two values is left out."""
    drawn = []
    for name, metric in CURVES:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
        if len(points) > 1:
            drawn.append(_curve(name, points))
    return "".join(drawn)


def _curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    steps, values = zip(*points, strict=True)
    low, reach = min(values), (max(values) - min(values)) or 1.0
    across = (steps[-1] - steps[0]) or 1
    path = " ".join(
        f"{WIDTH * (step - steps[0]) / across:.1f},{HEIGHT - HEIGHT * (value - low) / reach:.1f}"
        for step, value in points
    )
    return (
        f"<figure style='display:inline-block;margin:4px 12px 4px 0'><figcaption>{name}: {values[0]:.3f} → "
        f"{values[-1]:.3f}</figcaption><svg width='{WIDTH}' height='{HEIGHT}' viewBox='-2 -2 {WIDTH + 4} {HEIGHT + 4}'>"
        f"<polyline points='{path}' fill='none' stroke='currentColor' stroke-width='1.5'/></svg></figure>"
    )
