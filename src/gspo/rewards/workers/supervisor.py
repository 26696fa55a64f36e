"""The supervisor of the reward workers: a small process between the trainer and reward code that may hang.

It forks the workers (it imports little, so a replacement is ready in milliseconds), gives them groups to score, and
kills a worker and its process group when it is late. Every worker that starts or holds a job has a deadline on the
supervisor's own clock: half the timeout to read the job, then the timeout for each result. What the worker writes into
the clock page (worker.py) can only shorten it. Deadlines do not depend on the trainer, which may be busy for minutes.
When the trainer ends, the supervisor and all workers end.

Trainer → supervisor: frames of length + JSON line + pickled group; the supervisor does not unpickle the group.
Worker → supervisor → trainer: JSON lines only, so data from a process that ran user code is never unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from gspo.rewards.call import GRACE_S, HEARTBEAT_S, LENGTH
from gspo.rewards.functions.builtin import PRELOAD
from gspo.rewards.workers.worker import CLOCK, run_worker, set_clock
from gspo.system import adopt_orphans, descendants, describe_exit, install_command, kill, kill_group, own_children


@dataclass
class ScoringJob:
    """A group to score."""

    id: int
    num: int
    payload: bytes
    start: int = 0  # first call without a result
    retries: int = 0  # workers that died between calls or by an external signal
    unread: int = 0  # workers that did not read it in time
    values: list[tuple[int, int, float]] = field(default_factory=list)  # (part, sample, value)
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)  # sample -> (kind, message)

    def record(self, message: dict[str, Any], num_parts: int) -> None:
        """Store the result of one call; ValueError, KeyError or TypeError if it is not a result of worker.py."""
        part = _index(message["part"], num_parts)
        values = [(part, _index(sample, self.num), _finite(value)) for sample, value in message["values"]]
        failures = [(_index(sample, self.num), str(kind), str(text)) for sample, kind, text in message["failures"]]
        # A replacement worker would continue with the next call.
        self.start = _index(message["call"], num_parts * (self.num + 1)) + 1
        self.values += values
        for sample, kind, text in failures:
            self.failures.setdefault(sample, (kind, text))


@dataclass
class WorkerProcess:
    """A forked worker as the supervisor sees it."""

    pid: int
    channel: socket.socket
    page: mmap
    deadline: float  # on the supervisor's clock; inf while it is idle
    job: ScoringJob | None = None
    ready: bool = False
    has_read: bool = False  # whether it has read its job
    killed: bool = False  # by the supervisor, because a call exceeded its deadline
    corrupt: bool = False  # its channel delivered something other than the messages of worker.py
    incoming: bytes = b""
    outgoing: memoryview = memoryview(b"")  # noqa: RUF009 - immutable; the part of a job that its socket has not taken yet


def _index(value: Any, size: int) -> int:
    """A number in 0…size−1; ValueError for anything else that reward code wrote into the channel."""
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{value!r} is not a number below {size}")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a reward")
    return value


_KILL_S = 0.4  # for the end of everything that a worker has started
_MAX_LOG, _KEPT_LOG = 64 << 20, 1 << 20  # bytes of rewards.log, and how many of the last ones stay when it is longer


def next_dead() -> int | None:
    with contextlib.suppress(ChildProcessError):
        if found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return found.si_pid


def collect(pid: int, timeout_s: float = 1.0) -> None:
    """Wait for a killed child; give up if the kernel cannot end it yet (blocked in a device)."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # wait: a second or less, the supervisor


