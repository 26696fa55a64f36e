"""A group that a worker scores, and a worker, as the supervisor sees them."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any


@dataclass
class ScoringJob:
    """A group to score."""

    id: int
    num: int
    payload: bytes
    start: int = 0  # first call without a result
    retries: int = 0  # workers that died between calls or by an external signal
    unread: int = 0  # workers that did not read it in time
    values: list[tuple[int, int, float]] = field(default_factory=list)  # (part, sample, value)
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)  # sample -> (kind, message)

    def record(self, message: dict[str, Any], num_parts: int) -> None:
        """Store the result of one call; ValueError, KeyError or TypeError if it is not a result of worker.py."""
        part = _index(message["part"], num_parts)
        values = [(part, _index(sample, self.num), _finite(value)) for sample, value in message["values"]]
        failures = [(_index(sample, self.num), str(kind), str(text)) for sample, kind, text in message["failures"]]
        # A replacement worker would continue with the next call.
        self.start = _index(message["call"], num_parts * (self.num + 1)) + 1
        self.values += values
        for sample, kind, text in failures:
            self.failures.setdefault(sample, (kind, text))


@dataclass
class WorkerProcess:
    """A forked worker as the supervisor sees it."""

    pid: int
    channel: socket.socket
    page: mmap
    deadline: float  # on the supervisor's clock; inf while it is idle
    job: ScoringJob | None = None
    ready: bool = False
    has_read: bool = False  # whether it has read its job
    killed: bool = False  # by the supervisor, because a call exceeded its deadline
    corrupt: bool = False  # its channel delivered something other than the messages of worker.py
    incoming: bytes = b""
    outgoing: memoryview = memoryview(b"")  # noqa: RUF009 - immutable; the part of a job that its socket has not taken yet


def _index(value: Any, size: int) -> int:
    """A number in 0…size−1; ValueError for anything else that reward code wrote into the channel."""
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{value!r} is not a number below {size}")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a reward")
    return value
