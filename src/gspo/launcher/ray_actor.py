"""The actor that Ray places on a machine: it runs one process of the plan there and returns its output."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.launcher.local import StopLimit
from gspo.launcher.plan import Process
from gspo.launcher.supervise import remove_published
from gspo.system.process import (
    KILLED_S,
    dying_with_parent,
    is_stopped,
    kill,
    shell_code,
    stop_group,
    wait_and_kill_group,
)

# Seconds to read the rest of the output after the process has ended: a daemon that it started may keep the pipe open.
LAST_OUTPUT_S = 2.0
REPLY_BYTES = 2**16  # of output in one reply; Ray puts replies of more than 100 KB into its object store
KEPT_BYTES = 2**24  # of output that the launcher has not read yet
START_S = 50.0  # for the start of the process; the launcher waits 60 s for this actor


def is_worker(pid: int) -> bool:
    """Whether a process of this machine is a worker of Ray that runs an actor."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ProcessActor")
    except OSError:
        return False


def kill_if_stopped(pid: int) -> None:
    """Run by another worker of Ray on the machine of an actor that does not answer; the kernel kills its process."""
    if is_stopped(pid):
        kill(pid)


class ProcessActor:
    """One process; `poll` waits for its output or its end."""

    def __init__(self, process: Process) -> None:
        self._plan, self._limit = process, StopLimit(process)
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()  # wait: none, held for appending bytes; waits release it
        self._output = bytearray()
        self._code: int | None = None

    def place(self) -> tuple[str, int, int, str]:
        """IP address of this machine, a port that is free now, the pid of this actor, and the machine's name."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1], os.getpid(), socket.gethostname()

    def start(self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None) -> tuple[bytes, int | None]:
        """Start the process. Returns as `poll` does, whose first reply has the output and a failure to start."""
        started = threading.Event()
        # For the kernel the parent is this thread, so it must live as long as the process does.
        threading.Thread(target=self._run, args=(argv, env, cwd, log, started), daemon=True).start()
        started.wait(START_S)  # wait: 50 s, the actor
        return b"", None

    def _run(
        self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None, started: threading.Event
    ) -> None:
        # Ray sets OMP_NUM_THREADS to the CPUs of its worker; the run's config decides about threads.
        own = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN")}
        try:
            out: Any = subprocess.PIPE if log is None else open(log, "ab")  # noqa: SIM115
            process = subprocess.Popen(
                dying_with_parent(argv), env={**own, **env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            if log is not None:
                out.close()  # the process has its own copy
        except OSError as error:
            with self._changed:
                self._output += f"gspo: cannot start this process on {socket.gethostname()}: {error}\n".encode()
                self._code = 2
            started.set()
            return
        self._process = process
        started.set()
        # In a thread: a child of the process may keep stdout open, and the end of the process must be seen anyway.
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        wait_and_kill_group(process)
        reader.join(LAST_OUTPUT_S)  # wait: LAST_OUTPUT_S, the actor
        remove_published(self._plan)  # this machine may be another than the launcher's
        # wait: KILLED_S, the actor
        code = process.wait(KILLED_S)  # it has ended; this reads its exit code
        with self._changed:
            self._code = shell_code(code)
            self._changed.notify_all()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 65536):  # wait: none, end of file; a daemon thread
                with self._changed:
                    self._output += chunk
                    if len(self._output) > KEPT_BYTES:  # the launcher is stopped, or slower than the process
                        self._output[: -KEPT_BYTES // 2] = b"\ngspo: output was dropped here\n"
                    self._changed.notify_all()

    def poll(self, timeout_s: float) -> tuple[bytes, int | None]:
        """Output since the last call and the exit code; waits up to `timeout_s` for either."""
        with self._changed:
            if self._process is not None and self._code is None and (message := self._limit.enforce(self._process)):
                self._output += f"{message}\n".encode()
            if not self._output and self._code is None:
                self._changed.wait(timeout_s)  # wait: 5 s, the launcher
            output = bytes(self._output[:REPLY_BYTES])
            del self._output[:REPLY_BYTES]
            # The exit code is the last thing that the launcher reads.
            return output, None if self._output else self._code

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        if self._process is not None:
            stop_group(self._process, timeout_s)
