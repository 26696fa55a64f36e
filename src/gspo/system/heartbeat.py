"""Nothing waits forever: a run that makes no progress ends itself, says where it stood, and exits non-zero.

Progress is a phase that begins or ends and a sample that is finished. A thread of Python looks at the clock; should the
interpreter itself be stuck (a C call that keeps its lock), faulthandler's own thread ends the process a little later.
Processes that belong to the run end with it (rewards die with their trainer).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds that faulthandler waits beyond the Python thread, which can say more.
GRACE = 5.0
EXIT_CODE = 1

_progress = [time.monotonic(), "start"]
_own = [0, "start"]


def beat(what: str) -> None:
    """The run got as far as `what`."""
    _progress[:] = [time.monotonic(), what]
    _own[:] = [int(_own[0]) + 1, what]


def heard(what: str) -> None:
    """Another rank got as far as `what`: whoever waits for it does not stall."""
    _progress[:] = [time.monotonic(), what]


def progress() -> tuple[int, str]:
    """How often this process has got on, and how far."""
    return int(_own[0]), str(_own[1])


@contextmanager
def watched(seconds: float, log: Path, say: Callable[[str], None]) -> Iterator[None]:
    """End the process once `seconds` pass without a beat inside this block; stacks of all threads go to `log`."""
    beat("start")
    done = threading.Event()
    file = open(log, "a")  # noqa: SIM115 - faulthandler keeps the descriptor

    def watch() -> None:
        while not done.wait(min(1.0, seconds / 4)):
            at, what = _progress
            # Re-armed here and not at each beat: a call to C per sample would be noticed.
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=file)
            if time.monotonic() - float(at) > seconds:
                _end(str(what), seconds, file.fileno(), log, say)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        file.close()


def _end(what: str, seconds: float, descriptor: int, log: Path, say: Callable[[str], None]) -> None:
    message = (
        f"stalled: nothing has happened for {seconds:g} s since {what!r}; stacks are in {log}. If the work is this "
        "slow, set stall_timeout higher; the same command goes on from the last checkpoint"
    )
    os.write(descriptor, f"{message}\n".encode())
    faulthandler.dump_traceback(file=descriptor, all_threads=True)
    try:
        say(message)
    finally:
        print(f"gspo: {message}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)
