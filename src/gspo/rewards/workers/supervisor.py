"""The supervisor of the reward workers: a small process between the trainer and the code it does not trust to end.

It forks the workers (its own imports are few, so a replacement costs milliseconds), hands them groups, and kills a
worker with its whole process group when the clock page says a call is over its deadline. The trainer may be busy for
minutes meanwhile: deadlines do not depend on it. When the trainer goes, for whatever reason, everything here goes.

Trainer → warden: frames of length + JSON line + pickled group (never opened here).
Worker → warden → trainer: JSON lines only, so nothing that ran user code is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from gspo.rewards.functions.builtin import PRELOAD
from gspo.rewards.workers.worker import CLOCK, LENGTH, run, set_clock

POLL_S = 0.05
HEARTBEAT_S = 1.0
# Signals a scheduler sends to every process of a job: the call is made again instead of blaming the reward.
_OUTSIDE = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
_MAX_RETRIES = 3
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Job:
    id: int
    num: int
    payload: bytes
    start: int = 0  # first call not yet answered
    retries: int = 0  # deaths of a worker that were not this job's doing
    values: list[tuple[int, int, float]] = field(default_factory=list)  # (part, sample, value)
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)  # sample -> (kind, message)


@dataclass
class Worker:
    pid: int
    channel: socket.socket
    page: mmap
    job: Job | None = None
    ready: bool = False
    killed: bool = False  # by us, over its deadline
    garbled: bool = False  # it sent what no worker of ours sends
    incoming: bytes = b""


class Warden:
    """All state of the supervisor; one thread, one selector."""

    def __init__(self, trainer: socket.socket, settings: dict[str, Any], wake_fd: int):
        self.trainer = trainer
        self.settings = settings
        self.workers: dict[int, Worker] = {}
        self.queue: deque[Job] = deque()
        self.failed_starts = 0
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.selector = selectors.DefaultSelector()
        self.last_sent = time.monotonic()
        trainer.setblocking(False)
        self.selector.register(trainer, selectors.EVENT_READ)
        self.wake_fd = wake_fd  # readable after SIGCHLD: a death is noticed at once, not at the next poll
        self.selector.register(wake_fd, selectors.EVENT_READ)

    def serve(self) -> None:
        for _ in range(self.settings["workers"]):
            self.spawn()
        while os.getppid() == self.settings["trainer"]:
            events = self.selector.select(POLL_S if any(w.job or not w.ready for w in self.workers.values()) else 0.5)
            for key, _ in events:
                if key.fileobj is self.trainer:
                    if not self.read_trainer():
                        return
                elif key.fileobj == self.wake_fd:
                    os.read(self.wake_fd, 4096)
                elif key.data in self.workers:
                    self.read_worker(self.workers[key.data])
            self.check_clocks()
            self.reap()
            self.dispatch()
            self.flush()

    def spawn(self) -> None:
        mine, theirs = socket.socketpair()
        page = mmap(-1, 4096)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.trainer.close()
                self.selector.close()
                mine.close()
                for other in self.workers.values():
                    other.channel.close()
                run(theirs, page, self.settings["parts"], self.settings)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        mine.setblocking(False)
        self.workers[pid] = Worker(pid, mine, page)
        # Set here too: the child may hang before it reaches its own first line.
        set_clock(page, time.monotonic() + self.settings["startup_s"])
        self.selector.register(mine, selectors.EVENT_READ, pid)

    def read_trainer(self) -> bool:
        """Take in new jobs; False when the trainer is gone."""
        try:
            while chunk := self.trainer.recv(1 << 20):
                self.incoming += chunk
            return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        position = 0
        while position + LENGTH.size <= len(self.incoming):
            (size,) = LENGTH.unpack_from(self.incoming, position)
            if position + LENGTH.size + size > len(self.incoming):
                break
            frame = bytes(self.incoming[position + LENGTH.size : position + LENGTH.size + size])
            line, _, payload = frame.partition(b"\n")
            header = json.loads(line)
            self.queue.append(Job(header["job"], header["num"], payload))
            position += LENGTH.size + size
        del self.incoming[:position]
        return True

    def read_worker(self, worker: Worker) -> None:
        try:
            while chunk := worker.channel.recv(1 << 16):
                worker.incoming += chunk
        except OSError:
            pass
        *lines, worker.incoming = worker.incoming.split(b"\n")
        for line in lines:
            if worker.garbled:
                return
            try:
                self.heard(worker, json.loads(line))
            except (ValueError, KeyError, TypeError):  # reward code wrote into our channel: trust nothing more from it
                worker.garbled = True
                self.kill(worker.pid)

    def heard(self, worker: Worker, message: dict[str, Any]) -> None:
        if "fatal" in message:
            self.report(message)
        elif "ready" in message:
            worker.ready, self.failed_starts = True, 0
            self.report({"ready": worker.pid})
        elif (job := worker.job) is None:
            return
        elif "done" in message:
            worker.job = None
            self.finish(job)
        else:
            job.start = message["call"] + 1
            job.values += [(message["part"], sample, value) for sample, value in message["values"]]
            for sample, kind, text in message["failures"]:
                job.failures.setdefault(sample, (kind, text))

    def check_clocks(self) -> None:
        now = time.monotonic()
        for worker in self.workers.values():
            deadline = CLOCK.unpack_from(worker.page)[0]
            if deadline and now > deadline and not worker.killed:
                worker.killed = True
                self.kill(worker.pid)

    def reap(self) -> None:
        """Bury dead workers: what they were doing is charged or repeated, what they left behind is killed."""
        # WNOWAIT keeps the pid, and so the process group's number, ours until the group has been killed.
        while dead := _next_dead():
            worker = self.workers.pop(dead, None)
            if worker is None:
                os.waitpid(dead, 0)  # an orphan of a reward that ended by itself
                continue
            self.kill(dead)
            status = os.waitstatus_to_exitcode(os.waitpid(dead, 0)[1])
            self.read_worker(worker)
            self.selector.unregister(worker.channel)
            worker.channel.close()
            self.kill_strays()
            self.settle(worker, status)
            worker.page.close()
            if self.failed_starts < _MAX_RETRIES:
                self.spawn()

    def settle(self, worker: Worker, status: int) -> None:
        """Decide what a worker's death means for the job it held."""
        deadline, call, sample, part = CLOCK.unpack_from(worker.page)
        job = worker.job
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= _MAX_RETRIES and not self.workers:
                why = f"took longer than {self.settings['startup_s']:g} s" if worker.killed else _ending(status)
                self.report({"fatal": f"a reward worker could not start {_MAX_RETRIES} times in a row: it {why}"})
        if job is None:
            return
        if worker.garbled:
            self.abandon(job, "reward code wrote into its worker's channel")
            return
        running = deadline != 0.0 and call >= job.start
        if running and (worker.killed or -status not in _OUTSIDE):
            kind = "timeout" if worker.killed else "crash"
            text = (
                f"no answer in {self.settings['timeout_s']:g} s" if worker.killed else f"its process {_ending(status)}"
            )
            for index in range(job.num) if sample < 0 else (sample,):
                job.failures.setdefault(index, (kind, f"{self.settings['parts'][part]['name']}: {text}"))
            job.start = call + 1
        else:
            job.retries += 1
        if job.retries > _MAX_RETRIES:
            self.abandon(job, f"its worker ended {job.retries} times between calls: it {_ending(status)}")
        elif len(job.failures) == job.num:
            self.finish(job)
        else:
            self.queue.appendleft(job)

    def dispatch(self) -> None:
        if not self.workers:  # every start failed: answer rather than keep the trainer waiting
            while self.queue:
                self.abandon(self.queue.popleft(), "no reward worker could be started")
        for worker in self.workers.values():
            if self.queue and worker.ready and worker.job is None and not worker.killed:
                worker.job = job = self.queue.popleft()
                header = json.dumps({"start": job.start, "num": job.num, "failed": list(job.failures)}).encode()
                frame = header + b"\n" + job.payload
                try:
                    worker.channel.setblocking(True)
                    # An idle worker reads at once; if it died or froze instead, reap and check_clocks deal with it.
                    worker.channel.settimeout(5.0)
                    worker.channel.sendall(LENGTH.pack(len(frame)) + frame)
                except OSError:
                    self.kill(worker.pid)
                finally:
                    worker.channel.setblocking(False)

    def abandon(self, job: Job, why: str) -> None:
        for index in range(job.num):
            job.failures.setdefault(index, ("infra", f"{self.names()}: {why}"))
        self.finish(job)

    def finish(self, job: Job) -> None:
        failures = [(sample, *failure) for sample, failure in job.failures.items()]
        self.report({"job": job.id, "values": job.values, "failures": failures})

    def report(self, message: dict[str, Any]) -> None:
        self.outgoing += json.dumps(message).encode() + b"\n"

    def flush(self) -> None:
        """Send what the trainer will take without waiting for it; a heartbeat if there is nothing to say."""
        now = time.monotonic()
        if not self.outgoing and now - self.last_sent > HEARTBEAT_S:
            self.report({"alive": True})
        try:
            while self.outgoing:
                del self.outgoing[: self.trainer.send(self.outgoing[: 1 << 18])]
                self.last_sent = now
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()  # the trainer is gone; the next read says so

    def names(self) -> str:
        return "+".join(part["name"] for part in self.settings["parts"])

    def kill(self, pid: int) -> None:
        """SIGKILL a worker, its process group, and descendants that left the group."""
        for victim in _descendants(pid):
            _signal(os.kill, victim)
        _signal(os.killpg, pid)
        _signal(os.kill, pid)  # it may not have reached setsid yet

    def kill_strays(self) -> None:
        """Orphans of dead workers become this process's children (it is their subreaper): end them too."""
        for _ in range(8):  # their own children arrive here in turn
            strays = [pid for pid, parent in _processes() if parent == os.getpid() and pid not in self.workers]
            if not strays:
                return
            for pid in strays:
                for victim in (*_descendants(pid), pid):
                    _signal(os.kill, victim)
            for pid in strays:
                _bury(pid)

    def close(self) -> None:
        for worker in self.workers.values():
            self.kill(worker.pid)
        for worker in self.workers.values():
            _bury(worker.pid)
        self.workers.clear()
        self.kill_strays()


