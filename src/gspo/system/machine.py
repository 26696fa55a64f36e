"""The machine, on Linux and on macOS: cores, memory, GPUs, and what its kernel says about processes.

Where the system has no such call, a function does less, and its docstring says what. Torch-free.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")  # a folder in memory; macOS has none
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def num_cores() -> int:
    """Cores that this process may use: a container or scheduler may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Bytes of memory that processes of this machine or container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdecimal() else total


def instruction_set() -> str:
    """What the processor can execute, for the name of code that is compiled for it."""
    return _cpuinfo("flags", "features") or f"{platform.machine()} {platform.processor()}"


def versions_and_hardware(device: str, threads: int) -> dict[str, Any]:
    """Versions, commit and hardware of this run."""
    packages = ("gspo", "torch", "transformers", "safetensors", "numpy")
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(  # wait: 5 s, the trainer at its start
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5
        ).stdout.strip()
    return {
        "packages": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _cpuinfo("model name").partition(":")[2].strip() or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "device": device,
        "threads": threads,
        "commit": commit or None,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpuinfo(*names: str) -> str:
    return next((line for line in _text("/proc/cpuinfo").splitlines() if line.lower().startswith(names)), "")


def _text(path: str) -> str:
    """The content of a file of the kernel; "" on a system without it."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that a process started here would see, from the driver's device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [entry for entry in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", entry)]
    if chosen is None:
        return len(devices)
    # CUDA ignores everything from the first invalid id on; -1 is the usual way to hide all GPUs.
    usable = list(takewhile(lambda word: word.strip() not in ("", "-1"), chosen.split(",")))
    # CUDA_VISIBLE_DEVICES may list more GPUs than this machine has.
    return min(len(usable), len(devices))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit at once if it has ended already.

    Linux only. On other systems a child notices the end of its parent when their socket or pipe is closed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before prctl(): then no signal would ever come.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the subreaper: descendants whose parent ends become children of this process, so it can find them.

    Linux only. On other systems processes that have left their process group live on when their parent ends.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def return_freed_memory() -> None:
    """Give freed memory back to the system, if the C library can (glibc): it keeps the blocks of freed tensors."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def all_processes() -> list[tuple[int, int]]:
    """(pid, parent) of every visible process."""
    if not os.path.exists("/proc/self/stat"):
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            lines = ps.communicate()[0].splitlines()  # wait: none, the stall timeout of the process
        return [(pid, parent) for pid, parent in (map(int, line.split()) for line in lines) if pid != ps.pid]
    # A process may end between the listing and the read. Its name, in parentheses, may contain parentheses.
    found = [(int(name), _text(f"/proc/{name}/stat")) for name in os.listdir("/proc") if name.isdecimal()]
    return [(pid, int(stat.rpartition(")")[2].split()[1])) for pid, stat in found if stat]


def own_children() -> list[int]:
    """Processes that this process has started and that have not been collected yet."""
    return [pid for pid, parent in all_processes() if parent == os.getpid()]


def descendants(*pids: int) -> list[int]:
    """Children of processes, their children, and so on."""
    processes, found = all_processes(), list(pids)
    for above in found:  # grows in the loop
        found += [pid for pid, parent in processes if parent == above]
    return found[len(pids) :]
