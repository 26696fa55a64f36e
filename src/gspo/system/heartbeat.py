"""The stall timeout: a run that makes no progress prints where it stalled and ends with an error.

Progress (a heartbeat) is the begin or end of a phase, or a finished sample. A Python thread checks the time of the last
heartbeat. If the interpreter itself hangs (a C call that holds the GIL), faulthandler's own thread ends the process a
little later. Child processes end with their parent.
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

# Seconds that faulthandler waits longer than the Python thread, whose message is better.
GRACE = 5.0
EXIT_CODE = 1

# Time and name of the last progress of any rank: decides whether the run has stalled.
_progress = [time.monotonic(), "start"]
# Number and name of this process's own heartbeats: reported to other ranks.
_own = [0, "start"]


def beat(what: str) -> None:
    """Record progress of this process: it has reached `what`."""
    # One slice assignment, so that another thread never reads a new time with an old name.
    _progress[:] = [time.monotonic(), what]
    _own[:] = [int(_own[0]) + 1, what]


def remote_beat(what: str) -> None:
    """Record progress of another rank: waiting for it is not a stall."""
    _progress[:] = [time.monotonic(), what]


def progress() -> tuple[int, str]:
    """Number of heartbeats of this process, and the last one."""
    return int(_own[0]), str(_own[1])


@contextmanager
def watched(seconds: float, log: Path, say: Callable[[str], None]) -> Iterator[None]:
    """End the process if `seconds` pass without a heartbeat in this block; the stacks of all threads go to `log`."""
    beat("start")
    done = threading.Event()
    file = open(log, "a")  # noqa: SIM115 - faulthandler needs the open file

    def watch() -> None:
        # Several checks per timeout, so that a stall is noticed soon after it.
        while not done.wait(min(1.0, seconds / 4)):
            at, what = _progress
            # Restarted here and not at each heartbeat, which would cost time per sample.
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=file)
            if time.monotonic() - float(at) > seconds:
                _end(str(what), seconds, file.fileno(), log, say)

    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
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
        f"stalled: no progress for {seconds:g} s after {what!r}; the stacks of all threads are in {log}. If the work "
        "is this slow, raise stall_timeout; run the same command again to resume from the last checkpoint"
    )
    # The log first, with a plain write: the display may be part of what has stalled.
    os.write(descriptor, f"{message}\n".encode())
    faulthandler.dump_traceback(file=descriptor, all_threads=True)
    try:
        say(message)
    finally:
        print(f"gspo: {message}", file=sys.stderr, flush=True)
        # Not sys.exit(): it would end only this thread, and cleanup could wait for the stalled one.
        os._exit(EXIT_CODE)
