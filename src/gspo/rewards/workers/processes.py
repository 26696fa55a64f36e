"""Kill reward workers with everything that they started, collect dead processes, and bound the workers' log."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container, Sequence

from gspo.system.process import all_processes, descendants, describe_exit, kill, kill_group

_KILL_S = 0.4  # for the end of everything that a worker has started
_MAX_LOG, _KEPT_LOG = 64 << 20, 1 << 20  # bytes of rewards.log, and how many of the last ones stay when it is longer


def next_dead() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def collect(pid: int, timeout_s: float = 1.0) -> None:
    """Wait for a killed child; give up if the kernel cannot end it yet (blocked in a device)."""
    deadline = time.monotonic() + timeout_s
    try:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # wait: a second or less, the supervisor
    except ChildProcessError:
        pass


def kill_orphans(spare: Container[int]) -> None:
    """Kill orphans of dead workers; they have become children of this process, which is their subreaper."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:  # the children of a killed orphan become orphans in turn
        # One look at the process table for all orphans: there may be hundreds.
        orphans = [pid for pid, parent in all_processes() if parent == os.getpid() and pid not in spare]
        if not orphans:
            return
        kill_all([*descendants(*orphans), *orphans])
        for orphan in orphans:
            collect(orphan, deadline - time.monotonic())


def kill_worker(pid: int) -> None:
    """Kill a worker, its process group, and descendants that have left the group."""
    # Descendants first: they can be found by their parent's pid only while the parent exists.
    kill_all(descendants(pid))
    kill_group(pid)
    kill(pid)  # it may not have called setsid yet


def kill_all(pids: Sequence[int]) -> None:
    """Stop all of them before the first is killed, so that none can fork in between; then kill them."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def shorten_log(fd: int) -> None:
    """Keep only the end of a log that has become too long; reward code may print without end.

    The file is open for appending in every worker, so they continue at its new end.
    """
    size = os.fstat(fd).st_size
    if size > _MAX_LOG:
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            file.seek(size - _KEPT_LOG)
            kept = file.read(_KEPT_LOG)
        os.ftruncate(fd, 0)
        os.write(fd, f"[{size - len(kept)} bytes of output were removed: the log was too long]\n".encode() + kept)


def describe_status(status: int) -> str:
    """How a worker ended, in words."""
    return describe_exit(status) + (" (out of memory?)" if status == -signal.SIGKILL else "")
