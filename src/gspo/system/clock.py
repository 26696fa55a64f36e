"""Seconds of a step by phase, and an optional timeline of all operators for a trace viewer."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gspo.system.heartbeat import beat

# Steps that `profile: true` records: not the first, which fills caches, and two, so that steps can be compared.
PROFILED_STEPS = (2, 3)


@contextmanager
def phase(seconds: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the seconds of a block to `seconds[name]`; the block is a named range in the timeline."""
    from torch.profiler import record_function  # here, because this module must be importable without torch

    start = time.perf_counter()
    beat(name)
    try:
        with record_function(name):
            yield
    finally:
        # In `finally`: a phase that raised is timed as well.
        beat(f"end of {name}")
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


class Clock:
    """Seconds by name since its creation.

    >>> clock = Clock()
    >>> with clock("rollout"):
    ...     pass
    >>> list(clock.seconds)
    ['rollout']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def __call__(self, name: str):
        return phase(self.seconds, name)

    def total(self) -> float:
        return time.perf_counter() - self._start


@dataclass(frozen=True)
class Every:
    """When something is due: every N steps, or N seconds after the last time.

    >>> [step for step in range(1, 7) if Every(steps=2, seconds=60).is_due(step, seconds_since=20.0 * step)]
    [2, 3, 4, 5, 6]
    """

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, step: int, seconds_since: float) -> bool:
        return bool((self.steps and step % self.steps == 0) or (self.seconds and seconds_since >= self.seconds))


@contextmanager
def timeline(path: Path | None) -> Iterator[None]:
    """Record all operators of a block as a Chrome trace (for Perfetto or chrome://tracing); None: do nothing."""
    if path is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded:
        yield
    recorded.export_chrome_trace(str(path))
