"""A comparison on a terminal: values in, rich renderables out, for a given width.

Names of runs and config values are untrusted text: `clean` removes control characters before they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gspo.report.compare.arms import MISSING, Band
from gspo.report.compare.compare import Comparison

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
