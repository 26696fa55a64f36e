"""`python -m gspo.system.process PARENT COMMAND…`: run a command that the kernel kills when its parent ends.

No launcher leaves an orphan, also when it is killed itself. A program of its own, because code between fork and exec is
not safe in a parent with threads (Ray's workers have dozens).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tied(command: list[str]) -> list[str]:
    """The command line that runs `command` tied to the process that starts it."""
    return [sys.executable, "-m", "gspo.system.process", str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    # Ray's workers run with SIGINT blocked, and what is blocked or ignored stays so beyond exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"gspo: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
