"""Calls of code that may block or hang, off the event loop: steps of simulators, tools of environments."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.envs.client import EpisodeError


class CallTimeoutError(EpisodeError):
    """A call did not return in time."""

    kind = "timeout"


@dataclass(eq=False)
class _Job:
    """A call of an environment, for a thread of its own."""

    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    started: float | None = None
    is_abandoned: bool = False
    has_ended: bool = False


class Threads:
    """A number of daemon threads. A pool of the standard library would wait for a thread that hangs at exit.

    The event loop wakes up once for all calls that have ended meanwhile, not once per call: a step of a small
    simulator takes less time than waking up the loop.
    """

    def __init__(self, num: int) -> None:
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num = num
        self._lock = threading.Lock()  # wait: none, held for a short section
        self._ended: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Any, BaseException | None]]] = {}
        for _ in range(self._num):
            self._start()

    async def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """The result of a call; `name` is for the message. The time that it waits for a thread does not count."""
        loop = asyncio.get_running_loop()
        job = _Job(call, loop.create_future(), loop)

        def check() -> None:
            nonlocal timer
            left = timeout_s if job.started is None else job.started + timeout_s - time.monotonic()
            if left > 0:
                timer = loop.call_later(left, check)
            elif not job.future.done():
                self._abandon(job)
                job.future.set_exception(CallTimeoutError(f"{name} took longer than {timeout_s:g} s"))

        timer = loop.call_later(timeout_s, check)
        self._work.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            if job.started is not None:  # its episode has ended, and the call may never return
                self._abandon(job)
            raise
        finally:
            timer.cancel()

    def _abandon(self, job: _Job) -> None:
        """Give up on a call: a new thread takes the place of the one that it blocks."""
        with self._lock:
            if job.has_ended:
                return
            job.is_abandoned = True
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="gymnasium", daemon=True).start()

    def close(self) -> None:
        for _ in range(self._num):
            self._work.put(None)

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:  # wait: none, close sends an end mark
            if job.future.cancelled():  # its episode has ended before
                continue
            job.started = time.monotonic()
            try:
                self._report(job, job.call(), None)
            except BaseException as error:
                self._report(job, None, error)
            with self._lock:
                job.has_ended = True
                if job.is_abandoned:
                    return  # another thread has taken this one's place

    def _report(self, job: _Job, value: Any, error: BaseException | None) -> None:
        if isinstance(error, StopIteration):  # a future refuses it
            error = RuntimeError(f"StopIteration: {error}")
        with self._lock:
            ended = self._ended.setdefault(job.loop, [])
            ended.append((job, value, error))
            is_first = len(ended) == 1
        # The first result wakes up the loop; the loop then takes all that are there.
        if is_first:
            try:
                job.loop.call_soon_threadsafe(self._deliver, job.loop)
            except RuntimeError:  # the loop is closed: no task waits for the result
                with self._lock:
                    self._ended.pop(job.loop, None)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop, [])
        for job, value, error in ended:
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)
