"""`python -I -S reaper.py CONTROL COMMAND…`: run an agent's command and kill everything that it leaves behind.

A small process between the trainer and a program that may never end. CONTROL is the reading end of a pipe, the
lifeline: when the trainer closes the other end, or dies, the command and all processes that it has started are killed.
A process that has left the command's process group becomes a child of this one (the subreaper), so it is found, too.
The exit code is the command's. Standard library only, without gspo, because one is started for every episode.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_ROUNDS, _PAUSE_S = 500, 0.01  # of killing: the children of a killed process become children of this one


def main() -> int:
    control, command = int(sys.argv[1]), sys.argv[2:]
    # The command must not inherit the pipe.
    os.set_inheritable(control, False)
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)  # Linux only
    # Processes whose parent ends become children of this one.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A signal writes to this pipe and so ends the select() below; SIGCHLD reports the end of the command.
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # The trainer handles Ctrl-C and the scheduler's signals, and closes the pipe to end this process.
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    if (child := os.fork()) == 0:
        _become(command, prctl)
    for descriptor in (0, 1, 2):  # the pipes of the command's output are closed when the command ends
        os.close(descriptor)
    status: int | None = None
    # Wait until the command ends (SIGCHLD) or the trainer closes the lifeline.
    while status is None:
        # wait: none, the trainer closes the lifeline or dies, or the command ends
        if control in select.select([control, wake], [], [])[0]:
            break
        os.read(wake, 4096)  # wait: none, SIGCHLD has written a byte
        status = _collect().get(child)
    # Repeated: a killed process may leave children, which appear here in the next round.
    for _ in range(_ROUNDS):
        # The pid of the command is not collected yet, so the number of its group cannot belong to others.
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        for pid in (left := _children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = _collect().get(child, status)
        if not left:
            break
        # wait: _PAUSE_S, the reaper after _ROUNDS
        select.select([], [], [], _PAUSE_S)  # sleep
    code = os.waitstatus_to_exitcode(status or 0)
    # The exit code as a shell shows it.
    return code if code >= 0 else 128 - code


def _become(command: list[str], prctl: Any) -> None:
    """In the child: run the command in a session of its own; the kernel kills it if the reaper is killed."""
    try:
        os.setsid()
        # Set after fork(): the setting is not inherited.
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    finally:
        # Reached only if exec failed: the child must not continue with the reaper's code.
        os._exit(127)


def _collect() -> dict[int, int]:
    """Status of every child that has ended, adopted ones included."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name, in parentheses, may contain parentheses; the parent is the second field after the last one.
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
