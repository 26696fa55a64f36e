"""A sampler whose tokens an inference engine's server samples; its replies are checked first. Torch-free.

One HTTP request per sample, token ids in and out. An engine is interrupted by a call that makes it answer every request
with the tokens so far; the rest is requested again later with those tokens as part of the prompt. The engine draws
from a seed per request that is a function of the request's key: tokens do not depend on other requests, but they are
not those of the in-process sampler. `vllm.py` has what is special to vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import queue
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.errors import RolloutError, WeightSyncError
from gspo.sampling.api import (
    Experts,
    completed_by_prefix,
    completes_stop,
    interrupted,
    invalid_reason,
    validate_request,
)
from gspo.system import HttpClient, Reply, ReplyTooLargeError
from gspo.types import Extras, FinishReason, Kept, Request, Routes, Sample, SampleId

if TYPE_CHECKING:
    import torch


_FINISH_OF: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class InvalidReplyError(ValueError):
    """Invalid response: the engine's reply contradicts the request or its own API."""


class NewTokens(NamedTuple):
    """New tokens of one sample."""

    tokens: list[int]
    logp: list[float]
    finish: FinishReason


def reply_object(reply: Reply) -> dict[str, Any]:
    """The JSON object of a reply with status 200; an empty body is an empty object."""
    text = reply.content.decode("utf-8", "replace")
    if reply.status != 200:
        raise InvalidReplyError(f"it answered {reply.status}: {text[:300]}")
    if not text:
        return {}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidReplyError(f"its answer is not JSON: {text[:100]!r}") from None
    if not isinstance(body, dict):
        raise InvalidReplyError(f"its answer is a JSON {type(body).__name__}, not an object")
    return body


