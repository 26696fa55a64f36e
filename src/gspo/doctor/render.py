"""The text of `gspo doctor` and `gspo objectives`: plain values in, text of a given width out. Torch-free.

Texts from configs are untrusted: they pass through `inert` and are never parsed as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gspo.algorithms import ALGORITHMS, GATES, Algorithm
from gspo.doctor.explanation import WORDS, Report
from gspo.system import TextRows, count, human, inert, number

NARROWEST = 40


def to_text(report: Report, *, width: int = 100, styled: bool = False) -> str:
    """The report as text."""
    data = report.sections
    blocks: list[RenderableType] = [
        *_objective(data["objective"]),
        *_data(data["data"]),
        *_batch(data["batch"]),
        *_policies(data["policies"]),
        *_memory(data["memory"]),
        *_findings(data),
    ]
    return _render(Group(*blocks), width, styled)


def algorithm_table(*, width: int = 100, styled: bool = False) -> str:
    """All presets, one row each; the paper only where there is room for it."""
    columns = ("name", "ratio", "gate", "advantage", "aggregation", *(("paper",) if width >= 100 else ()))
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True, style="bold" if column == "name" else None)
    for a in ALGORITHMS.values():
        cells = (a.name, a.level, _gate(a), a.advantage, a.aggregation, a.paper.partition(",")[0])
        table.add_row(*cells[: len(columns)])
    hint = Text("\n`gspo objectives gspo` shows one formula; `algorithm: gspo` in a config chooses it.", style="dim")
    return _render(Group(table, hint), width, styled)


def algorithm_card(algorithm: Algorithm, *, width: int = 100, styled: bool = False) -> str:
    """One preset: formula, paper, defaults, note."""
    a = algorithm
    rows = [
        ("paper", a.paper),
        ("ratio", WORDS["ratio"][a.level]),
        ("gate", _gate(a)),
        ("advantage", WORDS["advantage"][a.advantage]),
        ("loss", WORDS["aggregation"][a.aggregation]),
        ("defaults", ", ".join(f"{name} {_number(value)}" for name, value in a.settings.items())),
        ("mini-batches", f"{a.minibatches} updates per rollout batch"),
        ("groups with equal rewards", a.zero_variance_groups),
        ("overlong penalty", "on" if a.overlong_penalty else "off"),
        ("note", a.note),
        ("choose it", f"algorithm: {a.name}"),
    ]
    parts = a.formula.split(",   ")
    lines = [Padding(_text(part), (0, 0, 0, 2)) for part in parts]
    return _render(Group(_text(f"{a.name}: {a.title}", "bold"), Text(), *lines, Text(), _pairs(rows)), width, styled)


def _gate(a: Algorithm) -> str:
    return GATES[a.gate].short.format(**{name: _number(value) for name, value in a.settings.items()})


def _number(value: Any) -> str:
    return "off" if value is None else number(value) if isinstance(value, float) else str(value)


def _objective(data: dict[str, Any]) -> Iterable[RenderableType]:
    yield _heading(f"Objective: {data['algorithm']}", data["title"])
    changed = not data["as_published"]
    if changed:
        same = data["same_as"]
        what = f"{data['algorithm']} with ratio level {data['level']} and aggregation {data['aggregation']}"
        tail = f": the objective of {same}" if same else ""
        yield Padding(_text(what + tail, "italic"), (0, 0, 0, 2))
    for part in data["formula"].split(",   "):
        yield Padding(_text(part, "cyan"), (0, 0, 0, 2))
    rows = [tuple(words.split(": ", 1)) for words in data["words"]]
    yield _pairs([*rows, ("paper", data["paper"])] if data["paper"] and not changed else rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for row in data["decided_by"]:
        table.add_row(_text(row["key"], "dim"), _text(_number(row["value"])), _text(row["where"], "dim"))
    yield Padding(table, (1, 0, 0, 2))


def _batch(data: dict[str, Any]) -> Iterable[RenderableType]:
    yield _heading("Batch")
    each = data["sequences_per_minibatch"]
    rows = [
        (
            "rollout batch",
            f"{data['prompts']:,} prompts × {data['group_size']:,} samples = {data['sequences']:,} sequences",
        )
        if not data["supervised"]
        else (
            "batch",
            f"{data['prompts']:,} rows of the data set",
        ),
        (
            "mini-batches",
            f"{data['minibatches']:,} of {each:,} sequences, an optimizer update each"
            + (f", in {data['epochs']} passes over the batch" if data["epochs"] > 1 else "")
            if data["divides"]
            else f"{data['minibatches']:,}: {data['sequences']:,} sequences do not divide",
        ),
    ]
    num, tokens = data["microbatches_at_most"], data["tokens_per_minibatch_at_most"]
    plus = "" if data["prompt_length_known"] else ", plus prompts"
    rows.append(
        (
            "micro-batches",
            f"{'at most' if not plus else 'about'} {num:,} per mini-batch and rank: a mini-batch has "
            f"at most {tokens:,} tokens{plus}, a micro-batch at most {data['max_tokens_per_microbatch']:,}",
        )
    )
    rows.append(("ranks", str(data["ranks"])))
    if data["updates"] is not None:
        rows.append(("run", f"{data['steps']:,} steps, {data['updates']:,} optimizer updates"))
    yield _pairs(rows)


def _data(data: dict[str, Any]) -> Iterable[RenderableType]:
    yield _heading("Problems")
    yield _pairs(
        [
            ("training", data["training"]),
            ("held out", data["held_out"]),
            ("prompts", data["template"]),
            ("reward", data["reward"]),
        ]
    )


def _policies(data: dict[str, Any]) -> Iterable[RenderableType]:
    yield _heading("Policies")
    yield _pairs(
        [
            ("samples (μ)", data["sampler"]),
            ("sampling", data["sampling"]),
            ("π_old", data["pi_old"]),
            ("correction", data["correction_words"]),
            ("KL", data["kl"]),
            *([("experts", data["experts"])] if data["experts"] else []),
            ("trained", data["trained"]),
        ]
    )


def _memory(data: dict[str, Any]) -> Iterable[RenderableType]:
    yield _heading("Memory", data["model"])
    if not data["known"]:
        yield _pairs([("unknown", data["unknown"])])
        return
    shape = data["shape"]
    experts = f", {shape['experts']} experts" if shape["experts"] else ""
    rows = [
        (
            "model",
            f"{count(shape['parameters'])} parameters, {shape['layers']} layers × {shape['hidden']}, "
            f"vocabulary {shape['vocabulary']:,}{experts}",
        )
    ]
    for item in data["items"]:
        size = "unknown" if item["num_bytes"] is None else human(item["num_bytes"])
        rows.append((item["name"], f"{size:>9}  {item['how']}"))
    for side, total in data["totals"].items():
        each = "each rank" if side == "trainer" and data["per_rank"] > 1 else side
        what = f"{each}, at its peak" if side == "trainer" else f"{each}, together"
        beside = "activations become gradients: not both in full" if side == "trainer" else ""
        rows.append((what, "unknown" if total is None else f"{human(total):>9}  {beside}"))
    yield _pairs(rows)


def _findings(data: dict[str, Any]) -> Iterable[RenderableType]:
    if data["messages"]:
        yield _heading("Keys that were renamed or set automatically")
        yield from (_flow(message, indent=2) for message in data["messages"])
    if data["without_effect"]:
        yield _heading("Keys without effect")
        yield _pairs((row["key"], f"{row['why']} ({row['where']})") for row in data["without_effect"])
    for kind, style in (("errors", "bold red"), ("warnings", "bold yellow")):
        if data[kind]:
            yield _heading({"errors": "Errors", "warnings": "Warnings"}[kind], style=style)
            for finding in data[kind]:
                yield _flow(f"{finding['key']} ({finding['where']}): {finding['message']}.", indent=2)
                yield _flow(f"→ {finding['remedy']}.", "green", indent=2)
    yield Text()
    yield _flow(_verdict(data), "bold")


def _verdict(data: dict[str, Any]) -> str:
    errors, warnings = len(data["errors"]), len(data["warnings"])
    if errors:
        return f"Config: it cannot run: {_plural(errors, 'error')}."
    if warnings and data["strict"]:
        return f"Config: it cannot run: {_plural(warnings, 'warning')}, and strict: true turns warnings into errors."
    found = _plural(warnings, "warning") if warnings else "no problems found"
    return f"Config: {found}. Run directory: {data['run_directory']}"


def machine_text(report: Report, *, width: int = 100, styled: bool = False) -> str:
    """The checks of this machine, and whether the config can run on it."""
    checks = report.sections["machine"]
    if checks is None:
        return "This machine: not checked (data, model, rewards, packages, GPUs, memory)."
    marks = {"ok": "✓", "failed": "✗", "unknown": "?"}
    rows = [
        (f"{marks[check['state']]} {check['what']}", check["text"].removeprefix(f"{check['what']}: "))
        for check in checks
    ]
    failed = [check for check in checks if check["state"] == "failed"]
    unknown = ", ".join(check["what"] for check in checks if check["state"] == "unknown")
    verdict = f"it cannot run here: {_plural(len(failed), 'problem')} (✗)" if failed else "it can run here"
    tail = f". Not checked: {unknown}" if unknown else ""
    blocks = [_heading("This machine"), _pairs(rows), Text(), _flow(f"This machine: {verdict}{tail}.", "bold")]
    return _render(Group(*blocks), width, styled)


def _plural(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _heading(title: str, detail: str = "", style: str = "bold") -> RenderableType:
    return Text.assemble("\n", _text(title, style), _text(f"  {detail}" if detail else "", "dim"))


def _pairs(rows: Iterable[Iterable[str]]) -> RenderableType:
    return TextRows([(inert(name), inert(value), "") for name, value in rows if value], indent=2)


def _flow(text: str, style: str = "", indent: int = 0) -> RenderableType:
    """A paragraph."""
    return TextRows([("", inert(text), style)], indent)


def _text(text: str, style: str = "") -> Text:
    return Text(inert(text), style=style, overflow="fold")


def _render(content: RenderableType, width: int, styled: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, NARROWEST),
        force_terminal=styled,
        no_color=not styled,
        color_system="standard" if styled else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(content, crop=False)  # a path may be wider
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").split("\n"))
