"""Small runs through a launcher, as a person starts them, and what they leave: metrics, and no process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import processes

from gspo.report import read_metrics
from gspo.system import is_stopped

ROOT = Path(__file__).parents[2]
SCRIPT, CONFIG = "examples/math/gsm8k_rl.py", "examples/math/gsm8k_gspo.yaml"
TURNED = ("examples/math/gsm8k_grpo.yaml", "+actor.importance_sampling_level=sequence")  # GRPO's file, made GSPO
NUM_STEPS = 3
SMALL = (
    "actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic", f"total_train_steps={NUM_STEPS}",
    "train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=24", "actor.ppo_n_minibatches=2",
    "actor.optimizer.lr=1e-4", "evaluator.at_start=false", "evaluator.size=8", "saver.freq_steps=1", "threads=1",
    "reward.workers=1",
)  # fmt: skip
# Two optimizer updates and a checkpoint a step: killed in step 3; what resumes there has no fifth update.
KILLED = "train.updated:5:kill"


def by_module(on: str, *config: str) -> list[str]:
    return ["-m", f"gspo.launcher.{on}", SCRIPT, "--config", *(config or [CONFIG])]


def by_script(on: str, *config: str) -> list[str]:
    return [SCRIPT, "--config", *(config or [CONFIG]), f"scheduler.type={on}"]


def by_command(on: str) -> list[str]:
    return ["-m", "gspo", "train", CONFIG, "--on", on]


STOPPED = "train.updated:3:stop"  # the trainer stands still in step 2 until it is told to go on
STARTED: list["Run"] = []


class Run:
    """A launcher that was started; every process it starts inherits its mark."""

    def __init__(self, words: list[str], root: Path, *overrides: str, fault: str = "", **env: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.mark = root, uuid.uuid4().hex
        self.experiment = "gsm8k-grpo" if any("gsm8k_grpo" in word for word in words) else "gsm8k-gspo"
        unarmed = {k: v for k, v in os.environ.items() if not k.startswith(("GSPO_", "RAY_"))}
        armed = {"GSPO_FAULT": fault, "GSPO_FAULT_LOG": str(root / "fired")} if fault else {}
        here = {"PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": "", "GSPO_MARK": self.mark}
        self.process = subprocess.Popen(
            [sys.executable, *words, *SMALL, f"cluster.fileroot={root / 'runs'}", *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
            env={**unarmed, **here, **armed, **env},
        )  # fmt: skip
        STARTED.append(self)

    def end(self, seconds: float = 550.0) -> tuple[int, str, str]:
        """(exit code, what was printed, what was complained)"""
        try:
            said, complained = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return self.process.returncode, said, complained

    def ended(self, code: int = 0, seconds: float = 550.0) -> tuple[str, str]:
        """(what was printed, what was complained) of a run that ends with this code and leaves no process."""
        found, said, complained = self.end(seconds)
        assert found == code, said + complained
        until(lambda: not self.left())
        return said, complained

    def clear(self) -> None:
        """After a test, also one that failed half way: kill what is left."""
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    @property
    def path(self) -> Path:
        return self.root / "runs" / self.experiment / "trial0"

    @property
    def fired(self) -> list[str]:
        log = self.root / "fired"
        return log.read_text().split() if log.exists() else []

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.path)]

    def left(self) -> list[str]:
        """Command lines of processes of this run that still live."""
        return [command for _, command in self.processes()]

    def processes(self) -> list[tuple[int, str]]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = f"GSPO_MARK={self.mark}".encode() in (folder / "environ").read_bytes()
                if ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
            except OSError:
                continue  # it has ended meanwhile
        return found


# The trainer of a run of SMALL stands still at one of these moments, in step 2 or 3.
MOMENTS = ("rollout.token:40:stop", "train.updated:3:stop", "checkpoint.file:7:stop", "record.metrics:3:stop")


def kill_at_fault(run: Run, victims: Callable[[int], list[int]]) -> None:
    """SIGKILL for `victims` of the trainer's id, once it stands still; later stops, after a resume, end at once."""

    def still() -> list[int]:
        return [pid for pid, _ in run.processes() if is_stopped(pid)]

    until(lambda: (run.fired and still()) or run.process.poll() is not None, 300)
    (trainer,) = still()
    killed = victims(trainer)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    def go_on() -> None:
        while run.process.poll() is None:
            for pid in still():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)

    threading.Thread(target=go_on, daemon=True).start()


def go_on_with(run: Run, number: int) -> None:
    """Once signal `number` has reached the trainer that a fault has stopped, let it go on."""

    def is_waiting(pid: int) -> bool:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except OSError:
            return False
        return status["State"].strip().startswith("T") and bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)

    until(lambda: any(is_waiting(pid) for pid, _ in run.processes()))
    for pid, _ in run.processes():
        if is_waiting(pid):
            os.kill(pid, signal.SIGCONT)


def metrics_of(path: Path) -> list[dict]:
    """What a run measured, less the clocks."""
    clocks = ("time/", "throughput/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in read_metrics(path)]


def until(done: Callable[[], object], seconds: float = 120.0) -> None:
    processes.until(done, seconds)
