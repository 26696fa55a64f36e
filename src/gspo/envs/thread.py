"""The thread in which environments run: an event loop that starts at its first use, and is left if it is blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Seconds in which an event loop that is not blocked runs a callback.
GRACE = 1.0


class EnvironmentThread:
    """The event loop of the environments, in its own thread; `current` is None if it does not run."""

    def __init__(self) -> None:
        self.current: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; it is started if there is none."""
        if self.current is None:
            loop = self.current = asyncio.new_event_loop()
            # The default executor is bounded; `_Threads` explains why this one is not.
            loop.set_default_executor(_Threads())
            # A daemon thread: an environment that blocks must not keep the process alive.
            args = (loop, lambda: self.current is loop)
            threading.Thread(target=_run, args=args, name="environments", daemon=True).start()
        return self.current

    def leave(self) -> None:
        """Ask the loop to stop. A blocked thread keeps running until its environment returns or the process ends."""
        if self.current is not None:
            loop, self.current = self.current, None
            loop.call_soon_threadsafe(loop.stop)


class _Threads(ThreadPoolExecutor):
    """For `asyncio.to_thread`: one thread per call. In a bounded pool, calls that wait could block the calls that they
    wait for; and a pool's thread that hangs would keep the process from ending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="environment's call", daemon=True).start()
        return future


def _run(loop: asyncio.AbstractEventLoop, is_in_use: Callable[[], bool]) -> None:
    asyncio.set_event_loop(loop)
    # Again after an environment has stopped the loop, which it shares with the others.
    while True:
        loop.run_forever()
        if not is_in_use():
            break
    # After stop(): cancel what is left, so that the environments' `finally` blocks run.
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=GRACE))  # wait: GRACE, the environments' thread
    loop.close()
