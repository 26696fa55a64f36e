"""What tests ask of processes: whether one lives, when something has happened, what it imports; and a full disk."""

import ast
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HEAVY = ("torch", "transformers", "ray", "vllm", "pandas", "datasets", "matplotlib")


def heavy_modules_after(code: str) -> list[str]:
    """Which slow packages a process has imported that ran this code."""
    code += f"\nimport sys\nprint('\\nHEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.rpartition("HEAVY ")[2])


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for it; an AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def are_gone(pids: list[int], seconds: float = 2.0) -> bool:
    """Whether all have ended by then."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@contextlib.contextmanager
def files_up_to(num_bytes):
    """No file may become longer: a write beyond it fails with "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
