"""Ctrl-C, SIGTERM and SIGUSR1 end a run in every phase: at once while it starts, after the step and a save later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from gspo.system.program import STOP_SIGNALS


class StopRequest:
    """Whether a signal asked the run to stop; handlers are installed from `listen` to `restore`."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}
        self._say: Callable[[str], None] | None = None  # None: there is nothing to save yet

    def listen(self) -> None:
        """From now on a signal raises KeyboardInterrupt; `defer` changes that."""
        self.signal, self._say = None, None  # a signal to an earlier run does not stop the next one
        # Python allows handlers in the main thread only; a Trainer in another thread is stopped by its caller.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def defer(self, say: Callable[[str], None]) -> None:
        """From now on a signal lets the step finish. A second Ctrl-C exits at once."""
        self._say = say

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._say is None:
            self.signal = number
            before = self._before.get(number)
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(number)

    def ask(self, number: int, by: str = "") -> None:
        """Signal `number` was received, here or on another rank (`by`)."""
        # Heartbeats repeat the signal of another rank; the message is printed once.
        is_first, self.signal = self.signal is None, number
        if is_first and self._say is not None:
            where = f" ({by})" if by else ""
            self._say(
                f"{signal.Signals(number).name}{where}: saving after this step (press Ctrl-C again to exit at once)"
            )

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
