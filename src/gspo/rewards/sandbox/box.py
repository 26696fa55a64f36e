"""Model-written Python in a box: bubblewrap namespaces, a system-call filter, resource limits, one owner that kills it.

What the program sees: an interpreter with its standard library (read-only, under /python), shared libraries, /dev/null
and random numbers, an empty /tmp of its own, and nothing else: no /proc, no /etc, no home, no network, no environment.
It lives in its own pid namespace: ending that namespace's first process ends everything it started, however it forked,
detached or ignored signals. `docs/sandbox.md` says what is promised and what is not.

A failure before the program's own code was loaded is a SandboxError, never a verdict about the program.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from gspo.errors import RewardError
from gspo.rewards.sandbox.seccomp import filter_program

NICE = 5  # below the trainer, yet able to finish on a busy machine: a starved candidate would look like a slow one
START_S = 10.0  # for the sandbox itself; beyond it the machine is to blame
END_S = 1.0  # within which everything is gone once we kill it
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_HIDDEN = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*")


class SandboxError(RewardError):
    """The sandbox could not do its work on this machine. Says nothing about the program it was to run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one program, from its first line to the end of all it started."""

    timeout_s: float = 5.0  # wall-clock, from the moment its code is handed over
    memory_mb: int = 256  # address space of each process
    processes: int = 8  # threads count too
    disk_mb: int = 16  # all of its /tmp, and any one file
    open_files: int = 64
    output_bytes: int = 1 << 20


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: `reason` is empty where it ended by itself with exit code 0."""

    output: str
    reason: str
    elapsed_s: float


