"""Command lines that run model-written Python: in bubblewrap, with limits, or without a sandbox."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

NICE = 5  # lower priority than the trainer, but high enough that a busy machine does not make a program look slow
_HIDDEN = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*")
_LOADED = re.compile(r"^\s*(?:(\S+) => )?(/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)  # a line of the dynamic loader's list


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program and of all processes that it starts."""

    timeout_s: float = 5.0  # wall-clock time, from when its code is sent
    memory_mb: int = 256  # address space of each process
    processes: int = 8  # and threads
    disk_mb: int = 16  # size of /tmp, and of each file
    open_files: int = 64
    output_bytes: int = 1 << 20


DEFAULT_LIMITS = Limits()


def boxed_command(limits: Limits, mode: str, info_fd: int, filter_fd: int) -> list[str]:
    """bubblewrap with new namespaces, a system-call filter and a minimal file system. mode: "root" or "user"."""
    disk = str(limits.disk_mb << 20)
    command = [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
    ]
    # New namespaces: no other processes, network, shared memory or host name are visible.
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if mode == "root":
        # No user namespace: the program gets a real user id, because the limit on processes is per user id.
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    # The root is read-only; /tmp is a separate mount with a size limit and stays writable.
    command += ["--hostname", "sandbox", *_root(), "--perms", "1777", "--size", disk, "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--info-fd", str(info_fd), "--seccomp", str(filter_fd)]
    uid = 20000 + os.getpid() % 40000 if mode == "root" else None  # a grader process runs one program at a time
    return [*command, "--", "/python/bin/python3", *_arguments(limits, uid)]


def unboxed_command(limits: Limits) -> list[str]:
    """The same program with resource limits only."""
    return [os.path.realpath(sys.executable), *_arguments(limits, None)]


def _arguments(limits: Limits, uid: int | None) -> list[str]:
    rlimits = {
        # Above the wall-clock limit, which the grader enforces; this one also ends a program whose grader has died.
        "CPU": math.ceil(limits.timeout_s) + 1,
        "AS": limits.memory_mb << 20,
        "NPROC": limits.processes,
        "FSIZE": limits.disk_mb << 20,
        "NOFILE": limits.open_files,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    if uid is None and os.geteuid() == 0:
        del rlimits["NPROC"]  # it would count all processes of root
    settings = json.dumps({"rlimits": rlimits, "nice": NICE, "uid": uid})
    # No user or site packages, no current directory in sys.path, no .pyc files.
    return ["-s", "-S", "-P", "-B", "-c", _program(), settings]


@lru_cache(maxsize=1)
def _program() -> str:
    return Path(__file__).with_name("candidate.py").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _root() -> list[str]:
    """Options for the file system: this interpreter without packages, the libraries that it loads, four devices."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    # Created explicitly: directories that bubblewrap creates by itself are readable only by its own user.
    folders = ("/python", "/python/bin", "/python/lib", "/usr", "/usr/lib", "/dev")
    binds = [word for folder in folders for word in ("--dir", folder)]
    binds += ["--ro-bind", os.path.realpath(sys.executable), "/python/bin/python3"]
    binds += ["--ro-bind", str(stdlib), f"/python/lib/{version}"]
    # An empty tmpfs hides installed packages and unneeded parts of the standard library.
    for pattern in _HIDDEN:
        for hidden in stdlib.glob(pattern):
            binds += ["--tmpfs", f"/python/lib/{version}/{hidden.name}"]
    # All libraries are in one folder, which every loader searches by default. The links make the loader itself visible
    # where the interpreter expects it, for example in /lib64.
    for name, library in _libraries(stdlib).items():
        binds += ["--ro-bind", library, f"/usr/lib/{name}"]
    binds += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib", "/lib64", "--symlink", "lib", "/usr/lib64"]
    for device in ("null", "zero", "urandom", "random"):
        binds += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return binds


def _libraries(stdlib: Path) -> dict[str, str]:
    """Shared libraries of the interpreter and of the standard library's extension modules: name → file."""
    folder = stdlib / "lib-dynload"
    # tkinter needs the libraries of X, and a program has no screen.
    modules = [f"./{file.name}" for file in sorted(folder.glob("*.so")) if not file.name.startswith("_tkinter")]
    # With this variable the dynamic loader lists what it would load and runs nothing. Relative names, because a path
    # with a space or a colon would be read as two.
    listed = subprocess.run(  # wait: 10 s or less, the reward worker
        [os.path.realpath(sys.executable)],
        env={"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": ":".join(modules)},
        cwd=folder if folder.is_dir() else None,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    found = {name or os.path.basename(file): file for name, file in _LOADED.findall(listed)}
    # libc loads it at the end of a thread, so no list has it.
    if "libc.so.6" in found and (unwinder := Path(found["libc.so.6"]).with_name("libgcc_s.so.1")).is_file():
        found[unwinder.name] = str(unwinder)
    return found
