"""The rows of a data set: their columns, their reference answers, and their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo import rng
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


def order(seed: int, num_rows: int, submission_index: int, *, shuffle: bool = True) -> int:
    """The row of submission `submission_index`; every epoch visits each row once, in a new order.

    >>> sorted(order(1, 4, i) for i in range(4)), [order(1, 4, i, shuffle=False) for i in (3, 4, 5)]
    ([0, 1, 2, 3], [3, 0, 1])
    """
    if num_rows < 1:
        raise DataError("train_dataset has no rows")
    epoch, position = divmod(submission_index, num_rows)
    return int(_epoch(seed, num_rows, epoch)[position]) if shuffle else position


def draw_source(seed: int, weights: tuple[float, ...], submission_index: int) -> tuple[int, int]:
    """For a mixture: the source of a submission, drawn by weight, and the number of its earlier submissions.

    >>> [draw_source(1, (1.0, 3.0), i) for i in range(4)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    # Draws are made in chunks, so that the source of any submission can be found without drawing all earlier ones one
    # by one; a resumed run needs no stored state.
    chunk, offset = divmod(submission_index, _CHUNK)
    sources = _drawn(seed, weights, chunk * _CHUNK, _CHUNK)
    source = int(sources[offset])
    return source, _before(seed, weights, chunk)[source] + int((sources[:offset] == source).sum())


_CHUNK = 4096


@lru_cache(maxsize=8)
def _drawn(seed: int, weights: tuple[float, ...], start: int, count: int) -> NDArray[np.int64]:
    bounds = np.cumsum(weights) / np.sum(weights)
    u = rng.uniform(seed, "mixture", start + np.arange(count))
    # The last bound may round to less than 1, so the index is limited.
    return np.minimum(np.searchsorted(bounds, u, side="right"), len(weights) - 1)


@lru_cache(maxsize=8)
def _before(seed: int, weights: tuple[float, ...], chunk: int) -> tuple[int, ...]:
    """Number of submissions of each source before a chunk; counting takes 20 ms for the first million."""
    counts = np.zeros(len(weights), dtype=np.int64)
    for earlier in range(chunk):
        # __wrapped__ skips the cache, whose few entries hold the current chunks.
        counts += np.bincount(_drawn.__wrapped__(seed, weights, earlier * _CHUNK, _CHUNK), minlength=len(weights))
    return tuple(counts.tolist())


@lru_cache(maxsize=64)  # the sources of a mixture are in different epochs
def _epoch(seed: int, num_rows: int, epoch: int) -> NDArray[np.int64]:
    return rng.permutation(seed, "prompt-order", num_rows, epoch)