class Box:
    """One running sandbox. Lines go in and out under one deadline; `close` ends everything inside it.

    Use as a context manager; raises SandboxError where the sandbox does not start.
    """

    def __init__(self, limits: Limits, *, allow_unsandboxed: bool = False):
        mode = _mode(allow_unsandboxed)
        self.limits = limits
        self._received = bytearray()
        self._init_fd = -1
        info_read, info_write = os.pipe()
        filter_read, filter_write = os.pipe()
        os.write(filter_write, filter_program() or b"")  # far below a pipe's capacity
        os.close(filter_write)
        try:
            command = _unboxed(limits) if mode == "unsandboxed" else _boxed(limits, mode, info_write, filter_read)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                pass_fds=[] if mode == "unsandboxed" else [info_write, filter_read],
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            os.close(info_read)
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            os.close(info_write)
            os.close(filter_read)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (stream.fileno() if stream else -1 for stream in streams)
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        self.deadline = time.monotonic() + START_S
        try:
            if mode != "unsandboxed":
                self._init_fd = _first_process(info_read)
            ready = self.line()
            if ready != b'{"ready": true}\n':
                raise SandboxError(f"the sandbox did not start: {self._last_words() or self.state()}")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(info_read)
        self.started = time.monotonic()
        self.deadline = self.started + limits.timeout_s

    def send(self, message: dict[str, Any]) -> bool:
        """Write one line; False where the program does not take it before the deadline, or has ended."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            if not select.select([], [self._stdin], [], max(0.0, self.deadline - time.monotonic()))[1]:
                return False
            try:
                data = data[os.write(self._stdin, data) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def line(self) -> bytes | None:
        """The next line the program wrote, None without one before the deadline, its end, or too much output."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > self.limits.output_bytes or not self._more():
                return None
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def rest(self) -> bytes:
        """All output until the end, the deadline or the cap."""
        while len(self._received) <= self.limits.output_bytes and self._more():
            pass
        return bytes(self._received[: self.limits.output_bytes])

    def state(self) -> str:
        """Why nothing more comes: over time, over the output cap, or how the program ended; "" for a clean end."""
        if time.monotonic() >= self.deadline:
            return f"over its time of {self.limits.timeout_s:g} s"
        if len(self._received) > self.limits.output_bytes:
            return f"wrote more than {self.limits.output_bytes} bytes"
        try:
            # It may have closed its output and live on, so its end is waited for under the same deadline.
            code = self._process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"over its time of {self.limits.timeout_s:g} s"
        number = -code if code < 0 else code - 128  # bubblewrap reports a signal as a shell does
        if number in set(signal.Signals):
            return f"killed by {signal.Signals(number).name}"
        return f"ended with exit code {code}" if code else ""

    def close(self) -> None:
        """Kill the whole pid namespace, and wait until the kernel says that it is empty."""
        if self._init_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
            # Readable when the namespace's first process is gone, and it goes last of all.
            gone = bool(select.select([self._init_fd], [], [], END_S)[0])
            os.close(self._init_fd)
            self._init_fd = -1
        else:
            gone = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(END_S if gone else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _more(self) -> bool:
        if not select.select([self._stdout], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
            return False
        try:
            chunk = os.read(self._stdout, 1 << 16)
        except BlockingIOError:
            return True
        self._received += chunk
        return bool(chunk)

    def _last_words(self) -> str:
        with contextlib.suppress(BlockingIOError):
            words = os.read(self._stderr, 4096).decode(errors="replace").strip()
            return words.splitlines()[-1] if words else ""
        return ""


def run(source: str, limits: Limits = DEFAULT_LIMITS, *, allow_unsandboxed: bool = False) -> Ended:
    """Run a program to its end and give back what it printed (stdout and stderr as one, capped)."""
    with Box(limits, allow_unsandboxed=allow_unsandboxed) as box:
        box.send({"code": source})
        output = box.rest()
        reason = box.state()
        elapsed_s = time.monotonic() - box.started
    return Ended(output.decode(errors="replace"), reason, elapsed_s)


def unavailable() -> str:
    """Why model-written code cannot be run in a sandbox here, in a sentence for the user; "" where it can."""
    global _works
    if _works:
        return ""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed; install the Debian package `bubblewrap` (apt-get install bubblewrap)"
    if filter_program() is None:
        return f"there is no table of system calls for this processor ({os.uname().machine})"
    _works = True  # Box asks us; withdrawn below where the trial fails
    why = "its trial program printed something else"
    try:
        _works = run("print(6 * 7)").output == "42\n"
    except SandboxError as error:
        _works, why = False, str(error)
    return "" if _works else f"bubblewrap is installed (Debian package `bubblewrap`) but does not work here: {why}"


_works = False  # a failed trial is repeated: it may have been the machine's bad moment


def _mode(allow_unsandboxed: bool) -> str:
    why = unavailable()
    if why and not allow_unsandboxed:
        raise SandboxError(
            f"refused to run model-written code without a sandbox: {why}. "
            f"reward.allow_unsandboxed_code=true runs it with this user's rights, on a machine you can lose"
        )
    return "unsandboxed" if why else "root" if os.geteuid() == 0 else "user"


def _boxed(limits: Limits, mode: str, info_fd: int, filter_fd: int) -> list[str]:
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
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if mode == "root":
        # No user namespace: the program gets a real user id of its own, for which the process limit counts.
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--hostname", "sandbox", *_root(), "--perms", "1777", "--size", disk, "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--info-fd", str(info_fd), "--seccomp", str(filter_fd)]
    uid = 20000 + os.getpid() % 40000 if mode == "root" else None  # one candidate per grader at a time
    return [*command, "--", "/python/bin/python3", *_arguments(limits, uid)]


def _unboxed(limits: Limits) -> list[str]:
    return [os.path.realpath(sys.executable), *_arguments(limits, None)]


def _arguments(limits: Limits, uid: int | None) -> list[str]:
    rlimits = {
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
        del rlimits["NPROC"]
    settings = json.dumps({"rlimits": rlimits, "nice": NICE, "uid": uid})
    return ["-s", "-S", "-P", "-B", "-c", _program(), settings]


@lru_cache(maxsize=1)
def _program() -> str:
    return Path(__file__).with_name("candidate.py").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _root() -> list[str]:
    """The file system of the sandbox: this interpreter without its packages, shared libraries, three devices."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    # Named first, or bubblewrap makes them for its own user alone.
    folders = ("/python", "/python/bin", "/python/lib", "/usr", "/dev")
    binds = [word for folder in folders for word in ("--dir", folder)]
    binds += ["--ro-bind", os.path.realpath(sys.executable), "/python/bin/python3"]
    binds += ["--ro-bind", str(stdlib), f"/python/lib/{version}"]
    for pattern in _HIDDEN:
        for hidden in stdlib.glob(pattern):
            binds += ["--tmpfs", f"/python/lib/{version}/{hidden.name}"]
    shared = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(sysconfig.get_config_var("INSTSONAME"))
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared.is_file():
        binds += ["--ro-bind", str(shared), f"/python/lib/{shared.name}", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    for folder in _LIBRARIES:
        path = Path(folder)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), folder]
        elif path.is_dir():
            binds += ["--ro-bind", folder, folder]
    for device in ("null", "zero", "urandom", "random"):
        binds += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return binds


def _first_process(info_fd: int) -> int:
    """A handle on the first process of the new pid namespace, from bubblewrap's report; −1 where it gave none."""
    report = b""
    deadline = time.monotonic() + START_S
    while not report.rstrip().endswith(b"}"):
        if not select.select([info_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return -1
        chunk = os.read(info_fd, 4096)
        if not chunk:
            return -1
        report += chunk
    try:
        return os.pidfd_open(json.loads(report)["child-pid"])
    except (ValueError, KeyError, OSError):
        return -1
