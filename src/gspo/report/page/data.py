"""A run directory as the plain values that the page shows, for the written report and for the live page."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.diagnosis import findings
from gspo.errors import ConfigError
from gspo.report.advice import SEVERE, has_learned, next_steps
from gspo.report.cards import HIGH_OVER_LOW, answers, clipped_share, last, shown, suggest_eps, time_parts
from gspo.report.read import Row, is_by_sequence, read_config, status_of
from gspo.report.samples import finite_number
from gspo.report.summary import RunSummary, change_text, ends_text, ends_words, score_name, summary_of
from gspo.system import duration, read_json

LOG_LINES = 200  # the last lines of log.txt that the page carries


def overview(
    run: Path, rows: Sequence[Row], config: Row, stories: Iterable[Mapping[str, Any]], doctor: Any
) -> dict[str, Any]:
    """Everything except curves and samples: numbers, answers, ε, time, objective, warnings, config, log.

    `doctor` has the sections of `gspo doctor`, or is None.
    """
    stories = sorted(stories, key=lambda story: story["step"])
    steps = [row for row in rows if row["step"] > 0]
    summary = summary_of(rows, is_by_sequence(config))
    found = findings(rows, config, summary.by_sequence)
    summary = replace(
        summary, collapsed=summary.collapsed or (not has_learned(summary) and any(f.name in SEVERE for f in found))
    )
    noise = last(steps, "noise/log_s_p95_abs")
    share, suggested = clipped_share(summary), None
    actor = config.get("actor")
    is_auto = isinstance(actor, dict) and actor.get("eps_clip") == "auto"
    if summary.by_sequence and summary.eps and share is not None and not is_auto and not summary.collapsed:
        suggested = suggest_eps(stories, summary.eps, share, noise)
    lines = config_lines(run)
    planned = next((int(c["value"]) for c in lines if c["key"] == "total_train_steps" and c["value"].isdecimal()), None)
    done = status_of(run, summary.steps, config) == "finished"
    return {
        "name": f"{run.absolute().parent.name}/{run.absolute().name}",
        "path": str(run),
        "figures": _figures(summary, steps, planned),
        "answers": answers(summary, steps, stories, suggested, next_steps(summary, steps, found, done)),
        "by_sequence": summary.by_sequence,
        "graded": summary.graded,
        "sources": list(summary.sources),
        "eps": summary.eps,
        "suggested": suggested,
        "clip": [{name: value for name, value in story.items() if name != "moved"} for story in stories],
        "time": time_parts(steps),
        "doctor": doctor,
        "audit": _audit(run),
        "config": lines,
        "environment": _object(run / "environment.json"),
        "log": _log(run),
    }


def config_of(run: Path) -> Row:
    """config.yaml as plain values; empty if it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_config(run)
    return {}


def high_over_low(rows: Sequence[Row]) -> float:
    """The run's ratio of ε_high to ε_low, on which moves up and down are compared."""
    low, high = last(rows, "clip/eps_low"), last(rows, "clip/eps_high")
    return high / low if low and high and low > 0 and high > 0 else HIGH_OVER_LOW


def metric_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Metric rows as a list of names and rows of values, so that no name is repeated for every step."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"names": names, "rows": [[_cell(row.get(name)) for name in names] for row in rows]}


def _cell(value: Any) -> float | int | str | None:
    return value[:80] if isinstance(value, str) else finite_number(value)


def _figures(summary: RunSummary, steps: Sequence[Row], planned: int | None) -> list[dict[str, str]]:
    """The headline numbers: start → end, time, tokens, seconds per step."""
    figures: list[dict[str, str]] = []

    def figure(name: str, value: str, note: str = "") -> None:
        figures.append({"name": name, "value": value, "note": note})

    if summary.score and summary.score_end:
        graded, (end, low, high) = summary.graded, summary.score_end
        ends = f"{low:.3f} … {high:.3f}" if graded else f"{100 * low:.1f}–{100 * high:.1f}"
        best = "" if summary.best_step is None else f"; best: step {summary.best_step:,}"
        change = change_text(shown(summary.score[0], graded), shown(end, graded), summary.evaluations)
        figure(score_name(summary), change, f"95 % interval {ends}{best}")
    if summary.reward is not None and summary.reward_end is not None:
        figure("reward", ends_text(summary, summary.reward, summary.reward_end), ends_words(summary).strip())
    figure("steps", f"{summary.steps:,}" + (f" of {planned:,}" if planned and planned > summary.steps else ""))
    if steps and summary.seconds:
        tokens = _trained_tokens(steps)
        figure("time", duration(summary.seconds), f"{summary.seconds / len(steps):.2f} s per step")
        if tokens:
            figure("tokens", _human(tokens), f"prompts and completions, {_human(tokens / len(steps))} per step")
        if summary.rollout_tokens_s and summary.train_tokens_s:
            figure("sampled per second", _human(summary.rollout_tokens_s), f"{_human(summary.train_tokens_s)} trained")
    return figures


def _trained_tokens(steps: Sequence[Row]) -> float:
    pairs = [
        (finite_number(row.get("throughput/train_tokens_s")), finite_number(row.get("time/train_s"))) for row in steps
    ]
    return sum(rate * seconds for rate, seconds in pairs if rate is not None and seconds is not None)


def _human(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit == "M" and value >= size):
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f}"


def config_lines(run: Path) -> list[dict[str, Any]]:
    """config.yaml key by key: the value as written and its origin from origins.json (runs before it have none)."""
    origins = _object(run / "origins.json")
    out: list[dict[str, Any]] = []
    sections: list[tuple[int, str]] = []
    try:
        lines = (run / "config.yaml").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return out
    for line in lines:
        found = re.match(r"( *)([A-Za-z_][\w]*):(?: (.*))?$", line)
        if found is None:
            continue
        indent, key, rest = len(found[1]), found[2], found[3]
        # `sections` holds the enclosing sections with their indentation; leave those that have ended.
        while sections and sections[-1][0] >= indent:
            sections.pop()
        if rest is None:
            sections.append((indent, key))
            continue
        name = ".".join([*(section for _, section in sections), key])
        # `dump` writes the origin behind each value as a comment.
        value, mark, _ = rest.rpartition("  # ")
        kind, detail = _origin(origins.get(name))
        by = _BY.get(kind, "unknown")
        text = detail if kind in ("file", "derived") else f"{kind} {detail}".strip()
        out.append({"key": name, "value": value if mark else rest, "origin": text, "by": by})
    return out


_BY = {"file": "user", "command line": "user", "default": "default"}
_BY |= dict.fromkeys(("algorithm", "level", "derived"), "derived")


def _origin(written: Any) -> tuple[str, str]:
    return (str(written.get("kind")), str(written.get("detail"))) if isinstance(written, dict) else ("", "")


def _audit(run: Path) -> dict[str, Any] | None:
    """Whose run it is and what cannot be known, of a directory that `gspo audit` wrote; None for a run of gspo."""
    found = _object(run / "audit.json")
    if not found:
        return None
    texts = {name: str(found.get(name) or "") for name in ("system", "version", "source")}
    lists = {name: found.get(name) for name in ("unknown", "notes")}
    return texts | {
        name: [str(line) for line in lines] if isinstance(lines, list) else [] for name, lines in lists.items()
    }


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_json(file, ConfigError)
    return {}


def _log(run: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return (run / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return []
