"""Run a plan on this machine. `python3 -m gspo.launcher.local SCRIPT --config YAML [key=value …]`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from gspo.launcher import main
from gspo.launcher.plan import Plan, Process
from gspo.launcher.supervise import Say, Start, environment, supervise
from gspo.system.process import tied


def run(plan: Plan, *, restarts: int, say: Say) -> int:
    """Sampler servers and trainer ranks as children; the exit code is the trainer's.

    A trainer that dies is not started again: somebody sits at this machine, and the same command resumes.
    """
    shared = {"GSPO_SAMPLER_TOKEN": secrets.token_hex(32)} if plan.samplers else {}

    def prepare() -> Start:
        return lambda process: Child(process, environment(process, os.environ, shared), plan.folder)

    return supervise(plan, prepare, restarts=restarts, resumes=0, say=say)


def become(process: Process) -> None:
    """A plan of one process needs nobody beside it: this process turns into it."""
    os.environ.update(process.env)
    os.execvp(process.argv[0], process.argv)


class Child:
    """A process group of its own: Ctrl-C reaches it through the launcher alone. The trainer has the terminal."""

    def __init__(self, process: Process, env: dict[str, str], folder: Path) -> None:
        if process.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible(process.gpus, env.get("CUDA_VISIBLE_DEVICES")))
        log: IO[bytes] | None = None
        if process.role != "trainer":
            log = open(folder / f"{process.name}.log", "ab")  # noqa: SIM115 - closed below, the child has its own
        self._process = subprocess.Popen(
            tied(list(process.argv)), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        if log is not None:
            log.close()
        self._watch = Watch(process)

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is None and (said := self._watch.look(self._process)):
            print(said, file=sys.stderr, flush=True)
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, patience_s: float) -> None:
        end(self._process, patience_s)


class Watch:
    """Ends a process that stands still under SIGSTOP: no signal but SIGKILL reaches it, and it says nothing itself."""

    def __init__(self, process: Process) -> None:
        self._name, self._patience_s = process.name, process.max_stopped_s
        self._looked = self._running = time.monotonic()

    def look(self, process: subprocess.Popen[bytes]) -> str:
        """What is to be said about it: nearly always nothing."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return ""
        self._looked = now
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
                self._running = now
        if now - self._running < self._patience_s:
            return ""
        process.kill()
        return f"gspo: {self._name} (pid {process.pid}) was stopped for {self._patience_s:g} s (SIGSTOP): ending it"


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ask, wait, kill; then whatever is left of its process group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _end_group(process)


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process, then kill whatever is left of its group. Its exit code is still to be asked for."""
    with contextlib.suppress(ChildProcessError):  # another thread was told of the end
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own until then
    _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)


def visible(gpus: tuple[int, ...], chosen: str | None) -> list[str]:
    """The plan counts what is visible: of CUDA_VISIBLE_DEVICES=4,5 number 0 is 4.

    >>> visible((0, 1), "4,5,6"), visible((2, 3), None)
    (['4', '5'], ['2', '3'])
    """
    names = chosen.split(",") if chosen else None
    return [names[gpu].strip() if names else str(gpu) for gpu in gpus]


if __name__ == "__main__":
    sys.exit(main("local"))