def main(fd: str) -> None:
    """Entry of the supervisor process; `fd` is its end of the trainer's socket."""
    trainer = socket.socket(fileno=int(fd))
    # Ctrl-C and a scheduler's signals belong to the trainer, which still wants its rewards while it saves.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = json.loads(_exactly(trainer, LENGTH.unpack(_exactly(trainer, LENGTH.size))[0]))
    settings["warden"] = os.getpid()
    warden = Warden(trainer, settings, wake_read)
    try:
        problem = _preload(settings["parts"])
        if problem:
            warden.report({"fatal": problem})
            warden.flush()
        else:
            warden.serve()
    finally:
        warden.close()


def _preload(parts: list[dict[str, Any]]) -> str | None:
    """Import the heavy libraries of built-ins once, before forking; what is missing, in a sentence."""
    for part in parts:
        if part["name"] in PRELOAD:
            module, package = PRELOAD[part["name"]]
            try:
                importlib.import_module(module)
            except ImportError as error:
                return f"the reward {part['name']!r} needs {package}: pip install 'gspo[tasks]' ({error})"
    return None


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = channel.recv(size - len(data))
        if not chunk:
            sys.exit(0)  # the trainer went before it said anything
        data += chunk
    return data


def _next_dead() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def _bury(pid: int, patience_s: float = 1.0) -> None:
    """Collect a killed child; one that the kernel cannot end yet (blocked in a device) is left to it."""
    deadline = time.monotonic() + patience_s
    try:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
    except ChildProcessError:
        pass


def _signal(send: Any, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process that can be seen; nothing where there is no /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command, in parentheses, may hold anything; the parent is the second field after it.
                    yield int(name), int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent in _processes():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
