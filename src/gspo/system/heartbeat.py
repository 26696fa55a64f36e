"""The stall timeout: a run that makes no progress prints where it stalled and ends with an error.

Progress (a heartbeat) is the begin or end of a phase, a finished sample, or a rendered prompt. A Python thread checks
how long ago the last heartbeat was. It cannot run while a C call holds the interpreter's lock, so a small process of
its own (`main` below) watches the thread. That process ends a stuck run by SIGUSR2: faulthandler, which needs no lock,
writes the stacks, and the signal then kills the run. Time in which the run was stopped (SIGSTOP, a suspended job or
machine) does not count. Child processes end with their parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD = 1.0  # seconds between two checks, at most
# Seconds that the process waits longer than the Python thread, whose message is better.
GRACE = 5.0
NOTICE_S = 60.0  # a command that shows no progress of its own says after this time what it waits for
EXIT_CODE = 1
END_SIGNAL = signal.SIGUSR2  # kills a run whose interpreter is stuck

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


def count_heartbeats() -> tuple[int, str]:
    """Number of heartbeats of this process, and the last one."""
    return int(_own[0]), str(_own[1])


class AwakeClock:
    """Seconds that this process was not paused, for a loop that reads the clock at least once per `period`.

    A longer gap between two readings is a pause (SIGSTOP, a suspended job or machine), unless the process used CPU time
    in it: then the loop's thread was kept waiting.
    """

    def __init__(self, period: float = PERIOD) -> None:
        self._longest = 2 * period
        self._total, self._last, self._cpu = 0.0, time.monotonic(), time.process_time()

    def seconds(self) -> float:
        last, cpu, self._last, self._cpu = self._last, self._cpu, time.monotonic(), time.process_time()
        self._total += min(self._last - last, max(self._longest, self._cpu - cpu))
        return self._total


_watch: _Watch | None = None  # of this process


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End the process if `seconds` pass without a heartbeat in this block. An inner block changes the limit only."""
    global _watch
    if _watch is not None:
        with limited(seconds):
            yield
        return
    beat("start")
    _watch = _Watch(seconds)
    try:
        yield
    finally:
        _watch.close()
        _watch = None


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """In this block the limit is `seconds`, if the process is watched."""
    watch = _watch
    beat("start")
    if watch is None:
        yield
        return
    outer = watch.seconds
    watch.limit(seconds)
    try:
        yield
    finally:
        beat("end of the run")
        watch.limit(outer)


def watch_for_life(seconds: float, notice_s: float = math.inf) -> None:
    """`watched` until the process has ended, which includes its wait for threads at exit.

    After `notice_s` without a heartbeat, the last one is printed.
    """
    global _watch
    _watch = _Watch(seconds, notice_s)


def set_limit(seconds: float) -> None:
    """The limit from now on, if the process is watched."""
    if _watch is not None:
        _watch.limit(seconds)


