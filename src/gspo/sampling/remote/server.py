"""The HTTP face of a sampler: any `engine.Sampler` behind a small JSON interface, for trainers in other processes.

One thread drives the sampler; everything else asks it between two tokens. Every call is short: work is handed in with
/generate and fetched with /collect, new weights are loaded aside and taken between two tokens. Calls may be repeated,
which is what a client does after a lost reply: a known request is not sampled twice, a finished sample is kept until
its receipt is confirmed, a loaded version is not loaded again.

Loopback and a token by default: docs/samplers.md says what is checked before a body is read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from gspo.errors import ConfigError, DataError, WeightSyncError
from gspo.faults import reached
from gspo.sampling.api import Sampler
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.sampling.remote import protocol as wire
from gspo.sampling.weights.load import fetch
from gspo.sampling.weights.probe import ScoreSequences
from gspo.system.http import GuardedHandler, GuardedServer, RefusedCallError
from gspo.system.launched import MIN_TOKEN_CHARS, TOKEN
from gspo.types import Sample, SampleId

MAX_BODY = 256 * 2**20  # a batch of 10⁴ requests with prompts of 10³ tokens takes 50 MB
SLICE_S = 0.05  # how long the sampler decodes before it looks for calls
LONGEST_WAIT_S = 10.0  # of a call that waits for news
PER_REPLY, REPLY_BYTES = 512, 64 * 2**20  # samples of a reply, and about their bytes
CONNECTIONS = 128
IDLE_S = 3600.0  # a trainer's connection may be silent between two steps


class SamplerEngine:
    """A sampler, its one thread, and what of its work is not confirmed yet.

    `identity` says what it is (model, seed, …), for the client to compare. `score` gives log-probs of given tokens, to
    verify new weights. `load` takes (version, path, sha256) where another process reads the published file; without it
    the file is read here. `latency_s` is slept at every token: a slow sampler for measurements.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        identity: Mapping[str, Any],
        score: ScoreSequences | None = None,
        load: Callable[[int, str, str], None] | None = None,
        latency_s: float = 0.0,
    ) -> None:
        self.boot = secrets.token_hex(8)  # another one: this server has started anew and knows nothing
        self.identity, self._score, self._load_file, self._latency_s = dict(identity), score, load, latency_s
        self._sampler = sampler
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._session = ""
        self._loaded: tuple[int, str] | None = None  # version and sha256 of verified weights
        self._loading: tuple[tuple[int, str], Future[Any]] | None = None
        self._running: dict[SampleId, str] = {}  # → its key
        self._finished: dict[str, Sample] = {}
        self._failure: str | None = None
        self._closed = False
        self._turns = 0
        self._view: dict[str, Any] = dict(sampler.health())
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    # What a client can ask; called by many threads

    def attach(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A trainer takes this server, from an older one or once more: what was outstanding is forgotten."""
        session = wire.field(body, "session", str)

        def take() -> None:
            if session < self._session:
                raise RefusedCallError(409, "session", "a newer trainer has taken this server")
            self._sampler.abort()
            self._sampler.wake()
            self._sampler.resume()
            with self._news:
                if session != self._session:
                    self._loaded = None  # weights of another run
                self._session, self._failure = session, None
                self._running.clear()
                self._finished.clear()

        self._ask(take)
        return {"facts": self.identity, **self.state()}

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Queue requests, each under a key of the client's; a known key is left alone."""
        self._of_session(body)
        requests = {}
        for item in wire.field(body, "requests", list):
            key = wire.field(item, "key", str) if isinstance(item, dict) else ""
            requests[key] = wire.unpack_request(item)

        def submit() -> int:
            self._of_session(body)
            if self._loaded is None:
                raise RefusedCallError(409, "weights", "no verified weights yet: load a version first")
            with self._news:
                known = {*self._running.values(), *self._finished}
                fresh = {key: request for key, request in requests.items() if key not in known}
            ids = [request.id for request in fresh.values()]
            if len({*ids}) != len(ids) or any(id in self._running for id in ids):
                raise RefusedCallError(409, "twice", "two outstanding requests have the same sample id")
            self._sampler.submit(list(fresh.values()))
            self._running |= {request.id: key for key, request in fresh.items()}
            return len(fresh)

        return {"accepted": self._ask(submit), **self.state()}

    def collect(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Finished samples, waiting a little for the first; those confirmed with `received` are forgotten."""
        self._of_session(body)
        received = wire.field(body, "received", list)
        deadline = time.monotonic() + _wait(body)
        with self._news:
            for key in received:
                self._finished.pop(key, None)
            while not (self._finished or self._failure or self._closed):
                if (left := deadline - time.monotonic()) <= 0 or not self._running:
                    break
                self._news.wait(left)
            samples = dict(list(self._finished.items())[:PER_REPLY])
            failure, self._failure = self._failure, None
        reached("sampler.collect")
        packed = ({"key": key, "sample": wire.pack_sample(sample)} for key, sample in samples.items())
        first = next(wire.portions(packed, PER_REPLY, REPLY_BYTES), [])  # the others come with the next call
        return {"samples": first, "failure": failure, **self.state()}

    def abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """End what is outstanding; the partial samples are collected as finished ones are."""
        self._of_session(body)

        def abort() -> None:
            self._of_session(body)
            partial = self._sampler.abort()
            for sample in partial:
                self._finish(sample)

        self._ask(abort)
        return self.state()

    def order(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """pause, resume, sleep, wake."""
        self._of_session(body)
        self._ask(getattr(self._sampler, what))
        return self.state()

    def load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a published version, all of it or nothing; call again until `loading` is false.

        The file is read and its sha256 compared aside, while sampling goes on with the weights there are.
        """
        self._of_session(body)
        version, sha256 = wire.field(body, "version", int), wire.field(body, "sha256", str)
        path, probe = wire.field(body, "path", str), wire.field(body, "probe", list)
        wanted = version, sha256
        with self._news:
            if self._loaded is not None and wanted != self._loaded and version <= self._loaded[0]:
                raise RefusedCallError(409, "stale", f"version {version} is not newer than {self._loaded[0]}")
            if self._loading is None or (self._loading[0] != wanted and self._loading[1].done()):
                job: Future[Any] = Future()
                self._loading = wanted, job
                threading.Thread(target=self._load, args=(job, body, wanted, path, probe), daemon=True).start()
            current, job = self._loading
        try:
            values = job.result(_wait(body))
        except FutureTimeout:
            return {"loading": True, **self.state()}
        except BaseException:
            self._forget_load(job)
            if current != wanted:  # another version's misfortune
                return {"loading": True, **self.state()}
            raise
        self._forget_load(job)
        return {"loading": current != wanted, "probe": values if current == wanted else None, **self.state()}

    def state(self) -> dict[str, Any]:
        """Kept up to date by the sampler's thread, so that it can be told while that one is busy, or stuck."""
        version, sha256 = self._loaded or (None, None)
        return {"boot": self.boot, "version": version, "sha256": sha256, "turns": self._turns}

    def health(self) -> dict[str, Any]:
        with self._news:
            counts = {"outstanding": len(self._running), "unconfirmed": len(self._finished)}
        return {**self.state(), **counts, "pid": os.getpid(), "session": self._session, "sampler": self._view}

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._calls.put((lambda: None, Future()))
        self._thread.join(timeout=10)

    # The sampler's thread

    def _run(self) -> None:
        looked = 0.0
        while not self._closed:
            idle = not self._running or bool(self._view.get("paused") or self._view.get("asleep"))
            asked = self._answer(wait=idle)
            if not idle:
                self._decode()
            if asked or idle or time.monotonic() - looked > 0.2:
                self._view, looked = dict(self._sampler.health()), time.monotonic()

    def _answer(self, wait: bool) -> bool:
        """Do what was asked for; whether anything was."""
        asked = False
        while True:
            try:
                call, reply = self._calls.get(timeout=0.5) if wait and not asked else self._calls.get_nowait()
            except queue.Empty:
                return asked
            asked = True
            try:
                reply.set_result(call())
            except BaseException as error:
                reply.set_exception(error)

    def _decode(self) -> None:
        try:
            samples = list(self._sampler.completed(0.0 if self._latency_s else SLICE_S))
            if samples:  # who has a sample can read the counters that made it
                self._view = dict(self._sampler.health())
            for sample in samples:
                self._finish(sample)
        except Exception as error:  # whatever a model does: the server lives on and says so
            with contextlib.suppress(Exception):
                self._sampler.abort()
            with self._news:
                self._running.clear()
                self._failure = f"{type(error).__name__}: {error}"
                self._news.notify_all()
        self._turns += 1
        if self._latency_s:
            time.sleep(self._latency_s)

    def _finish(self, sample: Sample) -> None:
        with self._news:
            key = self._running.pop(sample.id, None)
            if key is not None:
                self._finished[key] = sample
                self._news.notify_all()

    def _load(
        self, job: Future[Any], body: Mapping[str, Any], wanted: tuple[int, str], path: str, probe: Sequence[Any]
    ) -> None:
        # One call for all processes behind this server.
        path = f"{path}#{secrets.token_hex(8)}" if path.startswith(collective.SCHEME) else path
        try:
            load = None
            if self._loaded != wanted:
                if self._load_file is None:
                    load = partial(self._sampler.load_weights, wanted[0], fetch(path, wanted[1]).items())
                else:
                    load = partial(self._load_file, wanted[0], path, wanted[1])
            reached("sampler.load")
            values = self._ask(partial(self._take, body, wanted, load, probe), timeout_s=None)
            job.set_result(values)
        except BaseException as error:
            job.set_exception(error)

    def _take(
        self, body: Mapping[str, Any], wanted: tuple[int, str], load: Callable[[], None] | None, probe: Sequence[Any]
    ) -> list[list[float]] | None:
        self._of_session(body)
        if load is not None:
            before, self._loaded = self._loaded, None
            try:
                load()
            except WeightSyncError:
                self._loaded = before  # checked before anything was written: the weights are what they were
                raise
            self._loaded = wanted
        if self._score is None:
            return None
        return [row.astype(float).tolist() for row in self._score(probe)]

    def _forget_load(self, job: Future[Any]) -> None:
        with self._news:
            if self._loading is not None and self._loading[1] is job:
                self._loading = None

    def _ask(self, call: Callable[[], Any], timeout_s: float | None = LONGEST_WAIT_S) -> Any:
        """Have the sampler's thread do something; a repeated call is harmless, so a late answer is simply lost."""
        reply: Future[Any] = Future()
        self._calls.put((call, reply))
        try:
            return reply.result(timeout_s)
        except FutureTimeout:
            raise RefusedCallError(408, "busy", f"the sampler did not come to it within {timeout_s:g} s") from None

    def _of_session(self, body: Mapping[str, Any]) -> None:
        if not self._session or wire.field(body, "session", str) != self._session:
            raise RefusedCallError(409, "session", "another trainer has taken this server, or none yet: attach first")


def _wait(body: Mapping[str, Any]) -> float:
    return min(max(float(wire.field(body, "wait_s", (int, float))), 0.0), LONGEST_WAIT_S)


class SamplerServer(GuardedServer):
    """Serves an engine on `host`:`port` (0: a free one) to whoever knows the token. `name`: as others call the host."""

    def __init__(
        self, engine: SamplerEngine, token: str, *, host: str = "127.0.0.1", port: int = 0, name: str | None = None
    ) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"a sampler server needs a token of {MIN_TOKEN_CHARS} characters or more in {TOKEN}")
        self.engine, self.token = engine, token.encode()
        names = (name or host, host, "127.0.0.1", "localhost")
        super().__init__(
            (host, port), _Handler, names=names, max_connections=CONNECTIONS, max_body=MAX_BODY, idle_s=IDLE_S
        )
        self.url = f"http://{name or host}:{self.port}"
        self.routes: dict[tuple[str, str], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            ("GET", "/health"): lambda _: {**engine.health(), "refused": self.refused},
            ("GET", "/version"): lambda _: engine.state(),
            ("POST", "/attach"): engine.attach,
            ("POST", "/generate"): engine.generate,
            ("POST", "/collect"): engine.collect,
            ("POST", "/abort"): engine.abort,
            ("POST", "/load_weights"): engine.load_weights,
            **{("POST", f"/{what}"): partial(engine.order, what) for what in ("pause", "resume", "sleep", "wake")},
        }

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.engine.close()


# What the guard refuses, as clients of a sampler server know it.
_KINDS = {
    "wrong_host": "host",
    "wrong_origin": "origin",
    "invalid_api_key": "token",
    "wrong_type": "type",
    "no_length": "length",
    "body_too_large": "length",
    "slow_body": "slow",
    "malformed_request": "http",
}


class _Handler(GuardedHandler):
    server: SamplerServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def refusal(self, status: int, code: str, message: str) -> RefusedCallError:
        return RefusedCallError(status, _KINDS.get(code, code), message)

    def count(self, error: RefusedCallError) -> None:
        self.server.refused += error.status not in (409, 422)  # a trainer that is late or has bad weights is no abuse

    def serve(self) -> None:
        try:
            call = self._checked()
            body = wire.loads(self.read_body()) if self.command == "POST" else {}
            self.reply(200, call(body))
        except (wire.WireError, DataError) as error:
            raise RefusedCallError(400, "request", str(error)) from None
        except WeightSyncError as error:
            raise RefusedCallError(422, "weights", str(error)) from None

    def _checked(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        server = self.server
        scheme, token = self.presented()
        has_token = scheme == "Bearer" and hmac.compare_digest(token, server.token)
        hosts = self.headers.get_all("Host", [])
        self.check_sender(hosts, has_token, f"the token of {TOKEN} is missing or wrong")
        path = self.path.partition("?")[0]
        if not any(path == known for _, known in server.routes):
            raise RefusedCallError(404, "route", "no such route")
        if (call := server.routes.get((self.command, path))) is None:
            raise RefusedCallError(405, "method", f"{path} does not take {self.command[:16]}")
        return call