def kill_orphans(spare: Container[int]) -> None:
    """Kill orphans of dead workers; they have become children of this process, which is their subreaper."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:  # the children of a killed orphan become orphans in turn
        # One look at the process table for all orphans: there may be hundreds.
        orphans = [pid for pid in own_children() if pid not in spare]
        if not orphans:
            return
        kill_all([*descendants(*orphans), *orphans])
        for orphan in orphans:
            collect(orphan, deadline - time.monotonic())


def kill_worker(pid: int) -> None:
    """Kill a worker, its process group, and descendants that have left the group."""
    # Descendants first: they can be found by their parent's pid only while the parent exists.
    kill_all(descendants(pid))
    kill_group(pid)
    kill(pid)  # it may not have called setsid yet


def kill_all(pids: Sequence[int]) -> None:
    """Stop all of them before the first is killed, so that none can fork in between; then kill them."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def shorten_log(fd: int) -> None:
    """Keep only the end of a log that has become too long; reward code may print without end.

    The file is open for appending in every worker, so they continue at its new end.
    """
    size = os.fstat(fd).st_size
    if size > _MAX_LOG:
        kept = os.pread(fd, _KEPT_LOG, size - _KEPT_LOG)
        os.ftruncate(fd, 0)
        os.write(fd, f"[{size - len(kept)} bytes of output were removed: the log was too long]\n".encode() + kept)


def describe_status(status: int) -> str:
    """How a worker ended, in words."""
    return describe_exit(status) + (" (out of memory?)" if status == -signal.SIGKILL else "")


POLL_S = 0.05
MARGIN_S = 0.1  # what the supervisor's own deadline adds to the one that a worker reports
# Signals that a scheduler sends to every process of a job: the call is retried and not counted as a crash.
_EXTERNAL = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
_MAX_RETRIES = 3
_LONGEST_LINE = 16 << 20  # bytes of one message of a worker


