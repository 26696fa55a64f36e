"""The page of a study from its result file, and its tables for the terminal (`gspo study show`). Torch-free."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo.stats import share_interval
from gspo.studies import contrasts, plan, results
from gspo.studies.contrasts import Interval, Verdict
from gspo.studies.measure import MEANING
from gspo.studies.plan import Check, Study
from gspo.studies.results import Record
from gspo.system import in_lab, install_command

WORDS: Mapping[Verdict, str] = {
    "shown": "shown",
    "opposite": "**the opposite is shown**",
    "not shown": "not shown",
    "too few seeds": "one seed: no decision",
    "not run": "not run yet",
}


PAIRED = "Intervals are 95 % t intervals over seeds; a difference is paired by seed."


class Decision(NamedTuple):
    check: Check
    found: Interval | None
    verdict: Verdict


def decisions(study: Study, records: Sequence[Record]) -> list[Decision]:
    """The result of every check of a study."""
    out = []
    for check in study.checks:
        ours = results.by_seed(records, check.arm, check.measure)
        theirs: Any = check.against
        if isinstance(theirs, str):
            theirs = results.by_seed(records, theirs, check.measure)
        found = contrasts.contrast(ours, theirs, check.factor)
        out.append(Decision(check, found, contrasts.verdict(found, check.side, check.margin)))
    return out


def decision_rows(study: Study, records: Sequence[Record]) -> list[list[str]]:
    rows = [["claim", "check", "estimate, 95 % interval", "seeds", "verdict"]]
    for check, found, verdict in decisions(study, records):
        count = str(found.n) if found else "0"
        rows.append([check.says, check.sentence(), mean_and_interval(found), count, WORDS[verdict]])
    return rows


def tables(study: Study, records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """Task → rows: a heading, then one row per arm, means with half-widths of 95 % intervals over seeds."""
    found: dict[str, list[list[str]]] = {}
    for arm in _arms(study, records):
        name, _, task = arm.partition(" @ ")
        rows = found.setdefault(task, [["arm", "seeds", *study.measures]])
        mine = [r for r in records if r["arm"] == arm and r["stage"] == "test"]
        rows.append([name, str(len(mine)), *(cell(mine, measure) for measure in study.measures)])
    return {task: _without_empty_columns(rows) for task, rows in found.items()}


def _without_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    kept = [i for i in range(len(rows[0])) if i < 2 or any(row[i] != "–" for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def _arms(study: Study, records: Sequence[Record]) -> list[str]:
    """The arms of a study in its order; for a computed study, the arms that were measured."""
    seen = list(dict.fromkeys(r["arm"] for r in records if r["stage"] == "test"))
    named = [arm for arm in study.arm_names() if arm in seen]
    shown = [*named, *(arm for arm in seen if arm not in named)]
    return [arm for arm in shown if any(m in r["measures"] for r in records if r["arm"] == arm for m in study.measures)]


def cell(records: Sequence[Record], measure: str) -> str:
    """A measure over seeds; with the number of runs that have a value, if some have none."""
    if measure in results.TIMED:
        records = [r for r in records if not results.is_busy(r)]
        if not records:
            return "busy"
    values = [r["measures"].get(measure) for r in records]
    known = [value for value in values if value is not None]
    if not known:
        return "never" if measure.endswith("_to_80") and values else "–"
    if measure == "collapsed":  # a share of runs: an interval that stays within 0 and 1
        mean, low, high = share_interval(known)
        return f"{mean:.2g} [{low:.2f}, {high:.2f}]"
    text = plus_minus(contrasts.interval(known))
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def plus_minus(found: Interval | None) -> str:
    """The mean, rounded like its half-width, which has two significant digits.

    >>> plus_minus(Interval(0.9312, 0.91, 0.9524, 5)), plus_minus(Interval(1234.0, None, None, 1))
    ('0.931 ± 0.021', '1234')
    >>> plus_minus(Interval(1.8e-16, 0.8e-16, 2.8e-16, 3)), plus_minus(Interval(640.0, 595.0, 685.0, 3))
    ('1.8e-16 ± 1e-16', '640 ± 45')
    """
    if found is None:
        return "–"
    if found.high is None:
        return f"{found.mean:.4g}"
    half = found.high - found.mean
    if half == 0:
        return f"{found.mean:.4g} ± 0"
    decimals = max(1 - math.floor(math.log10(half)), 0)
    if decimals > 5:
        return f"{found.mean:.2g} ± {half:.1g}"
    return f"{found.mean:.{decimals}f} ± {half:.{decimals}f}"


def mean_and_interval(found: Interval | None) -> str:
    """`0.21 [0.18, 0.24]`."""
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.mean:.3g}"
    return f"{found.mean:.3g} [{found.low:.3g}, {found.high:.3g}]"


def write_page(study: Study, docs: Path) -> Path:
    """Write the page of a user's study, and its figure, beside its result file."""
    records = results.current(study, results.read_records(docs, study))
    path = results.results_file(docs, study).with_suffix(".md")
    lines = section(study, records, draw(docs, study, records), ".")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draw(docs: Path, study: Study, records: Sequence[Record]) -> Path | None:
    """Draw the figure of a study; None without one, or without matplotlib."""
    if not study.plots:
        return None
    try:
        from gspo.studies.plot import draw_study
    except ImportError:
        return None
    shipped = docs / "img" / "studies" / f"{study.name}.png"
    return draw_study(study, records, shipped if study.is_shipped else shipped.parents[2] / shipped.name)


