"""A comparison as a page and on a terminal.

Names of runs and config values are untrusted text: `clean` removes control characters before they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gspo.errors import ConfigError
from gspo.report.comparison import MISSING, Arm, Band, Comparison
from gspo.report.page.page import html_page
from gspo.stats import Floats
from gspo.system import atomic_write

BLOCKS = "▁▂▃▄▅▆▇█"
LONGEST = 48  # characters of a config value; config.yaml has all of it
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


def compare_view(found: Comparison, width: int, clean: Callable[[str], str]) -> RenderableType:
    """Outcome, differing keys, curves, notes."""
    names = [clean(arm.name) for arm in found.arms]
    several = any(len(arm.runs) > 1 for arm in found.arms)
    outcome = [(clean(what), [clean(cell) for cell in cells]) for what, cells in found.outcome]
    config = [(clean(key), [clean(show_value(value)) for value in values]) for key, values in found.config]
    parts: list[RenderableType] = [_heading("Outcome"), side_by_side(names, outcome, width)]
    if several:
        parts.append(Text("mean over runs ± half of its 95 % t interval", style="dim"))
    if config:
        parts += [Text(), _heading("Keys that differ"), side_by_side(names, config, width)]
    elif len(names) == 1:
        parts += [Text(), Text("the configs differ only in seed and names, so all runs form one arm")]
    for metric in found.metrics[:3]:
        lines = _curves([arm.band(metric) for arm in found.arms], names, width)
        if lines:
            parts += [Text(), _heading(clean(metric)), *lines]
    if found.notes:
        parts += [Text(), *(Text(f"note: {clean(note)}", style="dim") for note in found.notes)]
    return Group(*parts)


def side_by_side(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int) -> RenderableType:
    """A column per arm, split into several tables if the width requires it; if no column fits, a block per arm."""
    label = max(cell_len(what) for what, _ in rows)
    widths = [2 + max(cell_len(name), *(cell_len(v[i]) for _, v in rows)) for i, name in enumerate(names)]
    if label + max(widths) > width:
        return Group(*(_block(i, name, rows, width) for i, name in enumerate(names)))
    tables, room = list[list[int]](), 0
    for i, wide in enumerate(widths):
        if not tables or room < wide:
            tables.append([])
            room = width - label
        tables[-1].append(i)
        room -= wide
    parts = [part for arms in tables for part in (Text(), _columns(arms, names, rows, label))]
    return Group(*parts[1:])


def _columns(
    arms: Sequence[int], names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], label: int
) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True, min_width=label)
    for i in arms:
        table.add_column(no_wrap=True, style=_style(i))
    table.add_row("", *(Text(names[i], style="bold") for i in arms))
    for what, values in rows:
        table.add_row(Text(what), *(Text(values[i]) for i in arms))
    return table


def _block(i: int, name: str, rows: Sequence[tuple[str, Sequence[str]]], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", overflow="fold", max_width=max(width // 2, 8))
    table.add_column(overflow="fold")
    for what, values in rows:
        if values[i]:
            table.add_row(Text(what), Text(values[i]))
    return Group(Text(name, style=f"bold {_style(i)}"), table)


def show_value(value: Any) -> str:
    """A config value in a line.

    >>> show_value(True), show_value(None), show_value(0.0003), show_value("a" * 60)[-3:]
    ('true', 'null', '0.0003', 'aa…')
    """
    plain = {True: "true", False: "false", None: "null"}
    text = plain[value] if value is None or isinstance(value, bool) else str(value) if value is not MISSING else "—"
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _curves(bands: Sequence[Band], names: Sequence[str], width: int) -> list[Text]:
    """One sparkline per arm, on a common scale, between its first and last value."""
    drawn = [band for band in bands if len(band.steps) > 1]
    if not drawn:
        return []
    low, high = min(float(b.mean.min()) for b in drawn), max(float(b.mean.max()) for b in drawn)
    last = max(float(b.steps[-1]) for b in drawn)
    label = min(max(map(cell_len, names)), max(width // 3, 6))
    room = max(min(width - label - 18, 60), 4)
    lines = []
    for i, (band, name) in enumerate(zip(bands, names, strict=True)):
        head = Text(name, style="dim")
        head.truncate(label, overflow="ellipsis", pad=True)
        if len(band.steps) < 2:
            lines.append(Text.assemble(head, ("  fewer than two values", "dim")))
            continue
        at = np.linspace(0, last, room)
        at = at[(at >= band.steps[0] - last / room) & (at <= band.steps[-1] + 1e-9)]
        values = np.interp(at, band.steps, band.mean)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        blocks = "".join(BLOCKS[round((v - low) * scale)] for v in values.tolist())
        ends = f"{band.mean[0]:>7.3g} "
        lines.append(Text.assemble(head, ends, (f"{blocks:<{room}}", _style(i)), f" {band.mean[-1]:.3g}"))
    return lines


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _style(index: int) -> str:
    return STYLES[index % len(STYLES)]


SCRIPTS = ("uPlot.iife.min.js", "text.js", "charts.js", "compare.js")
POINTS = 2000  # per curve: more than a screen can show
SHARES = frozenset(
    {"eval/accuracy", "eval/pass_at_k", "reward/zero_variance_groups", "length/truncated", "clip/tokens"}
)
WORDS = {
    "eval/accuracy": "held-out problems",
    "eval/reward": "held-out problems",
    "reward/mean": "mean of the batch",
    "eval/loss": "nats per token of held-out rows",
    "clip/sequences": "share of the sequences of mini-batches ≥ 2, low and high together",
    "policy/entropy": "nats per token",
    "length/mean": "tokens per completion",
    "policy/kl_behavior": "nats per token, to the sampler",
    "grad/norm": "before clipping",
    "time/step_s": "seconds, including evaluation",
}


def write_page(found: Comparison, to: Path) -> Path:
    """Write the page atomically."""
    boot = {
        "title": " against ".join(arm.name for arm in found.arms[:4]) + (" …" if len(found.arms) > 4 else ""),
        "arms": [{"name": arm.name, "runs": [_run(run) for run in arm.runs]} for arm in found.arms],
        "outcome": [[what, list(cells)] for what, cells in found.outcome],
        "config": [[key, [show_value(value) for value in values]] for key, values in found.config],
        "notes": list(found.notes),
        "curves": [_curve(found.arms, metric, big=i == 0) for i, metric in enumerate(found.metrics)],
    }
    try:
        with atomic_write(to) as tmp, open(tmp, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(
                html_page(f"{boot['title']} · gspo compare", boot, template="compare.html", scripts=SCRIPTS)
            )
    except OSError as cause:
        raise ConfigError(f"{to} cannot be written: {cause.strerror}; choose another file with --out") from cause
    return to


def _run(run: Any) -> dict[str, Any]:
    seed = run.config.get("seed")
    return {"name": run.name, "path": str(run.path), "steps": run.steps, "seed": None if seed is None else str(seed)}


def _curve(arms: tuple[Arm, ...], metric: str, *, big: bool) -> dict[str, Any]:
    """One metric of all arms over the union of their steps; null where an arm has no value."""
    is_share = metric in SHARES or metric.startswith("clip/sequences")
    bands = [arm.band(metric) for arm in arms]
    runs = [[run.curve(metric) for run in arm.runs] for arm in arms]
    x = np.unique(np.concatenate([*(b.steps for b in bands), *(at for arm in runs for at, _ in arm)]))
    every = -(-len(x) // POINTS)
    note = WORDS.get(metric, "") + (f"; every {every}th step" if every > 1 else "")
    x = x[:: max(every, 1)]
    drawn = [
        {
            "mean": _over(x, band.steps, band.mean),
            "low": _over(x, band.steps, np.maximum(band.low, 0) if is_share else band.low),
            "high": _over(x, band.steps, np.minimum(band.high, 1) if is_share else band.high),
            "runs": [_over(x, at, values) for at, values in members] if len(members) > 1 else [],
        }
        for band, members in zip(bands, runs, strict=True)
    ]
    return {"metric": metric, "note": note, "x": x.tolist(), "arms": drawn, "big": big, "share": is_share}


def _over(x: Floats, at: Floats, values: Floats) -> list[float | None]:
    """Values at the steps x; null at steps that were not measured."""
    known = dict(zip(at.tolist(), values.tolist(), strict=True))
    return [None if (value := known.get(step)) is None else float(f"{value:.6g}") for step in x.tolist()]
