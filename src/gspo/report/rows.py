"""Samples of a run as rows for supervised fine-tuning: rejection sampling, with the origin of every row."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.report.samples import finite_number, read_samples, sample_steps

Row = dict[str, Any]
Test = Callable[[Mapping[str, Any]], bool]

FIELDS = ("reward", "length", "advantage", "step", "version", "finish", "completion", "prompt")
_SIGNS = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, "=": operator.eq,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def parse_filter(text: str) -> Test:
    """A condition on a sample: `reward>=1`, `length<200`, `finish=stop`, `reward_parts.format=1`.

    >>> parse_filter("reward >= 1")({"reward": 1.0}), parse_filter("finish=stop")({"finish": "length"})
    (True, False)
    """
    found = re.fullmatch(r"\s*(\w+(?:\.[\w@:.-]+)?)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*", text)
    name = "" if found is None else found[1]
    if found is None or not (name in FIELDS or name.startswith("reward_parts.")):
        raise ConfigError(
            f"--filter {text!r} is not a condition: write field, sign and value, for example reward>=1 or finish=stop; "
            f"the fields are {', '.join(FIELDS)} and reward_parts.NAME"
        )
    compare, wanted = _SIGNS[found[2]], _value(found[3])

    def test(row: Mapping[str, Any]) -> bool:
        head, _, part = name.partition(".")
        value = row.get(head)
        value = value.get(part) if part and isinstance(value, Mapping) else value
        # A value that is missing, or of another type than the wanted one, fulfils no condition.
        if isinstance(wanted, float):
            value = finite_number(value)
        return value is not None and type(value) is type(wanted) and bool(compare(value, wanted))

    return test


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")


def training_rows(run: Path, tests: Sequence[Test], *, best: bool) -> Iterator[Row]:
    """Rows {prompt, completion, answer, origin} of all kept steps; equal completions of a prompt once.

    best: of every prompt only the sample with the highest reward, if that is above 0; of equal ones the first.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in (row for step in sample_steps(run) for row in read_samples(run, step)):
        if all(test(row) for test in tests) and (made := _row(row, run)) is not None:
            found.setdefault((json.dumps(made["prompt"]), made["completion"]), made)
    yield from _best(found) if best else found.values()


def _best(found: Mapping[tuple[str, str], Row]) -> Iterable[Row]:
    chosen: dict[str, Row] = {}
    for (prompt, _), row in found.items():
        reward = row["origin"]["reward"]
        if reward is not None and reward > 0 and (prompt not in chosen or reward > chosen[prompt]["origin"]["reward"]):
            chosen[prompt] = row
    return chosen.values()


def _row(sample: Row, run: Path) -> Row | None:
    """None for an episode, whose turns are not one completion, and for a sample whose end was cut off."""
    # `messages` is there if the prompt is more than one question; a prompt without a chat template has neither.
    completion, messages = sample.get("completion"), sample.get("messages")
    prompt = messages if isinstance(messages, list) else sample.get("question") or sample.get("prompt")
    if sample.get("turns") is not None or sample.get("finish") == "length" or not isinstance(completion, str):
        return None
    if not completion.strip() or not prompt:
        return None
    origin = {
        "run": str(run),
        "step": sample.get("step"),
        "submission": sample.get("submission"),
        "sample": sample.get("sample"),
        "version": sample.get("version"),
        "reward": finite_number(sample.get("reward")),
    }
    return {"prompt": prompt, "completion": completion, "answer": sample.get("answer"), "origin": origin}
