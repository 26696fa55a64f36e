"""Run a plan on this machine. `python3 -m gspo.launcher.local SCRIPT --config YAML [key=value …]`."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import IO

from gspo.launcher.plan import LaunchPlan, Process
from gspo.launcher.start import main
from gspo.launcher.supervise import Say, Start, environment, supervise
from gspo.system import AwakeClock, Launched, dying_with_parent, is_stopped, program, shell_code, stop_group


def run(plan: LaunchPlan, *, restarts: int, say: Say) -> int:
    """Start sampler servers and trainer ranks as child processes; returns the trainer's exit code.

    A killed trainer is not restarted: the user is at this machine and can run the same command to resume.
    """
    shared = Launched(token=secrets.token_hex(32)).write() if plan.samplers else {}

    def prepare() -> Start:
        return lambda process: LocalProcess(process, environment(process, os.environ, shared), plan.folder)

    return supervise(plan, prepare, restarts=restarts, resumes=0, say=say)


def exec_process(process: Process) -> None:
    """Replace this process by the only process of a plan."""
    os.environ.update(process.env)
    os.execvp(process.argv[0], process.argv)


class LocalProcess:
    """A child in a process group of its own, so that Ctrl-C reaches it only through the launcher.

    The trainer writes to the terminal, every other process to its log file.
    """

    def __init__(self, process: Process, env: dict[str, str], folder: Path) -> None:
        # Each process sees only its own GPUs, numbered from 0.
        if process.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids(process.gpus, env.get("CUDA_VISIBLE_DEVICES")))
        log: IO[bytes] | None = None
        if process.role != "trainer":
            log = open(folder / f"{process.name}.log", "ab")  # noqa: SIM115 - closed below; the child has its own copy
        # If the launcher is killed, the kernel kills the child, so no process keeps the GPUs.
        command = dying_with_parent(list(process.argv))
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        if log is not None:
            log.close()
        self._limit = StopLimit(process)

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is None and (message := self._limit.enforce(self._process)):
            print(message, file=sys.stderr, flush=True)
        return code if code is None else shell_code(code)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        stop_group(self._process, timeout_s)


class StopLimit:
    """Kills a process that stays stopped (SIGSTOP) for too long: it makes no progress and handles no other signal."""

    def __init__(self, process: Process) -> None:
        self._name, self._limit_s = process.name, process.max_stopped_s
        # If the launcher is stopped as well (a suspended job), that time does not count.
        self._clock = AwakeClock()
        self._checked = self._running = 0.0

    def enforce(self, process: subprocess.Popen[bytes]) -> str:
        """Check at most once per second; returns a message if the process was killed, else ""."""
        now = self._clock.seconds()
        if now - self._checked < 1.0:
            return ""
        self._checked = now
        if not is_stopped(process.pid):
            self._running = now
        if now - self._running < self._limit_s:
            return ""
        process.kill()
        return f"gspo: {self._name} (pid {process.pid}) was stopped for {self._limit_s:g} s (SIGSTOP): killed it"


def gpu_ids(gpus: tuple[int, ...], visible: str | None) -> list[str]:
    """Device ids of a plan's GPUs, which are numbered within CUDA_VISIBLE_DEVICES: of "4,5", GPU 0 is 4.

    >>> gpu_ids((0, 1), "4,5,6"), gpu_ids((2, 3), None)
    (['4', '5'], ['2', '3'])
    """
    ids = visible.split(",") if visible else None
    return [ids[gpu].strip() if ids else str(gpu) for gpu in gpus]


if __name__ == "__main__":
    program.run_main(lambda: main("local"))
