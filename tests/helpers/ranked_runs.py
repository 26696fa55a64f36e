"""Runs of `gspo train` on several ranks, started as a user would start them: by torchrun, on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training_runs import SMALL, metrics, path_of

from gspo.sampling import KEY

GSPO = ("-m", "gspo", "train")


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k == KEY or not k.startswith(("GSPO_", "TORCHELASTIC_"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start(num_ranks: int, *words: object, **more) -> subprocess.Popen[str]:
    """torchrun in a session of its own; what all ranks say comes from its stdout."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [*command, *map(str, words)],
        cwd=Path(__file__).parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **more,
    )


def start_run(root: Path, num_ranks: int, *overrides: str) -> subprocess.Popen[str]:
    root.mkdir(parents=True, exist_ok=True)
    (root / "run.yaml").write_text("{}\n")
    words = (root / "run.yaml", *SMALL, "evaluator.at_start=false", f"cluster.fileroot={root}", *overrides)
    return start(num_ranks, *GSPO, *words)


def finish(process: subprocess.Popen[str], timeout: float = 240.0) -> tuple[int, str]:
    """Exit code and everything said; nothing of it is left behind."""
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        end(process)
    return process.returncode, said


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def train(root: Path, num_ranks: int, *overrides: str) -> Path:
    code, said = finish(start_run(root, num_ranks, *overrides))
    assert code == 0, said
    return path_of(root)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
    return found


def wait_for_step(process: subprocess.Popen[str], root: Path, step: int, timeout: float = 200.0) -> None:
    end_at = time.monotonic() + timeout
    while time.monotonic() < end_at:
        file = path_of(root) / "metrics.jsonl"
        if file.exists() and any(row["step"] >= step for row in metrics(path_of(root))):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {timeout} s")
