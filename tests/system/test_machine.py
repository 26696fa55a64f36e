"""What the machine has, on Linux and where its calls are missing (macOS)."""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo.system import (
    adopt_orphans,
    all_processes,
    descendants,
    die_with_parent,
    instruction_set,
    is_stopped,
    memory_bytes,
    num_cores,
    own_children,
    return_freed_memory,
    versions_and_hardware,
    visible_gpus,
)

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(params=["linux", "macos"])
def system(request, monkeypatch):
    """This machine, and this machine without /proc, /sys and the calls of Linux."""
    if request.param == "macos":
        exists, read = os.path.exists, Path.read_text

        def hidden(path, *args, **kwargs):
            if str(path).startswith(("/proc", "/sys/")):
                raise FileNotFoundError(path)
            return read(path, *args, **kwargs)

        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path))
        monkeypatch.setattr(Path, "read_text", hidden)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
        monkeypatch.delattr(os, "sched_getaffinity")
    return request.param


def test_the_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


def test_without_an_affinity_mask_the_cores_are_those_of_the_machine(system):
    assert num_cores() == (os.cpu_count() if system == "macos" else len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("limit", "expected"), [("1000000\n", 1_000_000), ("max\n", None), (None, None)])
def test_the_memory_is_the_least_of_the_machine_and_its_container(monkeypatch, limit, expected):
    read = Path.read_text

    def shown(path, *args, **kwargs):
        if str(path) != "/sys/fs/cgroup/memory.max":
            return read(path, *args, **kwargs)
        if limit is None:
            raise FileNotFoundError(path)
        return limit

    monkeypatch.setattr(Path, "read_text", shown)
    assert memory_bytes() == (expected or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@pytest.mark.run
@pytest.mark.parametrize(
    ("cpuinfo", "name", "instructions"),
    [
        ("model name\t: Fast 3\nflags\t\t: fpu avx2\nmodel name\t: Slow\n", "Fast 3", "flags\t\t: fpu avx2"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", platform.processor(), "Features\t: fp asimd"),
        (None, platform.processor(), f"{platform.machine()} {platform.processor()}"),
    ],
)
def test_the_processor_is_named_by_the_kernel_or_by_python(monkeypatch, cpuinfo, name, instructions):
    read = Path.read_text

    def shown(path, *args, **kwargs):
        if str(path) != "/proc/cpuinfo":
            return read(path, *args, **kwargs)
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", shown)
    assert (versions_and_hardware("cpu", 1)["processor"], instruction_set()) == (name, instructions)


def test_hidden_gpus_are_not_counted(monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda folder: ["nvidia0", "nvidia1", "nvidiactl", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == 2
    for value, expected in (("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == expected


@pytest.mark.run
@pytest.mark.skipif(not shutil.which("ps"), reason="there is no ps")
def test_children_are_found_at_every_depth_and_stopped_ones_are_seen(system):
    before = set(own_children())
    command = ["sh", "-c", "sh -c 'sleep 60 & echo $!; wait' & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as top:
        assert top.stdout is not None
        try:
            below = {int(top.stdout.readline()), int(top.stdout.readline())}
            assert set(own_children()) - before == {top.pid}
            assert set(descendants(top.pid)) == below
            assert (top.pid, os.getpid()) in all_processes()
            assert not is_stopped(top.pid)
            os.kill(top.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while not is_stopped(top.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert is_stopped(top.pid)
        finally:
            os.killpg(top.pid, signal.SIGKILL)
    assert not is_stopped(top.pid)


def test_calls_that_the_system_lacks_do_nothing(system):
    return_freed_memory()
    if system == "macos":
        adopt_orphans()
        die_with_parent(os.getppid())


@pytest.mark.run
def test_the_import_names_what_the_system_needs():
    """Windows has no os.waitid, and Python has it on macOS since 3.13."""
    command = [sys.executable, "-c", "import os; del os.waitid; import gspo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "macOS with Python 3.13 or newer; on Windows, install it inside WSL" in done.stderr.splitlines()[-1]


REWARD = """
import os

def digits(completion, **columns):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{os.getpid()} ")
    return float(completion[:1].isdigit())
"""
TRAIN = """
import os, sys
from gspo import Trainer
summary = Trainer("quickstart", reward="reward.py:digits", overrides=sys.argv[1:]).train(report=False)
assert (summary.path / "metrics.jsonl").read_text().count("reward/mean") == 2
print(os.getpid())
"""


@pytest.mark.run
def test_a_run_trains_where_linux_is_hidden(tmp_path):
    shutil.copy(HELPERS / "without_linux.py", tmp_path / "sitecustomize.py")
    (tmp_path / "reward.py").write_text(REWARD)
    seen, asked = tmp_path / "seen", tmp_path / "asked"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-c", TRAIN, "total_train_steps=2", "train_dataset.batch_size=2", "evaluator.size=4"),
            *(f"cluster.fileroot={tmp_path / 'runs'}", "gconfig.max_new_tokens=8", "gconfig.n_samples=4"),
        ],
        env={**os.environ, "PYTHONPATH": path, "SEEN": str(seen), "HIDDEN_LOG": str(asked)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] not in seen.read_text().split()
    # The test did hide something: these are asked for in every run.
    assert {"prctl", "malloc_trim", "/proc/cpuinfo"} <= set(asked.read_text().split())
