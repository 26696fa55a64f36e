"""Processes: child processes, and the variables that a launcher sets for them.

`python -m gspo.system.process PARENT COMMAND…` runs a command that the kernel kills when its parent ends, so that a
launcher that is killed leaves no orphans. It is a program of its own because code between fork and exec is not safe in
a parent with threads (Ray's workers have dozens).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.system.machine import die_with_parent

TOKEN = "GSPO_SAMPLER_TOKEN"
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True)
class Launched:
    """What a process learns from its launcher. A process that no launcher started has the defaults."""

    is_launched: bool = False  # GSPO_LAUNCHED: a launcher started this process, so it must not launch others
    num_ranks: int = 1  # GSPO_RANKS: ranks that train; sampler servers cannot count them when a backend is `auto`
    is_colocated: bool = False  # GSPO_COLOCATED: trainer and sampler share the only GPU
    num_samplers: int = 0  # GSPO_SAMPLERS: sampler servers of this run; 0: the trainer samples in its own process
    sampler_folder: Path | None = None  # GSPO_SAMPLER_DIR: the folder in which the servers register
    token: str = field(default="", repr=False)  # GSPO_SAMPLER_TOKEN: the secret between trainer and servers

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> Launched:
        folder = env.get("GSPO_SAMPLER_DIR")
        return cls(
            is_launched=bool(env.get("GSPO_LAUNCHED")),
            num_ranks=_count(env, "GSPO_RANKS", 1, "trainer ranks"),
            is_colocated=bool(env.get("GSPO_COLOCATED")),
            num_samplers=_count(env, "GSPO_SAMPLERS", 0, "sampler servers"),
            sampler_folder=Path(folder) if folder else None,
            token=env.get(TOKEN, ""),
        )

    def write(self) -> dict[str, str]:
        """The variables to set in a child's environment; a default is not written."""
        values = {
            "GSPO_LAUNCHED": "1" if self.is_launched else "",
            "GSPO_RANKS": str(self.num_ranks) if self.num_ranks > 1 else "",
            "GSPO_COLOCATED": "1" if self.is_colocated else "",
            "GSPO_SAMPLERS": str(self.num_samplers) if self.num_samplers else "",
            "GSPO_SAMPLER_DIR": str(self.sampler_folder or ""),
            TOKEN: self.token,
        }
        return {name: value for name, value in values.items() if value}

    def required_token(self) -> str:
        """The token; ConfigError if it is missing or too short."""
        if len(self.token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"sampler servers need a secret of {MIN_TOKEN_CHARS} characters or more in {TOKEN}; set the same value "
                "for the servers and the trainer"
            )
        return self.token


def _count(env: Mapping[str, str], name: str, default: int, what: str) -> int:
    # An empty variable counts as unset.
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be the number of {what}")
    return int(text)


KILLED_S = 10.0  # for a process to end after SIGKILL


def dying_with_parent(command: list[str]) -> list[str]:
    """The command line that runs `command` such that it is killed when this process ends."""
    return [sys.executable, "-m", "gspo.system.process", str(os.getpid()), *command]


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Send SIGTERM, wait up to `timeout_s`, then send SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            # SIGTERM lets the process clean up; after the timeout only SIGKILL is certain to work.
            process.wait(timeout_s)  # wait: timeout_s, the caller
        except subprocess.TimeoutExpired:
            process.kill()
            await_killed(process)


def await_killed(process: subprocess.Popen[Any]) -> None:
    """Collect a process after SIGKILL. One that is stuck in the kernel (a dead network disk) is left behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)  # wait: KILLED_S, the caller


def stop_group(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Stop the leader of a process group, then kill the rest of the group."""
    stop(process, timeout_s)
    kill_group(process.pid)


def wait_and_kill_group(process: subprocess.Popen[bytes]) -> None:
    """Wait for the leader of a process group to end, then kill the rest. `process.wait()` still gives its exit code."""
    with contextlib.suppress(ChildProcessError):  # another thread has collected it
        # WNOWAIT: the pid, which is the group's number too, is not reused until the group has been killed.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # wait: none, the stall timeout of the process
    kill_group(process.pid)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def shell_code(returncode: int) -> int:
    """The exit code as a shell shows it: 128 + n after signal n.

    >>> shell_code(-9), shell_code(1)
    (137, 1)
    """
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(code: int) -> str:
    """How a process ended, from `Popen.returncode` or from a shell's exit code.

    >>> describe_exit(-9), describe_exit(137), describe_exit(1)
    ('was killed by SIGKILL', 'was killed by SIGKILL', 'ended with exit code 1')
    """
    number = shell_code(code) - 128
    if number in set(signal.Signals):
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def last_lines(log: Path, count: int) -> str:
    """The end of a log file, indented, for an error message; "" if it is empty or missing."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # Before exec: the setting of prctl() survives it.
    die_with_parent(parent)
    # Ray's workers run with SIGINT blocked; blocked and ignored signals stay so after exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"gspo: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
