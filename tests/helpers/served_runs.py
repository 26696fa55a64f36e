"""Sampler servers as real processes: forked from one that has imported everything, watched and started again.

`gspo.launcher.serve.own` runs in each of them as it does under a launcher. One JSON line in, one process id out.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from killed_runs import end_as
from processes import is_alive, until

TOKEN = "a secret of the fault tests"


class Starter:
    """The process that forks servers, imported once."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GSPO_FAULT")}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "OMP_NUM_THREADS": "1", "GSPO_SAMPLER_TOKEN": TOKEN},
        )  # fmt: skip
        self._lock = threading.Lock()

    def start(self, asked: dict) -> int:
        with self._lock:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            return int(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.kill()  # its servers die with it
        self.process.communicate()


class Servers:
    """Starts servers of one run, starts the dead again (`restarts` times each), and ends all of them."""

    def __init__(
        self, starter: Starter, root: Path, config: Path, count: int, *, faults=(), restarts: int = 3, latency_s=0.0
    ):
        self.starter, self.root, self.config, self.latency_s = starter, root, config, latency_s
        self.folder = root / "samplers"
        self.started: list[list[int]] = [[] for _ in range(count)]
        self.left = [restarts] * count
        self._closing = threading.Event()
        faults = [*faults, *[""] * (count - len(faults))]
        for index in range(count):
            self.start(index, faults[index])
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self, index: int, fault: str = "") -> None:
        asked = {
            "config": str(self.config), "index": index, "folder": str(self.folder), "fault": fault,
            "fired": str(self.root / "fired"), "out": str(self.root / f"sampler_{index}.log"),
            "latency_s": self.latency_s,
        }  # fmt: skip
        self.started[index].append(self.starter.start(asked))

    def signal(self, index: int, number: int) -> None:
        os.kill(self.started[index][-1], number)

    def alive(self) -> list[int]:
        return [pid for pids in self.started for pid in pids if is_alive(pid)]

    def fired(self) -> list[str]:
        path = self.root / "fired"
        return path.read_text().split() if path.exists() else []

    def _watch(self) -> None:
        while not self._closing.wait(0.05):
            for index, pids in enumerate(self.started):
                if self.left[index] and not is_alive(pids[-1]):
                    self.left[index] -= 1
                    self.start(index)

    def close(self) -> None:
        """All processes are gone afterwards."""
        self._closing.set()
        self._thread.join()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.alive(), 10)


def fork_servers() -> None:
    from gspo.launcher import own as serve
    from gspo.system import die_with_parent

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they leave no trace
    parent = os.getpid()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent)
            words = Path(asked["config"]), asked["index"], Path(asked["folder"])
            job = partial(serve.serve, *words, latency_s=asked["latency_s"])
            end_as(job, asked["out"], asked["fired"], asked["fault"])
        print(pid, flush=True)


if __name__ == "__main__":
    fork_servers()