def prompt_logp(choice: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """`prompt_logprobs` of a choice of vLLM: log-probs of every token but the first."""
    try:
        # One entry per token: a mapping from token id to its log-prob. The first token has none.
        found = choice["prompt_logprobs"]
        return np.array([found[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i], dtype=np.float32)
    except (TypeError, KeyError, IndexError, ValueError):
        raise InvalidReplyError("its prompt_logprobs are missing, or not those of the prompt's tokens") from None


def parse_completion(tokens: Any, logp: Any, finish_reason: Any) -> NewTokens:
    """Check what can be checked without the request. Log-probs up to 1e-5 above 0 are rounding errors and become 0."""
    finish = _FINISH_OF.get(finish_reason) if isinstance(finish_reason, str) else None
    if finish is None:
        raise InvalidReplyError(f"its finish_reason is {finish_reason!r}")
    # An interrupted request may not have started: it has neither tokens nor log-probs.
    if finish == "abort" and not tokens:
        return NewTokens([], [], finish)
    # type() instead of isinstance(): a bool is an int, too.
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise InvalidReplyError("its token_ids are missing, or not token numbers")
    if not isinstance(logp, list) or not all(type(value) in (float, int) for value in logp):
        raise InvalidReplyError("its log-probs are missing, or not numbers")
    if len(logp) != len(tokens):
        raise InvalidReplyError(f"it returned {len(logp)} log-probs for {len(tokens)} tokens")
    return NewTokens(tokens, [min(float(value), 0.0) if value < 1e-5 else float(value) for value in logp], finish)


def parse_routes(content: Any, num_rows: int) -> NDArray[np.integer[Any]]:
    """Expert routes [num_rows, layers, top_k] from base64 of a .npy file."""
    if not isinstance(content, str):
        raise InvalidReplyError("its routed_experts are missing")
    try:
        rows = np.load(io.BytesIO(base64.b64decode(content, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidReplyError(f"its routed_experts are not base64 of a .npy file ({error})") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or len(rows) != num_rows or rows.dtype.kind not in "iu":
        form = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidReplyError(f"its routed_experts are {form} for {num_rows} positions")
    return rows


def cut_at_stop(sample: Sample, request: Request, decode: Callable[[Sequence[int]], str]) -> Sample:
    """The sample up to the token that completes a stop string.

    An engine searches only the text it generated itself, so it misses a stop string that begins in the prefix.
    """
    num_prefix, params = 0 if request.prefix is None else len(request.prefix.tokens), request.params
    # Without a prefix, the engine has searched the whole completion itself.
    if not num_prefix:
        return sample
    for num in range(max(num_prefix + 1, params.min_new_tokens), len(sample.tokens) + 1):
        if completes_stop(sample.tokens[:num], params.stop, decode):
            return replace(sample.up_to(num), finish="stop")
    return sample


CALL_S = 60.0  # deadline of every call except sampling and loading
INTERRUPT_S = 30.0  # until all requests have come back after an interruption
_REQUEST_COUNTERS = ("requests", "sampled_tokens", "invalid_responses", "lost_replies", "partial", "unknown_kept")


class EngineAddress(NamedTuple):
    """Where an engine's server listens: at a Unix socket that only its owner can open, or at a URL."""

    url: str = "http://vllm"
    socket: str | None = None
    key: str | None = None  # --api-key; vLLM checks it for /v1 only

    def __str__(self) -> str:
        return self.socket or self.url

    def open(self, max_connections: int | None = None) -> HttpClient:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return HttpClient(self.url, headers=headers, socket=self.socket, max_connections=max_connections)


@dataclass(slots=True)
class InFlight:
    """A request that the engine has, or is about to get."""

    request: Request
    reply: Future[dict[str, Any] | None]
    version: int


class EngineSampler(ABC):
    """Implements `gspo.sampling.api.Sampler` over one server of an inference engine.

    decode       turns tokens into text, for stop strings
    concurrent   how many requests the engine has at once
    retries      how often one request may fail; 8 · (1 + retries) failures in a row end the sampler
    can_sleep    the engine can release its GPU memory
    load_s       deadline of a load of weights
    experts      the form of expert routes, if the engine is asked for them

    `broken` tells why the sampler cannot continue; its process must restart.
    """

    engine: str  # its name
    route: str  # of a sampling request
    # Path and body of the calls that make the engine answer all requests with the tokens so far, accept requests again,
    # release its GPU memory, and take it back.
    interrupt: tuple[str, Mapping[str, Any] | None]
    restart: tuple[str, Mapping[str, Any] | None]
    release: tuple[str, Mapping[str, Any] | None]
    reclaim: tuple[str, Mapping[str, Any] | None]

    def __init__(
        self,
        address: EngineAddress,
        *,
        seed: int,
        num_vocab: int,
        max_context: int,
        eos_token_ids: Collection[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        concurrent: int = 256,
        retries: int = 3,
        can_sleep: bool = False,
        load_s: float = 1800.0,
        version: int = -1,
        experts: Experts = Experts(),  # noqa: B008 - a tuple
    ) -> None:
        self.version, self.broken = version, ""
        self._address, self._seed, self._decode, self._can_sleep = address, seed, decode, can_sleep
        self._ends, self._retries, self._load_s = frozenset(eos_token_ids), retries, load_s
        self._num_vocab, self._experts = num_vocab, experts
        self._validate = partial(
            validate_request, num_vocab=num_vocab, max_context=max_context, sees_text=decode is not None
        )
        self._invalid_reason = partial(
            invalid_reason, num_vocab=num_vocab, ends=self._ends, aborting=True, experts=experts
        )
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[SampleId, InFlight] = {}
        self._arrived: queue.SimpleQueue[InFlight] = queue.SimpleQueue()  # requests whose reply is there
        self._done: deque[Sample] = deque()
        self._failures: Counter[SampleId] = Counter()
        self._failures_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._paused = self._asleep = self._closed = self._interrupting = False
        self._http, self._slots = address.open(concurrent), asyncio.Semaphore(concurrent)

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:
            self._validate(request)
        for request in requests:
            whole = completed_by_prefix(request)
            if whole is not None:
                self._done.append(whole)
            else:
                self._waiting.append(request)
        self._send()

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            while self._done:
                yield self._done.popleft()
            if self._is_stopped() or not (self._in_flight or self._waiting):
                return
            self._send()  # requests that another client of this engine has interrupted
            # Wait at most 1 s at a time, so that a broken engine is noticed without a deadline, too.
            left = 1.0 if deadline is None else deadline - time.monotonic()
            # A reply that has arrived is handled even after the deadline: polling with a deadline of 0 makes progress.
            if left <= 0 and self._arrived.empty():
                return
            try:
                self._receive(self._arrived.get(timeout=min(max(left, 0.001), 1.0)))  # wait: 1 s, the caller's deadline
            except queue.Empty:
                if self.broken:
                    raise RolloutError(self.broken) from None

    def abort(self) -> list[Sample]:
        self._interrupt_all()
        samples = [interrupted(request, self.version) for request in self._waiting]
        self._waiting.clear()
        self._failures.clear()
        return samples

    def pause(self) -> None:
        # The flag comes first: interrupted requests must not be sent again.
        self._paused = True
        self._interrupt_all()

    def resume(self) -> None:
        self._paused = False
        self._send()

    def sleep(self) -> None:
        """Release the engine's GPU memory if it can do so; otherwise a pause."""
        # The flag comes first: interrupted requests must not be sent again.
        self._asleep = True
        self._interrupt_all()
        if self._can_sleep:
            self._post(*self.release)

    def wake(self) -> None:
        if self._asleep and self._can_sleep:
            self._post(*self.reclaim)
        self._asleep = False
        self._send()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        raise WeightSyncError(f"{self.engine} loads weights from a published file: use load_published")

    def health(self) -> Mapping[str, Any]:
        return {
            "version": self.version,
            "running": len(self._in_flight),
            "waiting": len(self._waiting),
            "paused": self._paused,
            "asleep": self._asleep,
            "closed": self._closed,
            "broken": self.broken,
            **{name: self._counts[name] for name in _REQUEST_COUNTERS},
        }

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._http.close()

    @abstractmethod
    def load_published(self, version: int, path: str, sha256: str) -> None:
        """Load a published weight version; interrupted samples continue with it."""

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Log-probs of every token but the first of each sequence."""

    @abstractmethod
    def check_server(self) -> dict[str, Any]:
        """ConfigError if the server is not what this sampler needs. Returns what it reports, with its `device`."""

    @abstractmethod
    def progress(self) -> float:
        """A number that grows while the engine works."""

    def is_busy(self) -> bool:
        return bool(self._in_flight)

    @abstractmethod
    def _body(self, request: Request) -> dict[str, Any]:
        """The body of a sampling request."""

    @abstractmethod
    def _parse(self, reply: Mapping[str, Any]) -> NewTokens:
        """The new tokens in the reply to a sampling request."""

    def _kept(self, reply: Mapping[str, Any], request: Request) -> Kept | None:
        """Of the new tokens (truncated sampling); None if the engine cut a set off."""
        raise InvalidReplyError(f"{self.engine} does not return the tokens that truncated sampling keeps")

    def _routes(self, reply: Mapping[str, Any], request: Request, completion: NewTokens) -> Routes | None:
        """Of the new tokens, and of the prompt; None if the engine is not asked for them."""
        return None

    def _is_stopped(self) -> bool:
        return self._paused or self._asleep or self._closed

    def _request_seed(self, request: Request, purpose: str) -> int:
        """64 random bits that are a function of the request's key and of how many tokens it has."""
        id, num = request.id, 0 if request.prefix is None else len(request.prefix.tokens)
        return int(rng.bits(self._seed, purpose, id.submission, id.sample, id.turn, num, id.attempt))

    def _stop_token_ids(self, request: Request) -> list[int]:
        params = request.params
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._ends)})

    def _send(self) -> None:
        while self._waiting and not self._is_stopped():
            request = self._waiting.popleft()
            flight = InFlight(request, self._http.run(self._sample(self._body(request))), self.version)
            self._in_flight[request.id] = flight
            self._counts["requests"] += 1
            # The HTTP thread only queues the flight; the caller's thread handles the reply, so no lock is needed.
            flight.reply.add_done_callback(lambda _, flight=flight: self._arrived.put(flight))

    async def _sample(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The reply to a sampling request; there is no deadline. None: not sent, as requests are being interrupted."""
        async with self._slots:
            # An interruption may have begun while this request waited for a slot.
            if self._interrupting:
                return None
            return reply_object(await self._http.request("POST", self.route, json.dumps(body).encode()))

    def _receive(self, flight: InFlight) -> None:
        """Handle a reply: a sample, a part of one, or a failure."""
        # An interruption has cancelled it; the same request may be in flight again.
        if self._in_flight.get(flight.request.id) is not flight:
            return
        del self._in_flight[flight.request.id]
        try:
            reply = flight.reply.result(0)  # wait: 0 s, the reply has arrived
            if reply is None:
                self._waiting.append(flight.request)
                return
            completion = self._parse(reply)
            self._accept(flight, completion, self._extras(flight.request, completion, reply))
            self._failures_in_a_row = 0
        except (InvalidReplyError, ReplyTooLargeError, OSError) as error:
            self._resubmit(flight.request, error)

    def _extras(self, request: Request, completion: NewTokens, reply: Mapping[str, Any]) -> Extras:
        # An interrupted request may have come back without tokens, and so without sets.
        if not completion.tokens:
            return Extras()
        routes = self._routes(reply, request, completion)
        if not request.params.record_kept:
            return Extras(routes)
        kept = self._kept(reply, request)
        self._counts["unknown_kept"] += kept is None
        return Extras(routes, Kept.whole(len(completion.tokens)) if kept is None else kept)

    def _accept(self, flight: InFlight, completion: NewTokens, extras: Extras) -> None:
        request = flight.request
        # Tokens whose set is unknown are not trained: their likelihood is unknown, too.
        mask = None if extras.kept is None else extras.kept.counts > 0
        fresh = Sample.of(request.id, completion.tokens, completion.logp, flight.version, completion.finish, mask)
        fresh = replace(fresh, extras=extras)
        sample = fresh if request.prefix is None else Sample.concatenate([request.prefix, fresh])
        if request.params.stop and self._decode is not None:
            sample = cut_at_stop(sample, request, self._decode)
        # The engine is interrupted before every load, so one version sampled all new tokens of a reply.
        if why := self._invalid_reason(request, sample, versions=(flight.version, flight.version)):
            raise InvalidReplyError(why)
        self._counts["sampled_tokens"] += len(completion.tokens)
        if sample.finish == "abort":  # interrupted by us, or by another client that has paused this server
            self._counts["partial"] += 1
            # The request is sent again later and continues after the tokens that have arrived.
            self._waiting.append(replace(request, prefix=sample if len(sample.tokens) else request.prefix))
        else:
            self._failures.pop(request.id, None)
            self._done.append(sample)

    def _resubmit(self, request: Request, error: Exception) -> None:
        """Send a failed request again. RolloutError after too many failures."""
        is_invalid = not isinstance(error, OSError)
        self._counts["invalid_responses" if is_invalid else "lost_replies"] += 1
        self._failures[request.id] += 1
        self._failures_in_a_row += 1
        # Queued before the error is raised, so that `abort` can still return it.
        self._waiting.append(request)
        if self._failures[request.id] > self._retries or self._failures_in_a_row > 8 * (1 + self._retries):
            what = "sends invalid responses" if is_invalid else "does not answer"
            raise self._mark_broken(f"{self.engine} {what}: sample {tuple(request.id)}: {error}")
        # During an interruption all requests must come back; `_send` follows later.
        if not self._interrupting:
            self._send()

    def _interrupt_all(self) -> None:
        """Interrupt all requests. They wait then with their tokens so far, in the order in which they were sent."""
        if not self._in_flight:
            return
        # Replies arrive in any order; the queue is sorted back to this one at the end.
        order = {id: index for index, id in enumerate(self._in_flight)}
        self._interrupting = True
        deadline = time.monotonic() + INTERRUPT_S
        try:
            # Repeated: a request on its way to the engine may arrive there after the interruption.
            while self._in_flight and time.monotonic() < deadline and not self.broken:
                self._post(*self.interrupt)
                until = time.monotonic() + 1.0
                while self._in_flight and (left := until - time.monotonic()) > 0:
                    try:
                        # wait: the caller's deadline, the sampler server
                        self._receive(self._arrived.get(timeout=left))
                    except queue.Empty:
                        break
            for flight in self._in_flight.values():  # the engine got it after the interruption: sample it again
                flight.reply.cancel()
                self._waiting.append(flight.request)
            self._in_flight.clear()
            # The engine stays paused until this call. Requests are sent only after `_interrupting` is cleared.
            self._post(*self.restart)
        finally:
            self._interrupting = False
        self._waiting = deque(sorted(self._waiting, key=lambda request: order.get(request.id, len(order))))

    def _resume_with(self, version: int) -> None:
        """After a load: the engine accepts requests again, and interrupted ones continue with the new weights."""
        self._post(*self.restart)
        self.version = version
        self._send()

    def _mark_broken(self, why: str) -> RolloutError:
        self.broken = self.broken or why
        return RolloutError(why)

    def _get(self, path: str) -> dict[str, Any]:
        return self._parsed(path, self._call("GET", path))

    def _post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        return self._parsed(path, self._call("POST", path, body, timeout_s))

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_S) -> Reply:
        content = None if body is None else json.dumps(body).encode()
        try:
            return self._http.call(method, path, content, timeout_s=timeout_s)
        except TimeoutError:
            raise RolloutError(f"{self.engine} does not answer in {timeout_s:g} s") from None
        except (ConnectionError, ReplyTooLargeError) as error:
            raise RolloutError(f"{self.engine} does not answer: {error}") from None

    def _parsed(self, path: str, reply: Reply) -> dict[str, Any]:
        try:
            return reply_object(reply)
        except InvalidReplyError as error:
            raise RolloutError(f"{self.engine} {path.partition('?')[0]}: {error}") from None
