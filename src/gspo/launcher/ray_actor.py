"""The thin actor that Ray places: it runs one process on its machine, tied to itself, and tells what that says."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.launcher.local import Watch, await_end, end
from gspo.launcher.plan import Process
from gspo.launcher.supervise import clear
from gspo.system.process import tied

LAST_WORDS_S = 2.0  # for what a process has said before its end; a daemon of its own may keep the pipe for ever


class Runner:
    """One process; `poll` waits for its words or its end."""

    def __init__(self, process: Process) -> None:
        self._plan, self._watch = process, Watch(process)
        self._process: subprocess.Popen[bytes] | None = None
        self._news = threading.Condition()
        self._said = bytearray()
        self._code: int | None = None

    def place(self) -> tuple[str, int]:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None) -> None:
        started = threading.Event()
        # The kernel ties the process to this thread, which lives as long as the process does.
        threading.Thread(target=self._run, args=(argv, env, cwd, log, started), daemon=True).start()
        started.wait()

    def _run(
        self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None, started: threading.Event
    ) -> None:
        # Ray narrows its workers' threads to their CPUs; a run's threads are the config's.
        own = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN")}
        try:
            out: Any = subprocess.PIPE if log is None else open(log, "ab")  # noqa: SIM115
            process = subprocess.Popen(
                tied(argv), env={**own, **env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            if log is not None:
                out.close()  # the process has its own
        except OSError as error:
            with self._news:
                self._said += f"gspo: this process cannot be started on {socket.gethostname()}: {error}\n".encode()
                self._code = 2
            started.set()
            return
        self._process = process
        started.set()
        # Beside: what the process has started may keep its stdout open, and must not hide its end.
        reader = threading.Thread(target=self._listen, args=(process,), daemon=True)
        reader.start()
        await_end(process)
        reader.join(LAST_WORDS_S)
        clear(self._plan)  # its machine may be another than the launcher's
        code = process.wait()
        with self._news:
            self._code = code if code >= 0 else 128 - code
            self._news.notify_all()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while said := os.read(pipe.fileno(), 65536):
                with self._news:
                    self._said += said
                    self._news.notify_all()

    def poll(self, seconds: float) -> tuple[bytes, int | None]:
        """What it has said since the last call, and its exit code; waits so long for news."""
        with self._news:
            if self._process is not None and self._code is None and (stopped := self._watch.look(self._process)):
                self._said += f"{stopped}\n".encode()
            if not self._said and self._code is None:
                self._news.wait(seconds)
            said, self._said = bytes(self._said), bytearray()
            return said, self._code

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, patience_s: float) -> None:
        if self._process is not None:
            end(self._process, patience_s)
