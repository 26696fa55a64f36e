"""What a person sees while a run trains: a terminal, a log, a notebook."""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo.system import duration, inert, print_line

_BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # number of steps from which the time left is estimated
SHORT = 14  # a terminal with fewer lines shows the first two curves only

Example = tuple[str, str, bool]  # prompt, completion, whether it was rewarded


class Display:
    """Shows nothing, for ranks other than 0; a display overrides what it shows."""

    def say(self, message: str) -> None: ...
    def phase(self, name: str) -> None: ...
    def start_at(self, step: int) -> None: ...
    def step(self, metrics: Mapping[str, Any], example: Example | None) -> None: ...
    def close(self) -> None: ...


def make_display(title: str, total_steps: int) -> Display:
    """A live panel on a terminal or in a notebook; lines in a pipe, a log, a dumb terminal or one without Unicode."""

    if in_notebook():
        return NotebookPanel(title, total_steps)
    console = Console(stderr=False)
    if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return LivePanel(console, title, total_steps)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return Lines(total_steps, width)


class Pace:
    """The time left, from the duration of the last steps, evaluations included."""

    def __init__(self, total_steps: int) -> None:
        self._total, self._recent = total_steps, deque[float](maxlen=RECENT)

    def add(self, metrics: Mapping[str, Any]) -> None:
        if (seconds := metrics.get("time/step_s")) is not None:
            self._recent.append(seconds)

    def left(self, step: int) -> str | None:
        if not self._recent or step >= self._total:
            return None
        return duration(round(sum(self._recent) / len(self._recent) * (self._total - step)))


class Lines(Display):
    """One line per step on stdout; on a terminal of known width, as many figures as fit into a line."""

    def __init__(self, total_steps: int, width: int | None = None) -> None:
        self._total, self._width, self._pace = total_steps, width, Pace(total_steps)

    def say(self, message: str) -> None:
        print_line(inert(message))

    def step(self, metrics: Mapping[str, Any], example: Example | None) -> None:
        self._pace.add(metrics)
        line = f"step {metrics['step']:>{len(str(self._total))}}/{self._total}"
        figures = [(f.name, f.text(metrics)) for f in FIGURES]
        # The most important figures come first, because a narrow terminal shows only as many as fit.
        for name, text in [*figures[:7], ("left", self._pace.left(metrics["step"])), *figures[7:]]:
            longer = f"{line}  {name} {text}"
            if text is not None and (self._width is None or len(longer) <= self._width):
                line = longer
        print_line(line)

    def close(self) -> None:
        sys.stdout.flush()


class LivePanel(Display):
    """Progress and time left, a curve for each important figure, speed, and one completion."""

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._console, self._title, self._total = console, inert(title), total_steps
        self._pace, self._done, self._step = Pace(total_steps), False, 0
        self._seen: dict[str, list[float]] = {figure.name: [] for figure in FIGURES}
        self._texts: dict[str, tuple[str, str]] = {}  # first and last value of a figure as text
        self._example: Example | None = None
        self._phase, self._since = "starting", time.monotonic()
        # Twice a second: steps of a tiny model can be faster, and the time of a long phase must be seen to run.
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=False)
        self._live.start()

    def say(self, message: str) -> None:
        self._live.console.print(Text(inert(message)))

    def start_at(self, step: int) -> None:
        """The number of steps that a resumed run has done before."""
        self._step = step

    def phase(self, name: str) -> None:
        self._phase, self._since = name, time.monotonic()

    def step(self, metrics: Mapping[str, Any], example: Example | None) -> None:
        self._pace.add(metrics)
        self._step, self._example = metrics["step"], example or self._example
        for figure in FIGURES:
            value, text = figure.value(metrics), figure.text(metrics)
            if value is not None and text is not None:
                self._seen[figure.name].append(value)
                first, _ = self._texts.get(figure.name, (text.partition(" ±")[0], ""))
                self._texts[figure.name] = first, text

    def close(self) -> None:
        self._done = True
        self._live.stop()

    def _render(self) -> RenderableType:
        width = self._console.width
        curves = [f for f in FIGURES if f.is_curve and self._seen[f.name]]
        speeds = [f for f in FIGURES if not f.is_curve and self._seen[f.name]]
        parts: list[RenderableType] = [self._head(width), self._progress(width)]
        # One line per curve; a short terminal shows only the first two.
        label = max((len(f.name) for f in curves), default=0)
        for figure in curves[: 2 if self._console.height < SHORT else None]:
            values = self._seen[figure.name]
            first, now = self._texts[figure.name]
            now = f"{now:<7}"
            # First value, last value and curve; on a narrow terminal the last value and the curve.
            from_ = f"{first:>7} → " if width >= 60 else ""
            room = min(60, width - label - len(from_ + now) - 4)
            curve = sparkline(values, room) if len(values) > 1 and room > 3 else ""
            line = Text.assemble((f"{figure.name:<{label}}  {from_}", "dim"), (now, "bold"), "  ", (curve, "cyan"))
            parts.append(_one_line(line))
        if speeds:
            texts = (f"{figure.name} {self._texts[figure.name][1]}" for figure in speeds)
            parts.append(_one_line(Text(" · ".join(texts), style="dim")))
        if self._example is not None:
            parts.append(_one_line(_shown(*self._example, width)))
        return Group(*parts)

    def _head(self, width: int) -> Text:
        elapsed = time.monotonic() - self._since
        phase = "done" if self._done else f"{self._phase} {duration(round(elapsed))}" if elapsed >= 2 else self._phase
        if self._done and self._step < self._total:
            phase = "ended"
        room = width - len(phase) - 3
        if room < 8:
            return _one_line(Text(phase))
        # The end of a path is more informative than its beginning.
        title = self._title if cell_len(self._title) <= room else "…" + _tail(self._title, room - 1)
        return _one_line(Text.assemble((title, "bold cyan"), " · ", phase))

    def _progress(self, width: int) -> RenderableType:
        left = self._pace.left(self._step)
        head, tail = f"step {self._step}/{self._total}", f"{left} left" if left else ""
        room = min(40, width - len(head) - len(tail) - 4)
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(max(self._total, 1), self._step, room, style="bright_black", complete_style="cyan")
        bar.finished_style = "cyan"
        words = [Text(tail, no_wrap=True)] if len(head) + len(tail) + 2 <= width else []
        line.add_row(_one_line(Text(head, style="bold")), *([bar] if room >= 8 else []), *words)
        return line


