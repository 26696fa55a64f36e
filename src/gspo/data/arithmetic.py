"""The embedded task: addition, column by column, generated from a seed.

The answer to `37+48=` lists the columns from the right, each as `digits + carry = two-digit sum`, then the result after
`>`: `7+8+0=15,3+4+1=08>85`. All columns have the same form, so a small model can learn it; a wrong carry makes the
result wrong, so there is something to learn.

A chain is several additions in one problem, each with a letter: `a37+48b12+25=`, copied and answered one after the
other, `a37+48=7+8+0=15,3+4+1=08>85b12+25=2+5+0=07,1+2+0=03>37`. It makes completions as long as one wishes.

A hash of the sorted operands (37+48 and 48+37 stay together) assigns each problem to one of three disjoint sets, for
every seed: warm start (supervised), reinforcement learning, held-out test. Torch-free.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from gspo import rng
from gspo.errors import DataError

ALPHABET = "0123456789+=,>"
MARKER = ">"
LONGEST_CHAIN = 12  # additions; each needs a letter
DIGITS = (2, 4)  # default number of digits of the operands: from, to

Split = Literal["warm", "train", "test"]
SPLITS: tuple[Split, ...] = ("warm", "train", "test")
# The range of the hash that belongs to each split: 40 % warm start, 40 % RL, 20 % held out.
_BOUNDS = {"warm": (0.0, 0.4), "train": (0.4, 0.8), "test": (0.8, 1.0)}
_CHUNK = 1024  # problems drawn at once


class Problem(NamedTuple):
    """One addition.

    >>> worked((37, 48))
    Problem(question='37+48=', answer='85', solution='7+8+0=15,3+4+1=08>85')
    """

    question: str
    answer: str
    solution: str  # the whole completion, without EOS


def worked(operands: Sequence[int], forgets: Sequence[bool] = ()) -> Problem:
    """Write an addition column by column; operands may differ in length (missing digits are 0).

    `forgets[i]` drops the carry into column i (from the right), so that the solution ends with a wrong result; `answer`
    stays correct.

    >>> worked((37, 48), forgets=(False, True)).solution
    '7+8+0=15,3+4+0=07>75'
    """
    carry, columns, written = 0, [], ""
    for place in range(len(str(max(operands)))):
        if place < len(forgets) and forgets[place]:
            carry = 0
        digits = [operand // 10**place % 10 for operand in operands]
        column = sum(digits) + carry
        columns.append("+".join(map(str, (*digits, carry))) + f"={column:02d}")
        carry = column // 10
        written = f"{column % 10}{written}"
    result = f"{carry}{written}".lstrip("0") or "0"
    return Problem("+".join(map(str, operands)) + "=", str(sum(operands)), ",".join(columns) + f"{MARKER}{result}")


def chain(parts: Sequence[Problem]) -> Problem:
    """Several additions as one problem; the answer has the results in order.

    >>> chain([worked((3, 4)), worked((5, 5))])
    Problem(question='a3+4b5+5=', answer='7 10', solution='a3+4=3+4+0=07>7b5+5=5+5+0=10>10')
    """
    named = list(zip(string.ascii_lowercase[: len(parts)], parts, strict=True))
    question = "".join(f"{letter}{part.question.rstrip('=')}" for letter, part in named)
    solution = "".join(f"{letter}{part.question}{part.solution}" for letter, part in named)
    return Problem(f"{question}=", " ".join(part.answer for part in parts), solution)


def split_of(operands: Sequence[int]) -> Split:
    """Which of the three disjoint sets a problem belongs to.

    >>> split_of((37, 48)) == split_of((48, 37))
    True
    """
    u = float(_share(np.asarray([sorted(operands)]))[0])
    return next(split for split in SPLITS if _BOUNDS[split][0] <= u < _BOUNDS[split][1])


def problem(
    index: int, *, split: Split = "train", seed: int = 1, digits: tuple[int, int] = DIGITS, operands: int = 2
) -> Problem:
    """Problem number `index` of the endless stream of a split; a pure function of its arguments."""
    chunk, offset = divmod(index, _CHUNK)
    return worked(_draw(chunk, split, seed, digits, operands)[offset].tolist())


def problems(
    split: Split, *, seed: int = 1, digits: tuple[int, int] = DIGITS, operands: int = 2, start: int = 0
) -> Iterator[Problem]:
    """The endless stream `problem(start), problem(start + 1), …`; problems may repeat."""
    while True:
        chunk, offset = divmod(start, _CHUNK)
        for row in _draw(chunk, split, seed, digits, operands)[offset:].tolist():
            yield worked(row)
            start += 1


def chains(split: Split, length: int, *, seed: int = 1, digits: tuple[int, int] = DIGITS) -> Iterator[Problem]:
    """The endless stream of chains: consecutive problems, `length` of them at a time."""
    stream = problems(split, seed=seed, digits=digits)
    while True:
        yield chain(list(islice(stream, length)))


def distinct_problems(
    split: Split, count: int, *, seed: int = 1, digits: tuple[int, int] = DIGITS, chained: int | None = None
) -> list[Problem]:
    """The first `count` different problems of the stream, or fewer if this difficulty has fewer."""
    found: dict[str, Problem] = {}
    repeats = 0
    stream = (
        problems(split, seed=seed, digits=digits)
        if chained is None
        else chains(split, chained, seed=seed, digits=digits)
    )
    for drawn in stream:
        # After so many repeats practically all problems have been found.
        if len(found) == count or repeats > max(4 * _CHUNK, 4 * len(found)):
            break
        repeats = repeats + 1 if drawn.question in found else 0
        found.setdefault(drawn.question, drawn)
    return list(found.values())


def _draw(chunk: int, split: str, seed: int, digits: tuple[int, int], operands: int) -> np.ndarray:
    """Operands of `_CHUNK` problems, [_CHUNK, operands]; each is redrawn until it belongs to the split."""
    if split not in _BOUNDS:
        raise DataError(f"embedded:arithmetic has the splits {', '.join(SPLITS)}, got {split!r}")
    low, high = digits
    if not (1 <= low <= high <= 6 and 2 <= operands <= 8):
        raise DataError(f"embedded:arithmetic takes 1 to 6 digits and 2 to 8 operands, got {digits} and {operands}")
    row = chunk * _CHUNK + np.arange(_CHUNK)
    key = f"arithmetic/{split}/{low}-{high}/{operands}"
    chosen = np.zeros((_CHUNK, operands), dtype=np.int64)
    missing = np.ones(_CHUNK, dtype=bool)
    attempt = 0
    while missing.any():
        # All operands of a problem have the same number of digits; a single digit may be 0.
        length = low + (rng.uniform(seed, key, row, attempt, 0) * (high - low + 1)).astype(np.int64)
        floor = np.where(length == 1, 0, 10 ** (length - 1))[:, None]
        u = rng.uniform(seed, key, row[:, None], attempt, 1 + np.arange(operands)[None, :])
        drawn = floor + (u * (10 ** length[:, None] - floor)).astype(np.int64)
        share = _share(np.sort(drawn, axis=1))
        take = missing & (share >= _BOUNDS[split][0]) & (share < _BOUNDS[split][1])
        chosen[take] = drawn[take]
        missing &= ~take
        attempt += 1
    return chosen


def _share(sorted_operands: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each row of operands, the same in every run and for every seed."""
    columns = [sorted_operands[:, i] for i in range(sorted_operands.shape[1])]
    return rng.uniform(0, "arithmetic-split", *columns)
