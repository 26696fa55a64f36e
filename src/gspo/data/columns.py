"""Which columns of a row hold the prompt, the answer and the completion, and whether they can be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo.data.chat import COMPLETION_COLUMNS, is_conversation
from gspo.data.sources import Row
from gspo.errors import DataError

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "target", "solution", "label", "output", "response")


def owner_of(section: str) -> str:
    """The section with the keys that say how rows are read: valid_dataset has only its path, split and mixture."""
    return "train_dataset" if section == "valid_dataset" else section


def with_answer(row: Row, index: int, prompt_name: str, answer_name: str | None, path: str, key: str) -> Row:
    content = column(row, prompt_name)
    is_text = isinstance(content, str) and content.strip()
    if not is_text and not (content and isinstance(content, list) and all(isinstance(m, Mapping) for m in content)):
        raise DataError(
            f"{path}, row {index}: column {prompt_name!r} must be a string or a list of messages, got {content!r:.200}"
        )
    answer = None if answer_name is None else column(row, answer_name)
    # NaN is how tables store a missing value; 1e999 is read as infinity.
    if answer_name is not None and (answer is None or (isinstance(answer, float) and not math.isfinite(answer))):
        raise DataError(f"{path}, row {index}: column {answer_name!r} is missing or null; set {key}.columns.answer")
    return row if row.get("answer") is not None else {**row, "answer": answer}


def find_prompt_column(row: Row, given: str | None, path: str, key: str) -> str:
    if given is not None:
        require(row, given, "prompt", path, key)
        return given
    for name in _PROMPT_COLUMNS:
        if row.get(name) is not None:
            return name
    raise DataError(
        f"{path} has no prompt column (looked for {', '.join(_PROMPT_COLUMNS)}); its columns are "
        f"{', '.join(row) or 'none'}. Set {key}.columns.prompt"
    )


def find_answer_column(row: Row, given: str | None, path: str, key: str) -> str | None:
    """None without such a column: not every reward needs an answer."""
    if given is not None:
        require(row, given, "answer", path, key)
        return given
    return next((name for name in _ANSWER_COLUMNS if row.get(name) is not None), None)


def find_completion_column(row: Row, given: str | None, prompt_name: str, path: str, key: str) -> str | None:
    """None: the prompt column holds conversations, whose assistant turns are trained."""
    if given is not None:
        require(row, given, "completion", path, key)
        return given
    if is_conversation(column(row, prompt_name)) and row.get("completion") is None:
        return None
    for name in COMPLETION_COLUMNS:
        if row.get(name) is not None and name != prompt_name:
            return name
    raise DataError(
        f"{path} has no completion to train on: column {prompt_name!r} has no assistant turn, and there is no column "
        f"{', '.join(COMPLETION_COLUMNS)}; its columns are {', '.join(row) or 'none'}. Set {key}.columns.completion"
    )


def check_completion(row: Row, index: int, prompt_name: str, name: str | None, path: str, key: str) -> None:
    if name is None:
        if not is_conversation(column(row, prompt_name)):
            raise DataError(f"{path}, row {index}: column {prompt_name!r} has no assistant turn, so nothing is trained")
        if column(row, prompt_name)[0].get("role") == "assistant":
            raise DataError(f"{path}, row {index}: column {prompt_name!r} begins with the assistant: no prompt")
        return
    content = column(row, name)
    if (isinstance(content, str) and content.strip()) or is_conversation(content):
        return
    raise DataError(
        f"{path}, row {index}: column {name!r} must be a completion: a string, or messages with an assistant turn, got "
        f"{content!r:.200}. Correct the row, or set {key}.columns.completion"
    )


def require(row: Row, name: str, what: str, path: str, key: str) -> None:
    if column(row, name) is None:
        raise DataError(
            f"{key}.columns.{what} is {name!r}, but the columns of {path} are {', '.join(row)}; "
            "a source of a mixture may have its own columns"
        )


def column(row: Mapping[str, Any], name: str) -> Any:
    # A column whose name contains a dot has priority over a nested one.
    if name in row:
        return row[name]
    value: Any = row
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value
