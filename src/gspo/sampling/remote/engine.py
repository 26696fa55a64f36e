"""A sampler for trainers in other processes: the calls that its server answers, and which trainer is the newest.

A server works for the trainer with the highest number. The wall clock has no part in it, because a clock may step back
between two trainers while the servers live on. Torch-free.

One thread drives the sampler and answers calls between two tokens. Every call is short: /generate queues requests,
/collect returns finished samples, /load_weights reads new weights in the background and applies them between two
tokens. Calls may be repeated, which is what a client does after a lost reply: a known request is not sampled twice, a
finished sample is kept until its receipt is confirmed, a loaded version is not loaded again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from gspo.errors import WeightSyncError
from gspo.faults import reached
from gspo.sampling.api import Sampler
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.sampling.remote import protocol as wire
from gspo.sampling.weights.load import ScoreSequences, fetch_weights
from gspo.system import RefusedCallError, atomic_write, finished
from gspo.types import Sample, SampleId

FILE = "session"  # in the folder of the registrations
_DIGITS, _LIMIT = 20, 10**19  # a higher number would leave none for the next trainer


def session_order(session: str) -> tuple[int, str]:
    """The key by which sessions are compared. An id without a number is older than every other.

    >>> session_order("00000000000000000007-ab") < session_order("10-cd"), session_order("zz")
    (True, (0, 'zz'))
    """
    text = session.partition("-")[0]
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 0
    return number if number < _LIMIT else 0, session


class Session:
    """The id of one trainer. Its threads share it."""

    def __init__(self, folder: Path) -> None:
        self._file, self._lock = folder / FILE, threading.Lock()  # wait: none, held for a file of 20 bytes
        self._suffix = secrets.token_hex(4)
        self._take(self._newest() + 1)

    @property
    def id(self) -> str:
        return f"{self._number:0{_DIGITS}d}-{self._suffix}"

    def outbid(self, other: str) -> bool:
        """Take a number above that of the session `other`, which a server works for. False if a newer trainer exists.

        The file decides which trainer is the newest. A server may know a higher number if the file was lost, or from a
        trainer of an earlier version, which took its number from the clock.
        """
        with self._lock:
            if self._newest() > self._number:
                return False
            number = session_order(other)[0]
            if number >= _LIMIT - 1:
                return False
            if number >= self._number:
                self._take(number + 1)
            return True

    def _newest(self) -> int:
        try:
            return session_order(self._file.read_text(encoding="ascii")[:64].strip())[0]
        except (OSError, ValueError):
            return 0

    def _take(self, number: int) -> None:
        self._number = number
        # If it cannot be written, servers that know a higher number are outbid one by one.
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._file) as tmp:
                tmp.write_text(str(number), encoding="ascii")


SLICE_S = 0.05  # the sampler decodes this long before it runs queued calls
LONGEST_WAIT_S = 10.0  # of a call that waits for samples or for the sampler
SCORE_S = 120.0  # for one sequence of /score
PER_REPLY, REPLY_BYTES = 512, 64 * 2**20  # most samples in a reply, and most bytes of samples (roughly)


class SamplerEngine:
    """A sampler, the thread that drives it, and the samples whose receipt is not confirmed yet.

    identity   what is served (model, seed, …); the client compares it with its own
    score      computes log-probs of given tokens, to verify new weights, and for /score
    vocabulary token → id of the model's tokenizer, for /vocabulary
    load       loads (version, path, sha256) if another process reads the published file; default: this one reads it
    latency_s  sleep at every token: a slow sampler for measurements
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        identity: Mapping[str, Any],
        score: ScoreSequences | None = None,
        vocabulary: Mapping[str, int] | None = None,
        load: Callable[[int, str, str], None] | None = None,
        latency_s: float = 0.0,
    ) -> None:
        self.boot = secrets.token_hex(8)  # of this start: after a restart there are neither weights nor requests
        self.identity, self._score, self._load_file, self._latency_s = dict(identity), score, load, latency_s
        self._sampler, self._vocabulary = sampler, vocabulary
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # wait: none, held for dictionary operations
        self._lock = threading.Lock()  # for state that both the event loop and the sampler's thread change
        self._changed: Future[None] = Future()  # replaced when it is done
        self._session = ""
        self._loaded: tuple[int, str] | None = None  # version and sha256 of verified weights
        self._loading: tuple[tuple[int, str], Future[Any]] | None = None
        self._running: dict[SampleId, str] = {}  # sample → its key
        self._finished: dict[str, Sample] = {}
        self._failure: str | None = None
        self._closed = False
        self._turns = 0
        self._view: dict[str, Any] = dict(sampler.health())
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    async def attach(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A trainer takes over this server, which drops the requests and samples of the trainer before."""
        session = wire.field(body, "session", str)

        def take() -> None:
            # An older trainer must not take the server back. The reply has the holder's id, so that a trainer whose
            # run has lost its count can take a higher number.
            if session_order(session) < session_order(self._session):
                raise RefusedCallError(409, "session", "a newer trainer has taken this server", session=self._session)
            # The sampler returns to its initial state, whatever the earlier trainer left.
            self._sampler.abort()
            self._sampler.wake()
            self._sampler.resume()
            with self._lock:
                # A trainer that attaches again after a lost connection keeps its weights.
                if session != self._session:
                    self._loaded = None  # weights of another run
                self._session, self._failure = session, None
                self._running.clear()
                self._finished.clear()

        await self._ask(take)
        return {"facts": self.identity, **self.state()}

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Queue requests, each under a key that the client chose; a known key is skipped."""
        self._of_session(body)
        requests = {}
        # Parsed in the event loop: the sampler's thread should spend its time on sampling.
        for item in wire.field(body, "requests", list):
            key = wire.field(item, "key", str) if isinstance(item, dict) else ""
            requests[key] = wire.unpack_request(item)

        def submit() -> int:
            # Checked again: another trainer may have attached while this call was queued.
            self._of_session(body)
            if self._loaded is None:
                raise RefusedCallError(409, "weights", "no verified weights yet: load a version first")
            # A repeated call may contain requests that are running or finished: they are not sampled twice.
            with self._lock:
                known = {*self._running.values(), *self._finished}
                fresh = {key: request for key, request in requests.items() if key not in known}
            # The sampler returns samples by id, so an id must belong to one key.
            ids = [request.id for request in fresh.values()]
            if len({*ids}) != len(ids) or any(id in self._running for id in ids):
                raise RefusedCallError(409, "twice", "two outstanding requests have the same sample id")
            self._sampler.submit(list(fresh.values()))
            # Only after submit() has accepted them.
            self._running |= {request.id: key for key, request in fresh.items()}
            return len(fresh)

        return {"accepted": await self._ask(submit), **self.state()}

    async def collect(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Finished samples, after a short wait for the first; those confirmed in `received` are dropped."""
        self._of_session(body)
        received = wire.field(body, "received", list)
        deadline = time.monotonic() + _wait(body)
        with self._lock:
            for key in received:
                self._finished.pop(key, None)
        while True:
            changed = self._changed  # read first: a sample that finishes after this line completes it
            if self._finished or self._failure or self._closed or not self._running:
                break
            if not await finished(changed, deadline - time.monotonic()):
                break
        with self._lock:
            samples = dict(list(self._finished.items())[:PER_REPLY])
            failure, self._failure = self._failure, None
        reached("sampler.collect")
        packed = ({"key": key, "sample": wire.pack_sample(sample)} for key, sample in samples.items())
        first = next(wire.portions(packed, PER_REPLY, REPLY_BYTES), [])  # the others come with the next call
        return {"samples": first, "failure": failure, **self.state()}

    async def abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Abort the outstanding requests; their partial samples are collected like finished ones."""
        self._of_session(body)

        def abort() -> None:
            # Checked again: another trainer may have attached while this call was queued.
            self._of_session(body)
            partial = self._sampler.abort()
            for sample in partial:
                self._finish(sample)

        await self._ask(abort)
        return self.state()

    async def order(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """pause, resume, sleep, wake."""
        self._of_session(body)
        await self._ask(getattr(self._sampler, what))
        return self.state()

    async def load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load a published version completely or not at all; the client calls again until `loading` is false.

        A thread reads the file and compares its sha256, while sampling continues with the current weights.
        """
        self._of_session(body)
        version, sha256 = wire.field(body, "version", int), wire.field(body, "sha256", str)
        path, probe = wire.field(body, "path", str), wire.field(body, "probe", list)
        wanted = version, sha256
        with self._lock:
            # Versions only grow: a delayed call must not bring old weights back.
            if self._loaded is not None and wanted != self._loaded and version <= self._loaded[0]:
                raise RefusedCallError(409, "stale", f"version {version} is not newer than {self._loaded[0]}")
            # One load at a time. A repeated call for the same version waits for the load that is under way.
            if self._loading is None or (self._loading[0] != wanted and self._loading[1].done()):
                job: Future[Any] = Future()
                self._loading = wanted, job
                threading.Thread(target=self._load, args=(job, body, wanted, path, probe), daemon=True).start()
            current, job = self._loading
        if not await finished(job, _wait(body)):
            return {"loading": True, **self.state()}
        with self._lock:
            if self._loading is not None and self._loading[1] is job:
                self._loading = None
        if current != wanted:  # the load that ended was for another weight version
            return {"loading": True, **self.state()}
        return {"loading": False, "probe": job.result(0), **self.state()}  # wait: 0 s, the reply has arrived

    async def score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Log-probs of every token but the first of given sequences: the server is the teacher of a distillation.

        By the weights that it was started with, so a server whose weights a trainer changes refuses.
        """
        sequences = wire.unpack_rows(body, "sequences", "<i4")
        num_vocab, longest = (self.identity.get(name, 2**31) for name in ("num_vocab", "max_context"))
        for tokens in sequences:
            if not 2 <= len(tokens) <= longest or tokens.min() < 0 or tokens.max() >= num_vocab:
                raise wire.WireError(
                    f"a sequence to score has 2 to {longest} tokens from 0 to {num_vocab - 1}, got {len(tokens)} tokens"
                )

        def one(tokens: list[int]) -> Any:
            if self._session or self._score is None:
                raise RefusedCallError(
                    409, "session", "this server samples for a trainer, which changes its weights: start another one"
                )
            return self._score([tokens])[0]

        # One at a time: between two of them the sampler's thread takes other calls.
        rows = [await self._ask(partial(one, tokens.tolist()), SCORE_S) for tokens in sequences]
        return {"logp": wire.pack_rows(rows, "<f4"), **self.state()}

    async def vocabulary(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"vocabulary": self._vocabulary}

    def state(self) -> dict[str, Any]:
        """The sampler's thread updates these values, so they can be read while it is busy or stuck."""
        version, sha256 = self._loaded or (None, None)
        return {"boot": self.boot, "version": version, "sha256": sha256, "turns": self._turns}

    def health(self) -> dict[str, Any]:
        with self._lock:
            counts = {"outstanding": len(self._running), "unconfirmed": len(self._finished)}
        return {**self.state(), **counts, "pid": os.getpid(), "session": self._session, "sampler": self._view}

    def close(self) -> None:
        self._closed = True
        self._notify()
        # An empty call wakes the thread if it waits for calls.
        self._queue(lambda: None)
        self._thread.join(timeout=10)  # wait: 10 s, the server

    def _run(self) -> None:
        looked = 0.0
        while not self._closed:
            # A paused or sleeping sampler does not decode, so the thread waits for calls.
            idle = not self._running or bool(self._view.get("paused") or self._view.get("asleep"))
            ran_any = self._run_calls(wait=idle)
            if not idle:
                self._decode()
            # Without calls, health() is read every 0.2 s and not after each slice of decoding.
            if ran_any or idle or time.monotonic() - looked > 0.2:
                self._view, looked = dict(self._sampler.health()), time.monotonic()

    def _run_calls(self, wait: bool) -> bool:
        """Run the queued calls; returns whether there were any."""
        ran_any = False
        while True:
            try:
                # Wait only for the first call, and only if there is nothing to decode.
                # wait: 0.5 s, the sampling thread
                call, reply = self._calls.get(timeout=0.5) if wait and not ran_any else self._calls.get_nowait()
            except queue.Empty:
                return ran_any
            ran_any = True
            if not reply.set_running_or_notify_cancel():
                continue  # the client has disconnected, or was told that the sampler is busy
            try:
                reply.set_result(call())
            # The caller gets every error: the thread must survive.
            except BaseException as error:
                reply.set_exception(error)

    def _decode(self) -> None:
        try:
            samples = list(self._sampler.completed(0.0 if self._latency_s else SLICE_S))
            if samples:  # the counters must include the samples that a client can already collect
                self._view = dict(self._sampler.health())
            for sample in samples:
                self._finish(sample)
        except Exception as error:  # the server survives a failing model and reports the failure
            with contextlib.suppress(Exception):
                # Drop the outstanding requests: the client submits them again after the reported failure.
                self._sampler.abort()
            with self._lock:
                self._running.clear()
                self._failure = f"{type(error).__name__}: {error}"
            self._notify()
        # Clients see from this counter that the thread makes progress.
        self._turns += 1
        if self._latency_s:
            time.sleep(self._latency_s)  # wait: the delay of --latency, the sampling thread

    def _finish(self, sample: Sample) -> None:
        with self._lock:
            # No key: the request was dropped by another trainer's attach.
            key = self._running.pop(sample.id, None)
            if key is not None:
                self._finished[key] = sample
        self._notify()

    def _notify(self) -> None:
        """Wake the calls that wait for samples."""
        with self._lock:
            # Replaced before it completes: a waiter that starts now waits for the next change.
            changed, self._changed = self._changed, Future()
        # Outside the lock, as callbacks of the future run here.
        changed.set_result(None)

    def _load(
        self, job: Future[Any], body: Mapping[str, Any], wanted: tuple[int, str], path: str, probe: Sequence[Any]
    ) -> None:
        # A random suffix: all processes of this server take part in the same broadcast.
        path = f"{path}#{secrets.token_hex(8)}" if path.startswith(collective.SCHEME) else path
        try:
            load = None
            # If the version is loaded already, only the probe is computed again.
            if self._loaded != wanted:
                if self._load_file is None:
                    load = partial(self._sampler.load_weights, wanted[0], fetch_weights(path, wanted[1]).items())
                else:
                    load = partial(self._load_file, wanted[0], path, wanted[1])
            reached("sampler.load")
            # Weights are applied by the sampler's thread, between two tokens.
            # wait: none, the trainer's rollout.request_timeout
            job.set_result(self._queue(partial(self._take, body, wanted, load, probe)).result())
        except BaseException as error:
            job.set_exception(error)

    def _take(
        self, body: Mapping[str, Any], wanted: tuple[int, str], load: Callable[[], None] | None, probe: Sequence[Any]
    ) -> list[list[float]] | None:
        # Another trainer may have attached during the read.
        self._of_session(body)
        if load is not None:
            # During the load there are no verified weights; an unexpected error leaves it so.
            before, self._loaded = self._loaded, None
            try:
                load()
            except WeightSyncError:
                self._loaded = before  # the check failed before anything was written: the old weights are intact
                raise
            self._loaded = wanted
        if self._score is None:
            return None
        return [row.astype(float).tolist() for row in self._score(probe)]

    def _queue(self, call: Callable[[], Any]) -> Future[Any]:
        """Have the sampler's thread call it, unless the future is cancelled before."""
        reply: Future[Any] = Future()
        self._calls.put((call, reply))
        return reply

    async def _ask(self, call: Callable[[], Any], wait_s: float = LONGEST_WAIT_S) -> Any:
        reply = self._queue(call)
        try:
            if not await finished(reply, wait_s):
                raise RefusedCallError(408, "busy", f"the sampler was busy for {wait_s:g} s")
            return reply.result(0)  # wait: 0 s, the reply has arrived
        finally:
            # A call that timed out must not run later: the client repeats it.
            reply.cancel()

    def _of_session(self, body: Mapping[str, Any]) -> None:
        if not self._session or wire.field(body, "session", str) != self._session:
            raise RefusedCallError(
                409, "session", "this server belongs to another trainer, or to none yet: attach first"
            )


def _wait(body: Mapping[str, Any]) -> float:
    return min(max(float(wire.field(body, "wait_s", (int, float))), 0.0), LONGEST_WAIT_S)
