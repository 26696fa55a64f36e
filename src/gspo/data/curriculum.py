"""Prompts by difficulty: rows are drawn by the pass rate that earlier visits of them measured.

A row is useful if the policy solves it sometimes: a group whose samples all pass, or all fail, has no gradient. The row
of a submission is a function of (seed, submission, recorded visits). It is drawn at the first request for the
submission and does not change. A checkpoint stores visits and open submissions, so a resumed run draws the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo import rng

FLOOR = 0.1  # smallest weight of a row; the largest is 1
VISITS = 4  # visits of a row that are remembered
FORGET = 0.5  # weight of a visit beside the next newer one: the policy changes


def pass_rate(visits: Sequence[Sequence[int]]) -> float:
    """The estimate from visits (submission, passed, scored), oldest first; 0.5 without visits.

    The mean of a Beta(1, 1) prior after the visits, each counted FORGET times as much as the next newer one.

    >>> [round(pass_rate(v), 3) for v in ([], [(0, 8, 8)], [(0, 0, 8), (9, 8, 8)])]
    [0.5, 0.9, 0.643]
    """
    passed, scored = 1.0, 2.0
    for age, (_, good, num) in enumerate(reversed(visits)):
        passed, scored = passed + FORGET**age * good, scored + FORGET**age * num
    return passed / scored


def usefulness(rate: float) -> float:
    """The weight of a row: highest at a pass rate of ½, FLOOR at 0 and 1.

    >>> [round(usefulness(p), 3) for p in (0.0, 0.1, 0.5, 1.0)]
    [0.1, 0.424, 1.0, 0.1]
    """
    return FLOOR + (1 - FLOOR) * 4 * rate * (1 - rate)


class Curriculum:
    """Draws the row of each submission. `candidates`: the rows a submission may have (of a mixture: of one source).

    `begin`: what `to_json` returned when a checkpoint was saved.
    """

    def __init__(
        self,
        seed: int,
        num_rows: int,
        candidates: Callable[[int], NDArray[np.int64]],
        begin: Mapping[str, Any] | None = None,
    ) -> None:
        self._seed, self._candidates = seed, candidates
        begin = begin or {"visits": {}, "open": {}}
        self._visits = {int(row): [tuple(visit) for visit in visits] for row, visits in begin["visits"].items()}
        self._open = {int(submission): int(row) for submission, row in begin["open"].items()}
        self._weights = np.ones(num_rows)  # [rows]
        for row, visits in self._visits.items():
            self._weights[row] = usefulness(pass_rate(visits))
        # Sampling in the background asks for rows while the trainer saves.
        self._lock = threading.Lock()  # wait: none, held for one look-up

    def row(self, submission: int) -> int:
        """The row of a submission; drawn once."""
        with self._lock:
            if submission not in self._open:
                self._open[submission] = self._draw(submission)
            return self._open[submission]

    def _draw(self, submission: int) -> int:
        rows = self._candidates(submission)  # [candidates]
        weights = self._weights[rows]
        # A row that is being sampled is not drawn again before its result is known, unless there is no other.
        free = ~np.isin(rows, list(self._open.values()))
        weights = np.where(free, weights, 0.0) if free.any() else weights
        cumulative = np.cumsum(weights)
        u = float(rng.uniform(self._seed, "curriculum", submission)) * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, u, side="right")), int(np.flatnonzero(weights)[-1]))
        return int(rows[index])

    def record(self, submission: int, passed: Iterable[bool | None]) -> None:
        """The result of a submission: whether each sample passed; None where the reward failed."""
        marks = [mark for mark in passed if mark is not None]
        if not marks:
            return
        row = self.row(submission)
        with self._lock:
            # Sorted by submission, so that the order in which results arrive does not matter.
            visits = sorted([*self._visits.get(row, ()), (submission, sum(marks), len(marks))])[-VISITS:]
            self._visits[row] = visits
            self._weights[row] = usefulness(pass_rate(visits))

    def close(self, submissions: Iterable[int]) -> None:
        """These submissions are trained or rejected: they will not be asked for again."""
        with self._lock:
            for submission in submissions:
                self._open.pop(submission, None)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            # By row: a resumed run has them in another order, which would change the last digit of a mean.
            rates = np.array([pass_rate(self._visits[row]) for row in sorted(self._visits)])
        if not len(rates):
            return {}
        solved, unsolved = (rates > 1 - FLOOR).mean(), (rates < FLOOR).mean()
        return {
            "curriculum/rows_seen": len(rates),
            "curriculum/pass_rate": float(rates.mean()),
            "curriculum/solved": float(solved),
            "curriculum/unsolved": float(unsolved),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Per visited row: its estimated pass rate, and the visits (submission, passed, scored)."""
        with self._lock:
            return [
                {"row": row, "pass_rate": pass_rate(visits), "visits": [list(visit) for visit in visits]}
                for row, visits in sorted(self._visits.items())
            ]

    def to_json(self) -> dict[str, Any]:
        """Visits by row, and the rows of open submissions."""
        with self._lock:
            return {
                "visits": {str(row): [list(visit) for visit in self._visits[row]] for row in sorted(self._visits)},
                "open": {str(submission): self._open[submission] for submission in sorted(self._open)},
            }
