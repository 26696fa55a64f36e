"""Score groups of completions: submit groups, take outcomes. Every wait has a timeout; a failure is never a reward.

Cheap built-ins are computed in this process, models and judges by their scorers (`call.Scorer`). Everything
else runs in worker processes under a supervisor (`workers/supervisor.py`), which continues while the trainer does other
work. A pool must be used from one thread.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from gspo.errors import ConfigError, DataError, RewardError
from gspo.rewards.call import HEARTBEAT_S, LENGTH, Pending, RewardItem, Scorer, bind, call_sample
from gspo.rewards.functions.builtin import BUILTIN, SCORERS
from gspo.rewards.spec import RewardSpec, combine
from gspo.system import await_killed, by_name
from gspo.types import Failure, Outcome

# Results of one part by sample, or a Pending to get them from when the group is taken.
Results = list[Any] | Pending
_POLL_S = 0.01  # interval for polling scorers that are not ready
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "import gspo.rewards.workers.supervisor as supervisor; supervisor.main(sys.argv[1])"
)


class _Job(NamedTuple):
    key: Hashable
    num: int  # samples
    results: dict[int, Results]  # by part, so far

    @property
    def is_ready(self) -> bool:
        return all(found.ready() for found in self.results.values() if isinstance(found, Pending))


class RewardPool:
    """Scores groups by a spec; see `submit`, `completed` and `score`.

    >>> from gspo.rewards.spec import reward_spec
    >>> with RewardPool(reward_spec({"name": "final", "marker": ">"})) as pool:
    ...     pool.score([RewardItem("1+1=", (">2", ">3"), data={"answer": "2"})])
    [(Score(value=1.0, parts={'final': 1.0}), Score(value=0.0, parts={'final': 0.0}))]
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        startup_s: float = 60.0,
        memory_mb: int = 4096,
        log_path: str | Path | None = None,
        key: str = "reward",
    ):
        """
        workers         worker processes
        timeout_s       limit of each call
        startup_s       limit for a worker to import the reward functions
        memory_mb       limit of each worker; 0: none
        log_path        file for the output of reward code; None: stderr
        key             config section named in messages
        """
        if workers < 1:
            raise ConfigError(f"{key}.workers must be at least 1, got {workers}")
        if not timeout_s > 0:
            raise ConfigError(f"{key}.timeout must be positive, got {timeout_s}; it ends reward functions that hang")
        self._spec = spec
        self._key = key
        # Three kinds of parts: cheap built-in functions run in this process, other functions in workers, and scorers
        # (models, services) have their own batching.
        self._inline = [(i, bind(p.name, dict(p.kwargs))) for i, p in enumerate(spec) if p.inline]
        self._remote = [i for i, part in enumerate(spec) if not part.inline and not part.is_scorer]
        self._scorers: dict[int, Scorer] = {
            i: by_name(SCORERS[p.name])(**p.kwargs, key=key) for i, p in enumerate(spec) if p.is_scorer
        }
        self._log_path = log_path
        # The supervisor sends a heartbeat every HEARTBEAT_S; one that sends nothing for longer than this is killed.
        self._silence_s = max(timeout_s, 0.5) + 0.5
        self._startup_s = startup_s
        self._settings: dict[str, Any] = {
            "parts": [
                {"name": spec[i].name, "kwargs": dict(spec[i].kwargs), "code": spec[i].code} for i in self._remote
            ],
            "workers": workers,
            "timeout_s": float(timeout_s),
            "startup_s": float(startup_s),
            "memory_mb": memory_mb,
            "trainer": os.getpid(),
            "has_log": log_path is not None,
        }
        # Token ids are large, and only user functions use them.
        self._send_ids = any(spec[i].name not in BUILTIN for i in self._remote)
        self._jobs: dict[int, _Job] = {}  # by number
        self._next_job = 0
        self._finished: deque[_Job] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._incoming = b""
        self._ready = False
        self._silent_s, self._last_poll = 0.0, 0.0  # seconds without a message; see `_receive`
        if self._remote:
            self._start()

    def wait_ready(self) -> None:
        """Return when a worker has imported every function of the spec; ConfigError if an import fails."""
        deadline = time.monotonic() + self._startup_s + 5.0
        while self._remote and not self._ready:
            if self._process is None:
                self._start()
            # Short waits: a fatal message raises in `_handle`, and the supervisor's end is noticed within a second.
            if not self._receive(min(1.0, deadline - time.monotonic())) and not self._ready:
                self._stop()
                raise RewardError(f"the reward supervisor ended during start-up; see {self._log_path or 'stderr'}")
            if not self._ready and time.monotonic() > deadline:
                self._stop()
                raise RewardError(
                    f"{self._key}: no reward worker was ready after {self._startup_s:g} s; importing the reward "
                    "function takes too long: move slow imports out of its module"
                )

    def check_functions(self) -> None:
        """Return when a worker has imported the user's functions; ConfigError if one is missing or its import fails.

        Built-in rewards are not waited for: their libraries are imported while the caller loads a model.
        """
        if self._send_ids:
            self.wait_ready()

    @property
    def outstanding(self) -> int:
        """Number of submitted groups that have not been taken yet."""
        return len(self._jobs) + len(self._finished)

    def submit(self, key: Hashable, item: RewardItem) -> None:
        """Queue one group. `completed` yields its outcomes with `key`; the order of groups is not defined."""
        self._submit([(key, item)])

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """Yield scored groups until none is outstanding, or for `deadline_s` seconds (0: only those that are ready)."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            while (job := next((job for job in self._finished if job.is_ready), None)) is not None:
                # Scorers compute here, when they have all submitted groups, so that they can batch them.
                self._finished.remove(job)
                yield job.key, self._outcomes(job)
            if not self.outstanding:
                return
            # Poll quickly while a finished group waits for its scorer; otherwise the socket wakes this loop.
            wait_s = 1.0 if deadline is None else deadline - time.monotonic()
            slice_s = max(0.0, min(_POLL_S if self._finished else HEARTBEAT_S, wait_s))
            if not self._jobs:
                time.sleep(slice_s)  # wait: 10 ms, the caller's deadline
            else:
                alive = self._receive(slice_s)
                if not alive or self._silent_s > self._silence_s:
                    why = "the reward supervisor ended" if not alive else "the reward supervisor hangs"
                    self._fail_outstanding(why)
            # The deadline has passed: groups that became ready in the last read are still yielded.
            if wait_s <= 0 and not any(job.is_ready for job in self._finished):
                return

    def score(self, items: Sequence[RewardItem]) -> list[tuple[Outcome, ...]]:
        """Score groups and return their outcomes in order. No other group may be outstanding."""
        if self.outstanding:
            raise RewardError(
                f"score() was called while {self.outstanding} submitted groups are outstanding; take them first"
            )
        self._submit(list(enumerate(items)))
        outcomes = dict(self.completed())
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """Stop the workers and all processes that they have started. Outstanding groups are dropped."""
        self._stop()
        for scorer in self._scorers.values():
            scorer.close()
        self._jobs.clear()
        self._finished.clear()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _submit(self, keyed: Sequence[tuple[Hashable, RewardItem]]) -> None:
        frames: list[bytes] = []
        if self._remote:
            self.wait_ready()
        for key, item in keyed:
            num = len(item.completions)
            results: dict[int, Results] = {
                part: [call_sample(call, item, s) for s in range(num)] for part, call in self._inline
            }
            # Scorers start before the workers finish, so both run at the same time.
            results |= {part: scorer.start(item) for part, scorer in self._scorers.items()}
            # Nothing for the workers to do.
            if not self._remote or not num:
                self._finished.append(_Job(key, num, results))
                continue
            self._jobs[self._next_job] = _Job(key, num, results)
            frames.append(self._frame(self._next_job, item))
            self._next_job += 1
        if frames and self._socket is not None:
            try:
                # One write for many groups. The supervisor always reads, so this blocks only if it hangs.
                self._socket.settimeout(self._silence_s)
                self._socket.sendall(b"".join(frames))
                self._silent_s, self._last_poll = 0.0, time.monotonic()
            except OSError:
                self._fail_outstanding("the reward supervisor accepted no more groups")

    def _frame(self, job: int, item: RewardItem) -> bytes:
        prompt_ids, completion_ids = [], []
        if self._send_ids:
            prompt_ids = _plain_ids(item.prompt_ids)
            completion_ids = [_plain_ids(ids) for ids in item.completion_ids]
        try:
            payload = pickle.dumps(
                RewardItem(
                    item.prompt, list(item.completions), prompt_ids, completion_ids, dict(item.data), item.reference
                )
            )
        except Exception as error:
            raise DataError(
                f"a row of the data set has a value that cannot be sent to a reward worker ({error}); "
                f"use numbers, strings, lists and mappings in columns"
            ) from error
        frame = json.dumps({"job": job, "num": len(item.completions)}).encode() + b"\n" + payload
        return LENGTH.pack(len(frame)) + frame

    def _outcomes(self, job: _Job) -> tuple[Outcome, ...]:
        outcomes: list[Outcome] = []
        known: dict[int, list[Any]] = {
            part: found.take() if isinstance(found, Pending) else found for part, found in job.results.items()
        }
        for sample in range(job.num):
            # One failed part fails the sample: a sum without that part would be a wrong reward.
            values = [known[part][sample] for part in range(len(self._spec))]
            failure = next((value for value in values if isinstance(value, tuple)), None)
            outcomes.append(combine(self._spec, values) if failure is None else Failure(failure[0], failure[1]))
        return tuple(outcomes)

    def _receive(self, timeout_s: float) -> bool:
        """Read messages of the supervisor for up to `timeout_s`; False if it has ended."""
        if self._socket is None:
            return False
        alive = True
        # wait: the caller's deadline, the trainer
        readable = select.select([self._socket], [], [], max(0.0, timeout_s))[0]
        # Silence counts while this process polls. Time in which it was busy or stopped (SIGSTOP, suspend) counts
        # as one second at most: the supervisor may have been stopped, too.
        before, self._last_poll = self._last_poll, time.monotonic()
        self._silent_s += min(self._last_poll - before, 1.0)
        if readable:
            self._socket.setblocking(False)
            try:
                while chunk := self._socket.recv(1 << 20):  # wait: none, the socket does not block
                    self._incoming += chunk
                    self._silent_s = 0.0
                alive = False
            except BlockingIOError:
                pass
            except OSError:
                alive = False
        *lines, self._incoming = self._incoming.split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return alive

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready = True
        # After the first worker was ready, the functions can be imported; a later failed start is not a config error.
        elif "fatal" in message:
            if not self._ready:
                self._stop()
                raise ConfigError(f"{self._key}: {message['fatal']}")
        elif "job" in message and message["job"] in self._jobs:
            job = self._jobs.pop(message["job"])
            missing = ("infra", "the reward worker sent no value")  # overwritten below
            by_part: dict[int, list[Any]] = {part: [missing] * job.num for part in self._remote}
            # The supervisor numbers only the parts that it was sent; `_remote` maps them to parts of the spec.
            for part, sample, value in message["values"]:
                by_part[self._remote[part]][sample] = value
            for sample, kind, text in message["failures"]:
                for part in self._remote:
                    by_part[part][sample] = (kind, text)
            self._finished.append(job._replace(results={**job.results, **by_part}))

    def _fail_outstanding(self, why: str) -> None:
        # No waiting: the supervisor has ended or hangs. `wait_ready` starts a new one for the next groups.
        self._stop(timeout_s=0.0)
        for job in self._jobs.values():
            failed = [("infra", f"{why} before it sent a result")] * job.num
            self._finished.append(job._replace(results=dict.fromkeys(range(len(self._spec)), failed)))
        self._jobs.clear()

    def _start(self) -> None:
        # The settings are checked before a process is started.
        mine, theirs = socket.socketpair()
        try:
            settings = json.dumps(self._settings).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._key}: arguments of a reward must be JSON values ({error})") from None
        # One thread per worker: the trainer needs the CPU, too.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        log = open(self._log_path, "a+b", buffering=0) if self._log_path else None  # noqa: SIM115 — closed below; the child has its own copy
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
            )
        finally:
            theirs.close()
            if log:
                log.close()
        mine.sendall(LENGTH.pack(len(settings)) + settings)
        self._socket, self._incoming, self._ready = mine, b"", False
        self._silent_s, self._last_poll = 0.0, time.monotonic()

    def _stop(self, timeout_s: float = 5.0) -> None:
        if self._socket is not None:
            self._socket.close()  # the supervisor notices it, kills its workers and ends
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(timeout_s)  # wait: timeout_s, SIGKILL
            except subprocess.TimeoutExpired:
                self._process.kill()  # the kernel kills its workers, too
                await_killed(self._process)
            self._process = None
        self._ready = False


def _plain_ids(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
