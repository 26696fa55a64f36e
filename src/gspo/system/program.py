"""A command that trains, from its first line to the end of the process: signals and the stall timeout."""

from __future__ import annotations

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


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run `main`, then exit with its code. SIGINT, SIGTERM and SIGUSR1 raise KeyboardInterrupt in it: exit code 130.

    The stall timeout also covers the end of the process.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        # nohup and shells start background commands with SIGINT ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    watch_for_life(START_TIMEOUT_S)
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


def wait_without_spinning() -> None:
    """On a busy machine, let OpenMP's threads sleep while they wait for each other. Call it before torch is imported.

    A thread that waits in a loop takes the core from the process that its partner waits for: at a load of 20 on 2
    cores, two threads were 56 times slower with the default than with sleeping. On a free machine the default is
    faster. The number of threads, and so every result, is the same.
    """
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) and "GOMP_SPINCOUNT" not in os.environ:
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