@contextmanager
def stalls_logged(log: Path, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """A stall in this block is reported by `say`, too, and the stacks go to the file `log` instead of stderr."""
    watch = _watch
    if watch is None:
        yield
        return
    with open(log, "ab", buffering=0) as file:
        before = watch.report_to(file.fileno(), log, say)
        try:
            yield
        finally:
            watch.report_to(*before)


# File descriptor for stacks, its file (None: stderr), and what else gets the message.
Target = tuple[int, Path | None, Callable[[str], None] | None]


class _Watch:
    """The watching thread, and the process that watches it."""

    def __init__(self, seconds: float, notice_s: float = math.inf) -> None:
        self.seconds, self._notice_s = seconds, notice_s
        self._done = threading.Event()
        # The script by its path, without site-packages: it starts in some 15 ms. A session of its own, so that Ctrl-C
        # in a terminal does not reach it; it ends when its stdin is closed, that is, with this process.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._target: Target = (2, None, None)
        self.report_to(*self._target)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def limit(self, seconds: float) -> None:
        self.seconds = seconds
        # At once: the next moment may block the interpreter.
        self._tell_child(str(_progress[1]))

    def report_to(self, descriptor: int, log: Path | None, say: Callable[[str], None] | None) -> Target:
        """Where a stall is reported from now on; returns the target before."""
        before, self._target = self._target, (descriptor, log, say)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
            # chain: after the stacks are written, the default action of the signal ends the process.
            faulthandler.register(END_SIGNAL, file=descriptor, all_threads=True, chain=True)
        self._tell_child(str(_progress[1]))
        return before

    def close(self) -> None:
        self._done.set()
        self._thread.join(GRACE)  # wait: GRACE, the watched process
        faulthandler.unregister(END_SIGNAL)
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"\n")  # the end, unlike a pipe that the user's code has closed
            self._child.stdin.close()
        try:
            self._child.wait(GRACE)  # wait: GRACE, the watched process
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(GRACE)  # wait: GRACE, the watched process

    def _run(self) -> None:
        clock = AwakeClock()
        seen, since, is_told = list(_progress), clock.seconds(), False
        while True:
            self._tell_child(str(seen[1]))
            # Several checks per timeout, so that a stall is noticed soon after it.
            if self._done.wait(min(PERIOD, self.seconds / 4)):  # wait: 1 s, close()
                return
            now, latest = clock.seconds(), list(_progress)
            if latest != seen:
                seen, since, is_told = latest, now, False
            elif now - since > self.seconds:
                self._end(str(seen[1]))
            elif not is_told and now - since > self._notice_s and self.seconds < math.inf:
                is_told, text = True, f"no progress for {self._notice_s:g} s after {seen[1]!r}"
                print(f"gspo: {text}; ends {self.seconds:g} s after it", file=sys.stderr, flush=True)

    def _tell_child(self, what: str) -> None:
        line = f"{self.seconds + GRACE!r}\t{self._target[1] or ''}\t{what}".replace("\n", " ")
        # A full pipe (the child is stopped) or a killed child must not disturb the run.
        with contextlib.suppress(OSError):
            os.write(self._pipe, line.encode("utf-8", "replace")[:4000] + b"\n")

    def _end(self, what: str) -> None:
        descriptor, log, say = self._target
        message = _message(self.seconds, what, log)
        # The log first, with a plain write: the display may be part of what has stalled. If one of the following writes
        # blocks, the child ends the process.
        with contextlib.suppress(OSError):
            if log is not None:
                os.write(descriptor, f"{message}\n".encode())
            faulthandler.dump_traceback(file=descriptor, all_threads=True)
        try:
            if say is not None:
                say(message)
        finally:
            print(f"gspo: {message}", file=sys.stderr, flush=True)
            # Not sys.exit(): it would end only this thread, and cleanup could wait for the stalled one.
            os._exit(EXIT_CODE)


def _message(seconds: float, what: str, log: Path | str | None) -> str:
    where = f"in {log}" if log else "on stderr"
    return (
        f"stalled: no progress for {seconds:g} s after {what!r}; the stacks of all threads are {where}. If the work "
        "is this slow, raise stall_timeout; a run resumes from its last checkpoint with the same command"
    )


def main() -> None:
    """The child: ends its parent if the parent's watching thread sends nothing for the time that it named."""
    parent, clock = int(sys.argv[1]), AwakeClock()  # not getppid(): the parent may have ended before this line
    limit, log, what = float("inf"), "", "start"
    heard = clock.seconds()
    rest, is_deaf = b"", False
    while True:
        # wait: PERIOD, the watching process
        if select.select([] if is_deaf else [0], [], [], 0.1 if is_deaf else PERIOD)[0]:
            received = os.read(0, 1 << 16)  # wait: none, select has reported a line
            is_deaf = not received  # the parent has ended, or the user's code in it has closed all descriptors
            *lines, rest = (rest + received).split(b"\n")
            if lines and not lines[-1]:
                return  # the block that it watches has ended
            if lines:
                seconds, log, what = lines[-1].decode("utf-8", "replace").split("\t", 2)
                limit = float(seconds)
            heard = clock.seconds()
        elif os.getppid() != parent:
            return
        elif is_stopped(parent):
            heard = clock.seconds()
        elif clock.seconds() - heard > limit:
            break
    message = f"{_message(limit, what, log)} (the interpreter is blocked, so the process is killed)\n"
    if log:
        with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:
            file.write(message)
    os.kill(parent, END_SIGNAL)
    # After the signal: stderr may be a full pipe without a reader.
    with contextlib.suppress(OSError):
        os.write(2, f"gspo: {message}".encode())
    # A program may have replaced the signal's handler.
    time.sleep(GRACE)  # wait: GRACE, the watching process
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, or a debugger); only SIGKILL and SIGCONT reach it then."""
    try:
        if not os.path.exists("/proc/self/stat"):
            command = ["ps", "-o", "state=", "-p", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True)  # wait: none, the stall timeout
            return done.stdout.strip()[:1] == "T"
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    main()