class Supervisor:
    """All state of the supervisor process; one thread, one selector."""

    def __init__(self, trainer: socket.socket, settings: dict[str, Any], wake_fd: int):
        self.trainer = trainer
        self.settings = settings
        self.workers: dict[int, WorkerProcess] = {}
        self.queue: deque[ScoringJob] = deque()
        self.failed_starts = 0
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.selector = selectors.DefaultSelector()
        self.last_sent = time.monotonic()
        trainer.setblocking(False)
        self.selector.register(trainer, selectors.EVENT_READ)
        # Longest time between two results of a worker that has read its job.
        self.call_s = settings["timeout_s"] + GRACE_S + MARGIN_S
        self.wake_fd = wake_fd  # readable after SIGCHLD, so that the death of a worker is noticed at once
        self.selector.register(wake_fd, selectors.EVENT_READ)

    def serve(self) -> None:
        for _ in range(self.settings["workers"]):
            self.spawn()
        # The parent's pid changes when the trainer ends, even if another process still holds the trainer's end of the
        # socket.
        while os.getppid() == self.settings["trainer"]:
            # A deadline passes without an event, so the loop polls quickly while a worker may exceed one, and slowly
            # otherwise.
            # wait: 0.5 s, the supervisor
            events = self.selector.select(POLL_S if any(w.job or not w.ready for w in self.workers.values()) else 0.5)
            for key, _ in events:
                if key.fileobj is self.trainer:
                    if not self.read_trainer():
                        return
                elif key.fileobj == self.wake_fd:
                    os.read(self.wake_fd, 4096)  # wait: none, the selector has reported a signal
                elif key.data in self.workers:
                    self.read_worker(self.workers[key.data])
                    self.write_worker(self.workers[key.data])
            # Results are read first, so a call that has just finished is not killed. Workers that were killed here are
            # collected by `reap`, and `dispatch` uses the replacements.
            self.check_clocks()
            self.reap()
            self.dispatch()
            self.flush()
            if self.settings["has_log"]:
                shorten_log(1)

    def spawn(self) -> None:
        # An anonymous mmap is shared with the child after fork: both processes see the clock page.
        mine, theirs = socket.socketpair()
        page = mmap(-1, 4096)
        set_clock(page, 0.0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The worker closes the descriptors that it inherited. User code must not reach the trainer's socket or
                # the channels of other workers, and a copy of a channel would delay its end of file.
                self.trainer.close()
                self.selector.close()
                mine.close()
                for other in self.workers.values():
                    other.channel.close()
                run_worker(theirs, page, self.settings["parts"], self.settings)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                # os._exit skips atexit handlers and buffers that belong to the supervisor.
                os._exit(code)
        theirs.close()
        mine.setblocking(False)
        self.workers[pid] = WorkerProcess(pid, mine, page, time.monotonic() + self.settings["startup_s"])
        self.selector.register(mine, selectors.EVENT_READ, pid)

    def read_trainer(self) -> bool:
        """Read new jobs; False if the trainer has ended."""
        try:
            while chunk := self.trainer.recv(1 << 20):  # wait: none, the socket does not block
                self.incoming += chunk
            return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        # Take complete frames out of the buffer; an incomplete one stays until more bytes arrive.
        position = 0
        while position + LENGTH.size <= len(self.incoming):
            (size,) = LENGTH.unpack_from(self.incoming, position)
            if position + LENGTH.size + size > len(self.incoming):
                break
            frame = bytes(self.incoming[position + LENGTH.size : position + LENGTH.size + size])
            line, _, payload = frame.partition(b"\n")
            header = json.loads(line)
            self.queue.append(ScoringJob(header["job"], header["num"], payload))
            position += LENGTH.size + size
        del self.incoming[:position]
        return True

    def read_worker(self, worker: WorkerProcess) -> None:
        try:
            # At most 1 MB at a time: a worker that never stops writing must not occupy the supervisor.
            for _ in range(16):
                chunk = worker.channel.recv(1 << 16)  # wait: none, the socket does not block
                if not chunk:
                    # The worker's end is closed. Without a reader the selector would report it again and again.
                    self.watch(worker, 0)
                    break
                worker.incoming += chunk
        except OSError:
            pass
        if len(worker.incoming) > _LONGEST_LINE and b"\n" not in worker.incoming:
            worker.corrupt, worker.incoming = True, b""
            kill_worker(worker.pid)
        # The part after the last newline is an incomplete line; it stays in the buffer.
        *lines, worker.incoming = worker.incoming.split(b"\n")
        for line in lines:
            if worker.corrupt:
                return
            try:
                self.receive(worker, json.loads(line))
            except (
                ValueError,
                KeyError,
                TypeError,
                RecursionError,
            ):  # reward code wrote into the channel: ignore the rest
                worker.corrupt = True
                kill_worker(worker.pid)

    def receive(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "fatal" in message:
            self.send(message)
        elif "ready" in message:
            worker.ready, worker.deadline, self.failed_starts = True, math.inf, 0
            self.send({"ready": worker.pid})
        # No job is open on this worker, so there is no result to store.
        elif (job := worker.job) is None:
            return
        elif "done" in message:
            worker.job, worker.deadline = None, math.inf
            self.finish(job)
        else:
            # One call has finished; the next result has its own time.
            job.record(message, len(self.settings["parts"]))
            worker.deadline = time.monotonic() + self.call_s

    def check_clocks(self) -> None:
        now = time.monotonic()
        for worker in self.workers.values():
            reported, job = CLOCK.unpack_from(worker.page)[:2]
            if worker.job is not None and job == worker.job.id and not worker.has_read:
                worker.has_read, worker.deadline = True, now + self.call_s
            if (now > worker.deadline or 0 < reported < now) and not worker.killed:
                worker.killed = True
                kill_worker(worker.pid)

    def reap(self) -> None:
        """Collect dead workers, kill what they left behind, fail or retry their jobs, and start replacements."""
        # WNOWAIT: the pid, which is the group's number too, is not reused until the group has been killed.
        while dead := next_dead():
            worker = self.workers.pop(dead, None)
            if worker is None:
                # wait: none, waitid has reported the child
                os.waitpid(dead, 0)  # an orphan that reward code left behind and that has ended
                continue
            # The worker itself is dead; this kills the rest of its process group.
            kill_worker(dead)
            status = os.waitstatus_to_exitcode(os.waitpid(dead, 0)[1])  # wait: none, waitid has reported the child
            # Results that the worker wrote before it died are still in the socket's buffer.
            self.read_worker(worker)
            self.watch(worker, 0)
            worker.channel.close()
            # Processes that left the group have become orphans of this process by now.
            kill_orphans(spare=self.workers)
            # Before the page is closed: the page shows which call was running.
            self.settle(worker, status)
            worker.page.close()
            if self.failed_starts < _MAX_RETRIES:
                self.spawn()

    def settle(self, worker: WorkerProcess, status: int) -> None:
        """Decide what the death of a worker means for its job: a failure, a retry, or nothing."""
        reported, job_id, call, sample, part = CLOCK.unpack_from(worker.page)
        job = worker.job
        # A start that fails repeatedly has a permanent cause; the trainer is told when no worker is left.
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts >= _MAX_RETRIES and not self.workers:
                why = f"took longer than {self.settings['startup_s']:g} s" if worker.killed else describe_status(status)
                self.send({"fatal": f"the reward workers did not start ({_MAX_RETRIES} attempts); the last one {why}"})
        if job is None:
            return
        if worker.corrupt:
            self.abandon(job, "reward code wrote into the channel between its worker and the supervisor")
            return
        # A call of this job has begun, and its result has not been received. Without a deadline in the page the call
        # has returned; if its result did not come in time, it counts as late all the same.
        running = job_id == job.id and call >= job.start and (reported != 0.0 or worker.killed)
        if running and (worker.killed or -status not in _EXTERNAL):
            kind = "timeout" if worker.killed else "crash"
            text = f"its process {describe_status(status)}"
            if worker.killed:
                text = f"no result after {self.settings['timeout_s']:g} s"
            # sample < 0: the call scored the whole group, so all of its samples fail.
            name = self.settings["parts"][part]["name"] if part >= 0 else self.names()
            for index in range(job.num) if sample < 0 else (sample,):
                job.failures.setdefault(index, (kind, f"{name}: {text}"))
            # The call that hung or crashed is not repeated: it would probably fail again.
            job.start = call + 1
        elif worker.killed and job_id != job.id:
            # The worker was blocked before it read the job, so this group is not the cause. Another worker gets the
            # job once; both waits together take the timeout.
            job.unread += 1
        else:
            # No call was running, or a signal from outside ended it: the reward code is not the cause, so the job is
            # retried.
            job.retries += 1
        if job.unread > 1:
            self.abandon(
                job,
                f"two workers did not read the group within {self.settings['timeout_s']:g} s; a thread that an "
                "earlier call left behind may block them",
            )
        elif job.retries > _MAX_RETRIES:
            self.abandon(
                job, f"its worker died {job.retries} times between calls; the last one {describe_status(status)}"
            )
        # Every sample has failed already, so the remaining calls cannot change the result.
        elif len(job.failures) == job.num:
            self.finish(job)
        else:
            # At the front: the job has waited longer than the others.
            self.queue.appendleft(job)

    def dispatch(self) -> None:
        if not self.workers:  # no worker can be started: fail the jobs instead of keeping the trainer waiting
            while self.queue:
                self.abandon(self.queue.popleft(), "no reward worker could be started")
        for worker in self.workers.values():
            if self.queue and worker.ready and worker.job is None and not worker.killed:
                worker.job = job = self.queue.popleft()
                worker.has_read = False
                # The time of the whole wait, whatever the worker reports.
                worker.deadline = time.monotonic() + self.settings["timeout_s"] / 2
                content = {"id": job.id, "start": job.start, "num": job.num, "failed": list(job.failures)}
                frame = json.dumps(content).encode() + b"\n" + job.payload
                worker.outgoing = memoryview(LENGTH.pack(len(frame)) + frame)
                self.write_worker(worker)

    def write_worker(self, worker: WorkerProcess) -> None:
        """Send what the socket takes without blocking: a worker that does not read must not delay the others."""
        try:
            while worker.outgoing:
                worker.outgoing = worker.outgoing[worker.channel.send(worker.outgoing) :]
        except BlockingIOError:
            self.watch(worker, selectors.EVENT_READ | selectors.EVENT_WRITE)
            return
        except OSError:
            # A frame that was sent in part makes the channel unusable. `reap` settles the job.
            worker.outgoing = memoryview(b"")
            kill_worker(worker.pid)
        self.watch(worker, selectors.EVENT_READ)

    def watch(self, worker: WorkerProcess, events: int) -> None:
        """Events of a worker's channel that wake the loop; 0: none, for good."""
        known = self.selector.get_map().get(worker.channel)
        if known is None or known.events == events:
            return
        if events:
            self.selector.modify(worker.channel, events, worker.pid)
        else:
            self.selector.unregister(worker.channel)

    def abandon(self, job: ScoringJob, why: str) -> None:
        for index in range(job.num):
            job.failures.setdefault(index, ("infra", f"{self.names()}: {why}"))
        self.finish(job)

    def finish(self, job: ScoringJob) -> None:
        failures = [(sample, *failure) for sample, failure in job.failures.items()]
        self.send({"job": job.id, "values": job.values, "failures": failures})

    def send(self, message: dict[str, Any]) -> None:
        self.outgoing += json.dumps(message).encode() + b"\n"

    def flush(self) -> None:
        """Send as much as the socket takes without blocking; a heartbeat if there was nothing to send."""
        now = time.monotonic()
        if not self.outgoing and now - self.last_sent > HEARTBEAT_S:
            self.send({"alive": True})
        try:
            # A trainer that is busy does not read. The rest stays in `outgoing`, and the supervisor keeps checking
            # deadlines.
            while self.outgoing:
                del self.outgoing[: self.trainer.send(self.outgoing[: 1 << 18])]
                self.last_sent = now
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()  # the trainer has ended; the next read notices it

    def names(self) -> str:
        return "+".join(part["name"] for part in self.settings["parts"])

    def close(self) -> None:
        # Kill all workers before waiting for any of them, so that the waits overlap.
        for worker in self.workers.values():
            kill_worker(worker.pid)
        for worker in self.workers.values():
            collect(worker.pid)
        self.workers.clear()
        kill_orphans(spare=self.workers)


def main(fd: str) -> None:
    """Entry point of the supervisor process; `fd` is its end of the socket to the trainer."""
    trainer = socket.socket(fileno=int(fd))
    # The trainer handles Ctrl-C and the scheduler's signals, and needs rewards until it has saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # A signal writes one byte into this pipe, which wakes the selector.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # As a subreaper this process becomes the parent of orphans, so `kill_orphans` can find them.
    adopt_orphans()
    settings = json.loads(_exactly(trainer, LENGTH.unpack(_exactly(trainer, LENGTH.size))[0]))
    settings["supervisor"] = os.getpid()
    supervisor = Supervisor(trainer, settings, wake_read)
    try:
        # Before the first fork: workers share the imported modules and start without importing them again.
        problem = _preload(settings["parts"])
        if problem:
            supervisor.send({"fatal": problem})
            supervisor.flush()
        else:
            supervisor.serve()
    finally:
        supervisor.close()


def _preload(parts: list[dict[str, Any]]) -> str | None:
    """Import the libraries of built-in rewards once, before forking; returns an error message, or None."""
    for part in parts:
        if part["name"] in PRELOAD:
            module, package, extra = PRELOAD[part["name"]]
            try:
                importlib.import_module(module)
            except ImportError as error:
                return f"the reward {part['name']!r} needs {package}: {install_command(extra)} ({error})"
    return None


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        # wait: none, end of file when the trainer dies, which kills a silent supervisor
        chunk = channel.recv(size - len(data))
        if not chunk:
            sys.exit(0)  # the trainer ended before it sent its settings
        data += chunk
    return data
