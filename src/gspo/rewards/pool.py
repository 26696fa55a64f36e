"""Rewards as the trainer sees them: hand in groups, get outcomes back; nothing hangs, nothing is invented.

Bounded built-ins are computed here and now, models and judges by their scorers (`scorer.py`); everything else goes to
worker processes through their supervisor (`warden.py`), which keeps scoring, and keeps its deadlines, while the trainer
does something else. A pool belongs to one thread.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gspo.errors import ConfigError, DataError, RewardError
from gspo.rewards.call import Pending, bind, call_sample
from gspo.rewards.functions.builtin import BUILTIN
from gspo.rewards.functions.scorer import SCORERS
from gspo.rewards.spec import RewardItem, RewardSpec, combine
from gspo.rewards.workers.worker import LENGTH
from gspo.types import Failure, Outcome

# Of one part: its results by sample, or what to ask for them once the group is wanted.
Results = list[Any] | Pending
_LOOK_S = 0.01  # between two looks at scorers that have not answered
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "import gspo.rewards.workers.supervisor as supervisor; supervisor.main(sys.argv[1])"
)


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
        silence_s: float = 15.0,
        log_path: str | Path | None = None,
        key: str = "reward",
    ):
        """`timeout_s` bounds each call from its own start; `memory_mb` bounds each worker (0: no bound);
        `silence_s` ends a supervisor that says nothing, though it should every second; `log_path` takes what reward
        code prints (None: our stderr); `key` is the config section named in messages."""
        if workers < 1:
            raise ConfigError(f"{key}.workers must be at least 1, got {workers}")
        if not timeout_s > 0:
            raise ConfigError(f"{key}.timeout must be positive, got {timeout_s}: without it a hung reward never ends")
        self._spec = spec
        self._key = key
        self._inline = [(i, bind(p.name, dict(p.kwargs))) for i, p in enumerate(spec) if p.inline]
        self._remote = [i for i, part in enumerate(spec) if not part.inline and not part.is_scorer]
        self._scorers = {i: SCORERS[p.name](**p.kwargs, key=key) for i, p in enumerate(spec) if p.is_scorer}
        self._log_path = log_path
        self._silence_s = silence_s
        self._startup_s = startup_s
        self._settings: dict[str, Any] = {
            "parts": [{"name": spec[i].name, "kwargs": dict(spec[i].kwargs)} for i in self._remote],
            "workers": workers,
            "timeout_s": float(timeout_s),
            "startup_s": float(startup_s),
            "memory_mb": memory_mb,
            "trainer": os.getpid(),
        }
        # Token ids are bulky; only user functions can ask for them.
        self._send_ids = any(spec[i].name not in BUILTIN for i in self._remote)
        self._jobs: dict[int, tuple[Hashable, int, dict[int, Results]]] = {}  # id -> key, samples, what is here already
        self._next_job = 0
        self._finished: deque[tuple[Hashable, int, dict[int, Results]]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._incoming = b""
        self._ready = False
        self._heard_at = 0.0
        if self._remote:
            self._start()

    def wait_ready(self) -> None:
        """Return when a worker has imported every function of the spec; ConfigError says which one it could not."""
        deadline = time.monotonic() + self._startup_s + 5.0
        while self._remote and not self._ready:
            if self._process is None:
                self._start()
            if not self._receive(min(1.0, deadline - time.monotonic())) and not self._ready:
                self._stop()
                raise RewardError(f"the reward workers ended before they were ready; see {self._log_path or 'stderr'}")
            if not self._ready and time.monotonic() > deadline:
                self._stop()
                raise RewardError(
                    f"{self._key}: no reward worker was ready after {self._startup_s:g} s; "
                    f"let the module of the reward function import less"
                )

    @property
    def has_workers(self) -> bool:
        """False where the spec consists of bounded built-ins, which need none."""
        return bool(self._remote)

    @property
    def outstanding(self) -> int:
        """Groups submitted whose outcomes have not been taken yet."""
        return len(self._jobs) + len(self._finished)

    def submit(self, key: Hashable, item: RewardItem) -> None:
        """Queue one group. Its outcomes come back from `completed` under `key`, in any order among groups."""
        self._submit([(key, item)])

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """Yield scored groups until nothing is outstanding or `deadline_s` seconds have passed (0: what is ready)."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            while (entry := next((e for e in self._finished if _is_ready(e[2])), None)) is not None:
                # Only here are scorers asked: all groups handed in are theirs by now.
                self._finished.remove(entry)
                yield entry[0], self._outcomes(*entry[1:])
            if not self.outstanding:
                return
            wait_s = 1.0 if deadline is None else deadline - time.monotonic()
            slice_s = max(0.0, min(_LOOK_S if self._finished else 1.0, wait_s))
            if not self._jobs:
                time.sleep(slice_s)
            else:
                alive = self._receive(slice_s)
                if not alive or time.monotonic() - self._heard_at > self._silence_s:
                    why = "the reward supervisor ended" if not alive else "the reward supervisor is stuck"
                    self._fail_outstanding(why)
            if wait_s <= 0 and not any(_is_ready(results) for _, _, results in self._finished):
                return

    def score(self, items: Sequence[RewardItem]) -> list[tuple[Outcome, ...]]:
        """Score groups and wait for all of them, in their order. Only for an otherwise idle pool."""
        if self.outstanding:
            raise RewardError(f"score() while {self.outstanding} submitted groups are outstanding; take them first")
        self._submit(list(enumerate(items)))
        outcomes = dict(self.completed())
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """End the workers, with everything they started. Outstanding groups are dropped."""
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
            plain = (item.prompt, item.completions, item.prompt_ids, item.completion_ids, dict(item.data))
            results: dict[int, Results] = {
                part: [call_sample(call, plain, s) for s in range(num)] for part, call in self._inline
            }
            results |= {part: scorer.start(item) for part, scorer in self._scorers.items()}
            if not self._remote or not num:
                self._finished.append((key, num, results))
                continue
            self._jobs[self._next_job] = (key, num, results)
            frames.append(self._frame(self._next_job, item))
            self._next_job += 1
        if frames and self._socket is not None:
            try:
                # One write for many groups; the supervisor always reads, so this waits only if it is stuck.
                self._socket.settimeout(self._silence_s)
                self._socket.sendall(b"".join(frames))
                self._heard_at = time.monotonic()
            except OSError:
                self._fail_outstanding("the reward supervisor took no more work")

    def _frame(self, job: int, item: RewardItem) -> bytes:
        prompt_ids, completion_ids = [], []
        if self._send_ids:
            prompt_ids = _plain_ids(item.prompt_ids)
            completion_ids = [_plain_ids(ids) for ids in item.completion_ids]
        try:
            payload = pickle.dumps((item.prompt, list(item.completions), prompt_ids, completion_ids, dict(item.data)))
        except Exception as error:
            raise DataError(
                f"a row of the data set holds a value that cannot be handed to a reward worker ({error}); "
                f"keep columns to numbers, strings, lists and mappings"
            ) from error
        frame = json.dumps({"job": job, "num": len(item.completions)}).encode() + b"\n" + payload
        return LENGTH.pack(len(frame)) + frame

    def _outcomes(self, num: int, results: dict[int, Results]) -> tuple[Outcome, ...]:
        outcomes: list[Outcome] = []
        known: dict[int, list[Any]] = {
            part: found.take() if isinstance(found, Pending) else found for part, found in results.items()
        }
        for sample in range(num):
            values = [known[part][sample] for part in range(len(self._spec))]
            failure = next((value for value in values if isinstance(value, tuple)), None)
            outcomes.append(combine(self._spec, values) if failure is None else Failure(failure[0], failure[1]))
        return tuple(outcomes)

    def _receive(self, timeout_s: float) -> bool:
        """Take in what the supervisor says within `timeout_s`; False when it has ended."""
        if self._socket is None:
            return False
        alive = True
        if select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            self._socket.setblocking(False)
            try:
                while chunk := self._socket.recv(1 << 20):
                    self._incoming += chunk
                    self._heard_at = time.monotonic()
                alive = False
            except BlockingIOError:
                pass
            except OSError:
                alive = False
        *lines, self._incoming = self._incoming.split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        return alive

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready = True
        elif "fatal" in message:
            if not self._ready:
                self._stop()
                raise ConfigError(f"{self._key}: {message['fatal']}")
        elif "job" in message and message["job"] in self._jobs:
            key, num, results = self._jobs.pop(message["job"])
            lost = ("infra", "a reward worker gave no value")  # replaced below for every sample that has one
            heard: dict[int, list[Any]] = {part: [lost] * num for part in self._remote}
            for part, sample, value in message["values"]:
                heard[self._remote[part]][sample] = value
            for sample, kind, text in message["failures"]:
                for part in self._remote:
                    heard[part][sample] = (kind, text)
            self._finished.append((key, num, {**results, **heard}))

    def _fail_outstanding(self, why: str) -> None:
        self._stop(patience_s=0.0)
        for key, num, _ in self._jobs.values():
            failed = [("infra", f"{why} before it answered")] * num
            self._finished.append((key, num, dict.fromkeys(range(len(self._spec)), failed)))
        self._jobs.clear()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        try:
            settings = json.dumps(self._settings).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._key}: the arguments of a reward must be plain values ({error})") from None
        # One thread each: workers share the machine with the trainer.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        log = open(self._log_path, "ab") if self._log_path else None  # noqa: SIM115 — closed below, after the child has it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log,
                env={**os.environ, **threads},
                start_new_session=True,  # a Ctrl-C in the terminal is the trainer's
            )
        finally:
            theirs.close()
            if log:
                log.close()
        mine.sendall(LENGTH.pack(len(settings)) + settings)
        self._socket, self._incoming, self._ready, self._heard_at = mine, b"", False, time.monotonic()

    def _stop(self, patience_s: float = 5.0) -> None:
        if self._socket is not None:
            self._socket.close()  # the supervisor sees the end, kills its workers and leaves
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)  # its workers die with it
                self._process.wait()
            self._process = None
        self._ready = False


def _is_ready(results: dict[int, Results]) -> bool:
    return all(found.ready() for found in results.values() if isinstance(found, Pending))


def _plain_ids(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
