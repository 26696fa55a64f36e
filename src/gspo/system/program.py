"""A command, from its first line to the end of the process: signals and the stall timeout.

Ctrl-C, SIGTERM and SIGUSR1 end a run in every phase: at once while it starts, after the step and a save later.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from gspo.system.heartbeat import watch_for_life

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 130  # exit code after a stop signal
EXIT_S = 10.0  # for threads to end after the command's work
START_TIMEOUT_S = 7200.0  # the stall timeout until the config, which has its own, is loaded


def run_main(main: Callable[[], int], notice_s: float = math.inf) -> NoReturn:
    """Run `main`, then exit with its code. SIGINT, SIGTERM and SIGUSR1 raise KeyboardInterrupt in it: exit code 130.

    The stall timeout also covers the end of the process. After `notice_s` without progress the last one is printed.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        # nohup and shells start background commands with SIGINT ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    watch_for_life(START_TIMEOUT_S, notice_s)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:
        # A library may turn the interrupt into an error of its own, such as a failed import.
        if not received:
            raise
        code = INTERRUPTED
    code = INTERRUPTED if received and code == 1 else code
    # The exit code is decided; a signal must not change it any more.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Python waits for threads at exit; a tool or a reward that hangs in one must not hold the process.
    limit = threading.Timer(EXIT_S, _leave, (code,))
    limit.daemon = True
    limit.start()
    sys.exit(code)


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


def wait_without_spinning() -> None:
    """On a busy machine, let OpenMP's threads sleep while they wait for each other. Call it before torch is imported.

    A thread that waits in a loop takes the core from the process that its partner waits for: at a load of 20 on 2
    cores, two threads were 56 times slower with the default than with sleeping. On a free machine the default is
    faster. The number of threads, and so every result, is the same.
    """
    if os.getloadavg()[0] > (os.cpu_count() or 1) and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def print_line(text: str) -> None:
    """Print a line at once. If stdout was closed (`| head`, a closed terminal), the program goes on without."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_stdout()


def drop_stdout() -> None:
    """Throw away what is printed from now on, and what Python would still flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_is_closed() -> bool:
    """Whether stdout is a pipe whose reader has left."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave(code: int) -> None:
    names = ", ".join(t.name for t in threading.enumerate() if t.is_alive() and not t.daemon)
    print(f"gspo: threads did not end within {EXIT_S:g} s ({names}); exit without them", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