class Figure(NamedTuple):
    """A displayed metric: a curve in the panel, or a number in its last line."""

    name: str
    metric: str
    form: str
    is_curve: bool = True

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        if self.metric == "eval/":
            return metrics.get("eval/reward" if _is_graded(metrics) else "eval/accuracy")
        if self.metric == "loss/":  # only where the loss is a likelihood; that of RL shows nothing
            return None if "reward/mean" in metrics else metrics.get("loss/mean")
        if self.metric != "clip/sequences":
            return metrics.get(self.metric)
        low, high = metrics.get("clip/sequences_low"), metrics.get("clip/sequences_high")
        return None if low is None or high is None else low + high

    def text(self, metrics: Mapping[str, Any]) -> str | None:
        value = self.value(metrics)
        if value is None:
            return None
        if self.metric == "eval/" and _is_graded(metrics):
            return f"reward {value:.3f} ± {metrics.get('eval/reward_ci') or 0.0:.3f}"
        return self.form.format(value)


def _is_graded(metrics: Mapping[str, Any]) -> bool:
    return (metrics.get("eval/graded") or 0.0) > 0


# In order of importance: if there is no room, the last ones are left out.
FIGURES = (
    Figure("reward", "reward/mean", "{:.3f}"),
    Figure("loss", "loss/", "{:.3f}"),  # of supervised fine-tuning
    Figure("held-out loss", "eval/loss", "{:.3f}"),
    Figure("held-out", "eval/", "{:.1%}"),  # accuracy; with graded rewards the reward and its interval
    Figure("clipped", "clip/sequences", "{:.1%}"),
    Figure("length", "length/mean", "{:,.1f}"),
    Figure("s/step", "time/step_s", "{:.2f}", False),
    Figure("entropy", "policy/entropy", "{:.3f}"),
    Figure("sample tok/s", "throughput/rollout_tokens_s", "{:,.0f}", False),
    Figure("train tok/s", "throughput/train_tokens_s", "{:,.0f}", False),
)


def sparkline(values: list[float], width: int) -> str:
    """The values as blocks, averaged into at most `width` columns. Small relative changes give a flat line.

    >>> sparkline([0.0, 0.5, 1.0], 3), sparkline([33.0, 34.0, 33.0], 3)
    ('▁▅█', '▁▂▁')
    """
    if len(values) > width:
        # Column i shows the mean of values[edges[i] : edges[i + 1]].
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    # At least 20 % of the highest value, so that noise is not drawn as large jumps.
    reach = max(high - low, 0.2 * abs(high))
    scale = (len(_BLOCKS) - 1) / reach if reach > 0 else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in values)


def _shown(prompt: str, completion: str, good: bool, width: int) -> Text:
    """The end of a prompt, and the beginning and end of its completion (the answer is at the end)."""
    mark = ("✓ ", "green") if good else ("✗ ", "red")
    # White space as one blank: line ends would change the height of the panel.
    prompt, completion = (inert(" ".join(text.split())) for text in (prompt, completion))
    room = max(width // 3, 8)
    if cell_len(prompt) > room:
        prompt = "…" + _tail(prompt, room - 1)
    room = max(width - cell_len(prompt) - 3, 8)
    if cell_len(completion) > room:
        half = (room - 1) // 2
        completion = set_cell_size(completion, half) + "…" + _tail(completion, half)
    return Text.assemble(mark, (prompt, "dim"), " ", completion)


def _tail(text: str, room: int) -> str:
    """The last `room` columns of a string."""
    cut = 0
    while cell_len(text[cut:]) > room:
        cut += 1
    return text[cut:]


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


CURVES = (("reward", "reward/mean"), ("held-out accuracy", "eval/accuracy"), ("held-out reward", "eval/reward"))
WIDTH, HEIGHT = 260, 70


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. A program that only imports ipykernel is not."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookPanel(Display):
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
