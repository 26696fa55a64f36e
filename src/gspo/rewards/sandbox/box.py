"""The sandbox for model-written Python: bubblewrap namespaces, a system-call filter and resource limits.

The program sees an interpreter with its standard library (read-only, under /python), shared libraries, /dev/null and
random devices, and an empty /tmp. It sees no /proc, /etc, home directory, network or environment variables. It runs in
its own pid namespace: killing the first process of the namespace kills all processes that the program has started,
even if they have detached or ignore signals. docs/sandbox.md lists what is guaranteed and what is not.

A failure before the program's code is loaded raises SandboxError and never counts against the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gspo.errors import SandboxError
from gspo.rewards.sandbox.command import DEFAULT_LIMITS, Limits, boxed_command, unboxed_command
from gspo.rewards.sandbox.seccomp import filter_program
from gspo.system import await_killed, describe_exit, kill_group

START_S = 10.0  # limit for the start of the sandbox
END_S = 1.0  # limit for the end of all processes after the kill


@dataclass(frozen=True, slots=True)
class Ended:
    """The output of a program and why it ended; `reason` is empty after exit code 0."""

    output: str
    reason: str
    elapsed_s: float


class Box:
    """One running sandbox: send and receive lines before one deadline; `close` kills everything in it.

    Use it as a context manager. Raises SandboxError if the sandbox does not start.
    """

    def __init__(self, limits: Limits, *, allow_unsandboxed: bool = False):
        mode = _mode(allow_unsandboxed)
        self.limits = limits
        self._received = bytearray()
        self._init_fd = -1
        # bubblewrap reports the pid of the first process through one pipe and reads the system-call filter from the
        # other.
        info_read, info_write = os.pipe()
        filter_read, filter_write = os.pipe()
        # The write end is closed before the start, so bubblewrap reads the filter up to the end of file.
        os.write(filter_write, filter_program() or b"")  # fits into the pipe's buffer
        os.close(filter_write)
        try:
            command = (
                unboxed_command(limits)
                if mode == "unsandboxed"
                else boxed_command(limits, mode, info_write, filter_read)
            )
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Fixed hash seed: the iteration order of sets of strings is the same in every run.
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                pass_fds=[] if mode == "unsandboxed" else [info_write, filter_read],
                # Without a sandbox, `close` kills the program by its process group.
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            os.close(info_read)
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            # The child holds its own copies. With ours open, reading the report would not end if bubblewrap fails.
            os.close(info_write)
            os.close(filter_read)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (stream.fileno() if stream else -1 for stream in streams)
        # Non-blocking: a read or write after `select` must never wait beyond the deadline.
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        # The start has its own deadline, so a slow machine does not use up the program's time.
        self.deadline = time.monotonic() + START_S
        try:
            if mode != "unsandboxed":
                self._init_fd = _first_process(info_read)
            ready = self.line()
            if ready != b'{"ready": true}\n':
                raise SandboxError(f"the sandbox did not start: {self._last_error() or self.state()}")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(info_read)
        self.started = time.monotonic()
        # From here on the deadline is the program's.
        self.deadline = self.started + limits.timeout_s

    def send(self, message: dict[str, Any]) -> bool:
        """Write one line; False if the program does not read it before the deadline, or has ended."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            # wait: the program's time limit, the reward worker
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
        """The next line of output; None after the deadline, the end of the program, or too much output."""
        while (end := self._received.find(b"\n")) < 0:
            # Without this limit a program that prints forever would fill the memory of this process.
            if len(self._received) > self.limits.output_bytes or not self._more():
                return None
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def rest(self) -> bytes:
        """All output until the program's end, the deadline or the limit."""
        while len(self._received) <= self.limits.output_bytes and self._more():
            pass
        return bytes(self._received[: self.limits.output_bytes])

    def state(self) -> str:
        """Why there is no more output: timeout, output limit, or how the program ended; "" after exit code 0.

        Environments show this text to the model: a changed word changes what is sampled.
        """
        if time.monotonic() >= self.deadline:
            return f"over its time of {self.limits.timeout_s:g} s"
        if len(self._received) > self.limits.output_bytes:
            return f"wrote more than {self.limits.output_bytes} bytes"
        try:
            # It may have closed its output and still run, so wait for its end until the same deadline.
            # wait: the program's time limit, the reward worker
            code = self._process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"over its time of {self.limits.timeout_s:g} s"
        return describe_exit(code).removeprefix("was ") if code else ""

    def close(self) -> None:
        """Kill the whole pid namespace and wait until it is empty."""
        if self._init_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
            # Readable when the first process of the namespace has ended, and it ends after all others.
            gone = bool(select.select([self._init_fd], [], [], END_S)[0])  # wait: END_S, the reward worker
            os.close(self._init_fd)
            self._init_fd = -1
        else:
            # No pidfd: unsandboxed, or bubblewrap failed before its report.
            gone = True
            kill_group(self._process.pid)
        try:
            self._process.wait(END_S if gone else 0.0)  # wait: END_S, the reward worker
        except subprocess.TimeoutExpired:
            self._process.kill()
            await_killed(self._process)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _more(self) -> bool:
        # wait: the program's time limit, the box
        if not select.select([self._stdout], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
            return False
        try:
            chunk = os.read(self._stdout, 1 << 16)  # wait: none, select has reported output
        except BlockingIOError:
            return True
        self._received += chunk
        return bool(chunk)

    def _last_error(self) -> str:
        with contextlib.suppress(BlockingIOError):
            words = os.read(self._stderr, 4096).decode(errors="replace").strip()  # wait: none, the pipe does not block
            return words.splitlines()[-1] if words else ""
        return ""


def run_program(source: str, limits: Limits = DEFAULT_LIMITS, *, allow_unsandboxed: bool = False) -> Ended:
    """Run a program to its end; returns its output (stdout and stderr together, limited in size)."""
    with Box(limits, allow_unsandboxed=allow_unsandboxed) as box:
        box.send({"code": source})
        output = box.rest()
        # Before `close`, which would kill a program that still runs and change its exit code.
        reason = box.state()
        elapsed_s = time.monotonic() - box.started
    return Ended(output.decode(errors="replace"), reason, elapsed_s)


def unavailable() -> str:
    """Why the sandbox does not work on this machine, as a message for the user; "" if it works."""
    global _works
    if _works:
        return ""
    if sys.platform != "linux":
        return "bubblewrap and seccomp exist on Linux only"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed; install the Debian package `bubblewrap` (apt-get install bubblewrap)"
    if filter_program() is None:
        return f"the system-call filter does not support this processor ({os.uname().machine})"
    _works = True  # Box calls this function; corrected below if the trial fails
    why = "a trial program printed unexpected output"
    try:
        _works = run_program("print(6 * 7)").output == "42\n"
    except SandboxError as error:
        _works, why = False, str(error)
    return "" if _works else f"bubblewrap is installed (Debian package `bubblewrap`) but does not work here: {why}"


_works = False  # a failed trial is repeated at the next call: the failure may have been temporary


def _mode(allow_unsandboxed: bool) -> str:
    why = unavailable()
    if why and not allow_unsandboxed:
        raise SandboxError(
            f"model-written code needs a sandbox, which does not work here: {why}. "
            "reward.allow_unsandboxed_code=true runs it without one, with the rights of this user; use it only on a "
            "machine whose data may be lost"
        )
    # As root the program gets a real, unprivileged user id; otherwise it gets a user namespace (see `boxed_command`).
    return "unsandboxed" if why else "root" if os.geteuid() == 0 else "user"


def _first_process(info_fd: int) -> int:
    """A pidfd of the first process of the new pid namespace, from bubblewrap's report; −1 without a report."""
    report = b""
    deadline = time.monotonic() + START_S
    while not report.rstrip().endswith(b"}"):
        # wait: the program's time limit, the box
        if not select.select([info_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return -1
        chunk = os.read(info_fd, 4096)  # wait: none, select has reported output
        if not chunk:
            return -1
        report += chunk
    try:
        # A pidfd names this process even after its pid has been reused.
        return os.pidfd_open(json.loads(report)["child-pid"])
    except (ValueError, KeyError, OSError):
        return -1