def section(study: Study, records: Sequence[Record], drawn: Path | None, images: str = "img/studies") -> list[str]:
    """The lines of a study: claim, checks, tables, figure and commands."""
    out = [f"## {study.name}", ""]
    for text in filter(None, (study.claim and f"*{study.claim}*", textwrap.fill(study.about, 120))):
        out += [text, ""]
    if not study.is_shipped:
        out += [*(f"{text}\n" for text in plan.dropped(study)), f"{PAIRED}\n"]
    run = f"`gspo study run {study.reference}`" + (f" ({study.needs})" if study.needs else "")
    if not records:
        return [*out, f"Not run yet: {run}."]
    out += [f"{run}. {_when(records)}", ""]
    if study.checks:
        out += [*markdown_table(decision_rows(study, records)), ""]
    for task, rows in tables(study, records).items():
        out += [*([f"### {study.name}: {task}", ""] if task else []), *markdown_table(rows), ""]
    if drawn is not None:
        out += [f"![{study.name}]({images}/{drawn.name})", ""]
    elif not study.is_shipped:
        out += [f"The curves need matplotlib: {install_command('report')}.", ""]
    if study.tune is not None:
        out += [*_tuning(study, records), ""]
    meanings = in_lab("lab.studies.computed:MEANING") if study.compute else MEANING
    out.append("; ".join(f"*{name}*: {meanings[name]}" for name in study.measures if name in meanings) + ".")
    failed = [f"{r['arm']} seed {r['seed']}: {r['failed']}" for r in records if r.get("failed")]
    if failed:
        out += ["", "Failed runs: " + "; ".join(failed) + "."]
    commands = {
        r["arm"]: plan.command_today(r["train"]) for r in reversed(records) if r["stage"] == "test" and "train" in r
    }
    if commands:
        out += ["", "<details><summary>The command of each row (first seed)</summary>", "", "```"]
        out += [f"{plan.command_today(commands[arm])}   # {arm}" for arm in _arms(study, records) if arm in commands]
        out += ["```", "", "</details>"]
    return out


def _tuning(study: Study, records: Sequence[Record]) -> list[str]:
    assert study.tune is not None
    best = results.chosen(study, records)
    rows = [["point", *study.arm_names()]]
    for point, overrides in study.tune.points():
        row = [point]
        for arm in study.arm_names():
            mine = [r for r in records if r["stage"] == "tune" and r["arm"] == f"{arm} {point}"]
            mark = " **chosen**" if best.get(arm) == overrides else ""
            row.append(cell(mine, study.tune.by) + mark)
        rows.append(row)
    seeds = ", ".join(map(str, study.tune.seeds))
    return [f"Tuning grid, by {study.tune.by} on the tuning seeds {seeds}:", "", *markdown_table(rows)]


def _when(records: Sequence[Record]) -> str:
    dates = sorted({r["date"] for r in records})
    commits = list(dict.fromkeys(r["commit"] or "no commit" for r in records))
    machines = list(dict.fromkeys(r["machine"] for r in records))
    versions = records[-1]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    at = "; ".join(machines)
    return f"{when}, {at}, one thread per run; {packages}; commit {', '.join(commits[:3])}."


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ([text.replace("|", "\\|") for text in row] for row in rows)
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in body)]
