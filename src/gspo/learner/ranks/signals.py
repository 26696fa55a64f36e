"""Ctrl-C, SIGTERM and SIGUSR1: finish the step, save, exit. A second Ctrl-C exits at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether a signal asked the run to stop; handlers are installed from `listen` to `restore`."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}
        self._say: Callable[[str], None] = print

    def listen(self, say: Callable[[str], None]) -> None:
        def handle(number: int, _: FrameType | None) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.ask(number)

        self.signal, self._say = None, say  # a signal to an earlier run does not stop the next one
        # Python allows handlers in the main thread only; a Trainer in another thread is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, handle) for number in ASKED}

    def ask(self, number: int, by: str = "") -> None:
        """Signal `number` was received, here or on another rank (`by`)."""
        # Heartbeats repeat the signal of another rank; the message is printed once.
        is_first, self.signal = self.signal is None, number
        if is_first:
            where = f" ({by})" if by else ""
            self._say(
                f"{signal.Signals(number).name}{where}: saving after this step (press Ctrl-C again to exit at once)"
            )

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before = {}
