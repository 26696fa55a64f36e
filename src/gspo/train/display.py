"""What a person sees while it trains: a calm live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gspo.config.render import inert

_BLOCKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    def say(self, message: str) -> None: ...
    def phase(self, name: str) -> None: ...
    def start_at(self, step: int) -> None: ...
    def step(self, metrics: Mapping[str, Any], example: tuple[str, str, bool] | None) -> None: ...
    def close(self) -> None: ...


def make_display(title: str, total_steps: int) -> Display:
    """Live on a terminal, plain in a pipe, a log or a dumb terminal."""
    console = Console(stderr=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LivePanel(console, title, total_steps)
    return Lines(total_steps)


class Lines:
    """One line per step on stdout."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def say(self, message: str) -> None:
        print(inert(message), flush=True)

    def phase(self, name: str) -> None:
        pass

    def start_at(self, step: int) -> None:
        pass

    def step(self, metrics: Mapping[str, Any], example: tuple[str, str, bool] | None) -> None:
        step = f"step {metrics['step']:>{len(str(self._total))}}/{self._total}"
        print("  ".join([step, *(f"{name} {text}" for name, text in _figures(metrics))]), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class LivePanel:
    """Progress, curves of reward and clipping, the figures of the last step, and one completion."""

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._console, self._title = console, title
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task("", total=total_steps)
        self._metrics: Mapping[str, Any] = {}
        self._example: tuple[str, str, bool] | None = None
        self._history: dict[str, list[float]] = {"reward": [], "clipped": []}
        self._accuracy: list[float] = []
        self._phase = "starting"
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=False)
        self._live.start()
        self._drawn = 0.0

    def say(self, message: str) -> None:
        self._live.console.print(Text(inert(message)))

    def start_at(self, step: int) -> None:
        """A resumed run has steps behind it."""
        self._progress.update(self._task, completed=step)

    def phase(self, name: str) -> None:
        self._phase = name
        self._draw()

    def step(self, metrics: Mapping[str, Any], example: tuple[str, str, bool] | None) -> None:
        self._metrics, self._example = {**self._metrics, **_known(metrics)}, example or self._example
        if metrics.get("reward/mean") is not None:
            self._history["reward"].append(metrics["reward/mean"])
            self._history["clipped"].append(_clipped(metrics) or 0.0)
        if metrics.get("eval/accuracy") is not None:
            self._accuracy.append(metrics["eval/accuracy"])
        self._progress.update(self._task, completed=metrics["step"])
        self._draw(force=True)

    def close(self) -> None:
        self._phase = "done"
        self._live.update(self._render(), refresh=True)
        self._live.stop()

    def _draw(self, force: bool = False) -> None:
        # A tiny model takes many steps a second; a person reads four.
        if force or time.monotonic() - self._drawn > 0.25:
            self._drawn = time.monotonic()
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        figures = _figures(self._metrics)
        table.add_row(*(Text(name, style="dim") for name, _ in figures))
        table.add_row(*(Text(text, style="bold") for _, text in figures))
        parts: list[RenderableType] = [Text(self._title, style="bold cyan"), self._progress, table]
        width = max(10, min(60, self._console.width - 24))
        for name, values in (*self._history.items(), ("held-out accuracy", self._accuracy)):
            if len(values) > 1:
                parts.append(Text.assemble((f"{name:<18} ", "dim"), sparkline(values, width)))
        if self._example is not None:
            prompt, completion, good = self._example
            mark = ("✓ ", "green") if good else ("✗ ", "red")
            line = Text.assemble(mark, (inert(prompt), "dim"), inert(completion), overflow="ellipsis", no_wrap=True)
            parts.append(line)
        self._progress.update(self._task, description=self._phase)
        return Group(*parts)


def sparkline(values: list[float], width: int) -> str:
    """The last values as blocks, averaged into `width` columns.

    >>> sparkline([0.0, 0.5, 1.0], 3)
    '▁▅█'
    """
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in values)


def _known(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if value is not None}


def _clipped(metrics: Mapping[str, Any]) -> float | None:
    low, high = metrics.get("clip/sequences_low"), metrics.get("clip/sequences_high")
    return None if low is None or high is None else low + high


def _figures(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures worth a person's glance, as text."""
    shown = [
        ("reward", metrics.get("reward/mean"), "{:.3f}"),
        ("held-out", metrics.get("eval/accuracy"), "{:.1%}"),
        ("clipped", _clipped(metrics), "{:.1%}"),
        ("entropy", metrics.get("policy/entropy"), "{:.3f}"),
        ("length", metrics.get("length/mean"), "{:.1f}"),
        ("sample tok/s", metrics.get("throughput/rollout_tokens_s"), "{:,.0f}"),
        ("train tok/s", metrics.get("throughput/train_tokens_s"), "{:,.0f}"),
        ("s/step", metrics.get("time/step_s"), "{:.2f}"),
    ]
    return [(name, form.format(value)) for name, value, form in shown if value is not None]
