"""A sampler whose tokens are drawn by a vLLM server: `engine.Sampler` over its HTTP interface.

One request per sample, token ids in and out, with the log-probs of the distribution that was sampled
(`--logprobs-mode processed_logprobs`). vLLM is interrupted by /pause?mode=abort, which answers every request with what
it has said so far; the rest is asked for again with those tokens as part of the prompt. Draws are vLLM's own, from a
seed per request that is a function of its key: they do not depend on neighbours, and they are not the in-process
sampler's. Torch-free.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.errors import ConfigError, RolloutError, WeightSyncError
from gspo.sampling.requests import validate_request
from gspo.sampling.verify import invalid_reason
from gspo.types import FinishReason, Request, Sample, SampleId

if TYPE_CHECKING:
    import torch

NAME = "gspo"  # what the model is called there (--served-model-name)
EXTENSION = "gspo_vllm_worker.Worker"
WORKER_FOLDER = Path(__file__).parent / "inside_vllm"  # on vLLM's PYTHONPATH: it holds that module, and what it needs
CALL_S = 60.0  # an answer to anything but sampling and loading
HALT_S = 30.0  # until all requests have come back after /pause
_TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")  # of /metrics
_FINISH: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Endpoint(NamedTuple):
    """Where a vLLM server listens: a socket file that only its owner can open, or an address."""

    url: str = "http://vllm"
    socket: str | None = None
    key: str | None = None  # --api-key; it guards /v1 alone

    def __str__(self) -> str:
        return self.socket or self.url


class LieError(ValueError):
    """vLLM answered, and the answer cannot be true."""


@dataclass(slots=True)
class _Flight:
    """A request that vLLM has, or is about to get."""

    request: Request
    reply: Future[dict[str, Any] | None]
    version: int


class VllmSampler:
    """Implements `gspo.sampling.api.Sampler` over one vLLM server.

    `decode` turns tokens into text, for stop strings. `concurrent`: requests that vLLM has at once. `retries`: how
    often a request that came back as nonsense is asked again, and how many nonsense answers in a row end the sampler.
    `adapters`: published weights are a LoRA adapter alone, and this makes a folder of them that vLLM can read. `broken`
    is why it cannot go on; its process should end and start anew.
    """

    engine, route = "vLLM", "/v1/completions"

    def __init__(
        self,
        endpoint: Endpoint,
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
        adapters: Callable[[str, str], Path] | None = None,
    ) -> None:
        self.version, self.broken = version, ""
        self._model, self._adapters = NAME, adapters
        self._endpoint, self._seed, self._decode, self._can_sleep = endpoint, seed, decode, can_sleep
        self._num_vocab, self._max_context, self._ends = num_vocab, max_context, frozenset(eos_token_ids)
        self._retries, self._load_s = retries, load_s
        self._waiting: deque[Request] = deque()
        self._flying: dict[SampleId, _Flight] = {}
        self._arrived: queue.SimpleQueue[SampleId] = queue.SimpleQueue()
        self._done: deque[Sample] = deque()
        self._tries: Counter[SampleId] = Counter()
        self._counts: Counter[str] = Counter()
        self._lies_in_a_row = 0
        self._paused = self._asleep = self._closed = self._halting = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._client, self._seats = self._do(self._open(concurrent), CALL_S)

    # The interface

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:
            validate_request(
                request, num_vocab=self._num_vocab, max_context=self._max_context, sees_text=self._decode is not None
            )
        for request in requests:
            if request.prefix is not None and len(request.prefix.tokens) >= request.params.max_new_tokens:
                self._done.append(replace(request.prefix, id=request.id, finish="length"))
            else:
                self._waiting.append(request)
        self._send()

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            while self._done:
                yield self._done.popleft()
            if self._stopped() or not (self._flying or self._waiting):
                return
            self._send()  # what somebody else has called back
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0 and self._arrived.empty():
                return
            try:
                self._land(self._arrived.get(timeout=min(max(left, 0.001), 1.0)))
            except queue.Empty:
                if self.broken:
                    raise RolloutError(self.broken) from None

    def abort(self) -> list[Sample]:
        self._halt()
        partial = [r.prefix or Sample.of(r.id, [], [], self.version) for r in self._waiting]
        partial = [replace(s, id=r.id, finish="abort") for s, r in zip(partial, self._waiting, strict=True)]
        self._waiting.clear()
        self._tries.clear()
        return partial

    def pause(self) -> None:
        self._paused = True
        self._halt()

    def resume(self) -> None:
        self._paused = False
        self._send()

    def sleep(self) -> None:
        """vLLM's own sleep mode: weights go to the host's memory, caches are dropped. CUDA only; elsewhere a pause."""
        self._asleep = True
        self._halt()
        if self._can_sleep:
            self._post("/sleep?level=1")

    def wake(self) -> None:
        if self._asleep and self._can_sleep:
            self._post("/wake_up")
        self._asleep = False
        self._send()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        raise WeightSyncError("vLLM takes weights as a published file: load_published")

    def load_published(self, version: int, path: str, sha256: str) -> None:
        """Have every worker take published weights, whole or not at all; samples under way go on with them."""
        self._halt()
        # Nobody samples meanwhile, also where others use this server; what is cached is of the weights before.
        self._post("/pause?mode=abort&clear_cache=true")
        if self._adapters is not None:
            self._load_adapter(version, path, sha256, self._adapters)
        else:
            self._judge(self._rpc("gspo_load", str(version), path, sha256, timeout_s=self._load_s), version)
        if self._post("/reset_prefix_cache").get("success") is False:
            raise self._break(f"the prefix cache of version {self.version} could not be dropped")
        self._post("/resume")
        self.version = version
        self._send()

    def health(self) -> Mapping[str, Any]:
        return {
            "version": self.version,
            "running": len(self._flying),
            "waiting": len(self._waiting),
            "paused": self._paused,
            "asleep": self._asleep,
            "closed": self._closed,
            "broken": self.broken,
            **{name: self._counts[name] for name in ("requests", "sampled_tokens", "lies", "lost_replies", "partial")},
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for flight in self._flying.values():
            flight.reply.cancel()
        with suppress(RolloutError):
            self._do(self._client.aclose(), 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    # Beside the interface

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Log-probs of every token but the first of each sequence, as vLLM computes them from a prompt."""
        rows = []
        for tokens in sequences:
            asked = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            reply = self._post("/v1/completions", {"model": self._model, "ignore_eos": True, **asked})
            choice = _choice(reply, self._model)
            said = choice.get("prompt_logprobs")
            try:
                values = [said[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i]  # pyright: ignore[reportOptionalSubscript]
                rows.append(np.array(values, dtype=np.float32))
            except (TypeError, KeyError, IndexError, ValueError):
                raise RolloutError("vLLM did not say the log-probs of the probe's tokens") from None
        return rows

    def introduce(self) -> dict[str, Any]:
        """Refuse a server that would sample from, or be given, something else; what its workers say of themselves."""
        models = self._get("/v1/models").get("data")
        names = [m.get("id") for m in models if isinstance(m, dict)] if isinstance(models, list) else []
        if NAME not in names:
            raise ConfigError(
                f"the vLLM server {self._endpoint} serves {names}, not {NAME}: --served-model-name {NAME}"
            )
        state = self._rpc("gspo_state")
        if not state or not all("pid" in worker for worker in state):
            raise ConfigError(
                f"the vLLM server {self._endpoint} has no way to take weights: it needs --worker-extension-cls "
                f"{EXTENSION}, {WORKER_FOLDER} on its PYTHONPATH, and VLLM_SERVER_DEV_MODE=1"
            )
        # Of one kept token the processed log-prob is 0; the model's own is not.
        asked = {"prompt": [0, 1], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
        said = _said(self._post("/v1/completions", {"model": NAME, "return_token_ids": True, **asked}), NAME)
        if abs(said[1][0]) > 1e-6:
            raise ConfigError(
                f"the vLLM server {self._endpoint} says log-probs of another distribution than it samples from: "
                "it needs --logprobs-mode processed_logprobs"
            )
        return dict(state[0])

    def progress(self) -> float:
        """Tokens that vLLM has read and written so far; RolloutError where it does not answer."""
        text = self._do(self._client.get("/metrics"), CALL_S).text
        pairs = (line.rpartition(" ") for line in text.splitlines())
        return sum(float(value) for name, _, value in pairs if name.startswith(_TOKENS))

    def busy(self) -> bool:
        return bool(self._flying)

    # Requests

    def _stopped(self) -> bool:
        return self._paused or self._asleep or self._closed

    def _send(self) -> None:
        while self._waiting and not self._stopped():
            request = self._waiting.popleft()
            reply = asyncio.run_coroutine_threadsafe(self._sample(self._body(request)), self._loop)
            self._flying[request.id] = _Flight(request, reply, self.version)
            self._counts["requests"] += 1
            reply.add_done_callback(lambda _, id=request.id: self._arrived.put(id))

    def _body(self, request: Request) -> dict[str, Any]:
        params, said = request.params, () if request.prefix is None else request.prefix.tokens.tolist()
        id, num = request.id, len(said)
        seed = rng.bits(self._seed, "vllm", id.submission, id.sample, id.turn, num, id.attempt)
        return {
            "model": self._model,
            "prompt": [*request.prompt, *said],
            "max_tokens": params.max_new_tokens - num,
            "min_tokens": max(params.min_new_tokens - num, 0),
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0 if params.greedy else params.top_p,
            "top_k": 0 if params.greedy else params.top_k,
            "seed": int(seed) >> 1,  # theirs is signed
            # What ends a sample is ours to say: their own end tokens come from the model's folder.
            "ignore_eos": True,
            "stop_token_ids": sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}),
            "stop": list(params.stop),
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def _sample(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """None: it was not sent, as all requests are being called back."""
        async with self._seats:
            if self._halting:
                return None
            return _json(await self._client.post(self.route, json=body, timeout=None))

    def _land(self, id: SampleId) -> None:
        """A reply is there: a sample, a piece of one, or nothing that can be used."""
        flight = self._flying.pop(id, None)
        if flight is None:
            return
        try:
            reply = flight.reply.result(0)
            if reply is None:
                self._waiting.append(flight.request)
                return
            self._take(flight, *self._said(reply))
            self._lies_in_a_row = 0
        except (LieError, httpx.HTTPError, OSError) as error:
            self._again(flight.request, error)

    def _take(self, flight: _Flight, tokens: list[int], logp: list[float], finish: FinishReason) -> None:
        request = flight.request
        fresh = Sample.of(request.id, tokens, logp, flight.version, finish)
        sample = fresh if request.prefix is None else Sample.concatenate([request.prefix, fresh])
        if request.params.stop and self._decode is not None:
            sample = _up_to_stop(sample, request, self._decode)
        versions = (flight.version, flight.version)
        if why := invalid_reason(
            request, sample, num_vocab=self._num_vocab, ends=self._ends, versions=versions, aborting=True
        ):
            raise LieError(why)
        self._counts["sampled_tokens"] += len(tokens)
        if sample.finish == "abort":  # by us, or by somebody else who has paused this server
            self._counts["partial"] += 1
            self._waiting.append(replace(request, prefix=sample if len(sample.tokens) else request.prefix))
        else:
            self._tries.pop(request.id, None)
            self._done.append(sample)

    def _again(self, request: Request, error: Exception) -> None:
        """Nothing came of a request: ask once more, within bounds."""
        is_lie = isinstance(error, LieError)
        self._counts["lies" if is_lie else "lost_replies"] += 1
        self._tries[request.id] += 1
        self._lies_in_a_row += 1
        if self._tries[request.id] > self._retries or self._lies_in_a_row > 8 * (1 + self._retries):
            self._waiting.append(request)
            what = "cannot be believed" if is_lie else "does not answer"
            raise self._break(f"{self.engine} {what}: sample {tuple(request.id)}: {type(error).__name__}: {error}")
        self._waiting.append(request)
        if not self._halting:
            self._send()

    def _halt(self) -> None:
        """Call all requests back with what they have said; they wait then, the newest last."""
        if not self._flying:
            return
        order = {id: index for index, id in enumerate(self._flying)}
        self._halting = True
        deadline = time.monotonic() + HALT_S
        try:
            while self._flying and time.monotonic() < deadline and not self.broken:
                self._call_back()
                until = time.monotonic() + 1.0
                while self._flying and (left := until - time.monotonic()) > 0:
                    try:
                        self._land(self._arrived.get(timeout=left))
                    except queue.Empty:
                        break
            for flight in self._flying.values():  # it came after the pause: nothing of it is lost but time
                flight.reply.cancel()
                self._waiting.append(flight.request)
            self._flying.clear()
            self._go_on()
        finally:
            self._halting = False
        self._waiting = deque(sorted(self._waiting, key=lambda request: order.get(request.id, len(order))))

    # What an engine with other words says differently

    def _said(self, reply: Mapping[str, Any]) -> tuple[list[int], list[float], FinishReason]:
        return _said(reply, self._model)

    def _call_back(self) -> None:
        self._post("/pause?mode=abort&clear_cache=false")

    def _go_on(self) -> None:
        self._post("/resume")

    # Weights

    def _load_adapter(self, version: int, path: str, sha256: str, folders: Callable[[str, str], Path]) -> None:
        """A version is an adapter of its own name; the one before goes when it is taken, and stays when it is not.

        Names hold a digest, as versions of another trainer may have the same numbers.
        """
        name, before = f"{NAME}-{version}-{sha256[:16]}", self._model
        if name == before:
            return
        try:
            folder = folders(path, sha256)
            self._tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, self._load_s)
        except (WeightSyncError, RolloutError) as error:
            with suppress(RolloutError):  # it may be there, and its answer was lost
                self._tell("/v1/unload_lora_adapter", {"lora_name": name})
            self._post("/resume")
            raise WeightSyncError(f"weight version {version} (an adapter): {error}") from None
        self._model = name
        if before != NAME:
            self._tell("/v1/unload_lora_adapter", {"lora_name": before})
        for older in folder.parent.glob("adapter-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)

    def _judge(self, workers: Sequence[Mapping[str, Any]], version: int) -> None:
        """What the workers say of a load: all took it, or all refused it. Anything else cannot be mended."""
        refused = [str(worker["refused"]) for worker in workers if "refused" in worker]
        if workers and len(refused) == len(workers):
            self._post("/resume")
            raise WeightSyncError(refused[0])
        if not workers or any(worker.get("version") != version for worker in workers):
            said = next((worker for worker in workers if worker.get("version") != version), "nothing")
            raise self._break(f"weight version {version} reached vLLM in part only: {said}")

    def _rpc(self, method: str, *args: str, timeout_s: float = CALL_S) -> list[dict[str, Any]]:
        try:
            results = self._post("/collective_rpc", {"method": method, "args": args}, timeout_s).get("results")
        except RolloutError:
            if method == "gspo_state":
                return []
            raise
        return [worker if isinstance(worker, dict) else {} for worker in results] if isinstance(results, list) else []

    def _break(self, why: str) -> RolloutError:
        self.broken = self.broken or why
        return RolloutError(why)

    # HTTP, all on the loop's thread

    async def _open(self, concurrent: int) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        where, limits = self._endpoint, httpx.Limits(max_connections=None, max_keepalive_connections=concurrent)
        head = {} if where.key is None else {"Authorization": f"Bearer {where.key}"}
        transport = httpx.AsyncHTTPTransport(uds=where.socket, limits=limits, trust_env=False)
        client = httpx.AsyncClient(transport=transport, base_url=where.url, headers=head, timeout=CALL_S)
        return client, asyncio.Semaphore(concurrent)

    def _get(self, path: str) -> dict[str, Any]:
        return _json(self._do(self._client.get(path), CALL_S))

    def _post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        try:
            return _json(self._do(self._client.post(path, json=body, timeout=timeout_s), timeout_s + 5))
        except LieError as error:
            raise RolloutError(f"{self.engine} {path.partition('?')[0]}: {error}") from None

    def _tell(self, path: str, body: Mapping[str, Any], timeout_s: float = CALL_S) -> None:
        """An order that is answered in words."""
        response = self._do(self._client.post(path, json=body, timeout=timeout_s), timeout_s + 5)
        if response.status_code != 200:
            raise RolloutError(f"{self.engine} {path}: {response.status_code}: {response.text[:300]}")

    def _do(self, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise RolloutError(f"{self.engine} does not answer in {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.engine} does not answer: {type(error).__name__} {error}".rstrip()) from None


def _json(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise LieError(f"it answered {response.status_code}: {response.text[:300]}")
    if not response.content:
        return {}
    try:
        body = response.json()
    except ValueError:
        raise LieError(f"its answer is not JSON: {response.text[:100]!r}") from None
    if not isinstance(body, dict):
        raise LieError(f"its answer is a JSON {type(body).__name__}")
    return body


def _choice(reply: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    if reply.get("model") != model:
        raise LieError(f"it answered for the model {reply.get('model')!r}, asked was {model!r}")
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise LieError("it did not answer with one choice")
    return choices[0]


def _said(reply: Mapping[str, Any], model: str) -> tuple[list[int], list[float], FinishReason]:
    """Tokens, their log-probs and why they end, of a reply that can be true."""
    choice = _choice(reply, model)
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    return believable(choice.get("token_ids"), values, choice.get("finish_reason"))


def believable(tokens: Any, values: Any, reason: Any) -> tuple[list[int], list[float], FinishReason]:
    """What an engine says of a sample, as far as it can be judged without the request; LieError where it cannot be."""
    finish = _FINISH.get(reason) if isinstance(reason, str) else None
    if finish is None:
        raise LieError(f"its finish_reason is {reason!r}")
    if finish == "abort" and not tokens:
        return [], [], finish
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise LieError("its token_ids are missing, or not numbers of tokens")
    if not isinstance(values, list) or not all(type(value) in (float, int) for value in values):
        raise LieError("it said no log-probs")
    if len(values) != len(tokens):
        raise LieError(f"it said {len(values)} log-probs of {len(tokens)} tokens")
    return tokens, [min(float(value), 0.0) if value < 1e-5 else float(value) for value in values], finish


def _up_to_stop(sample: Sample, request: Request, decode: Callable[[Sequence[int]], str]) -> Sample:
    """The sample up to the token that completes a stop string.

    vLLM looks for one in what it has written itself: not across the end of a prefix.
    """
    said, params = 0 if request.prefix is None else len(request.prefix.tokens), request.params
    if not said:
        return sample
    tokens, longest = sample.tokens.tolist(), max(len(stop.encode()) for stop in params.stop)
    for num in range(said + 1, len(tokens) + 1):
        if num < params.min_new_tokens:
            continue
        tail = tokens[max(0, num - longest - 8) : num]
        text, before = decode(tail), len(decode(tail[:-1]).rstrip("\ufffd"))
        if any(text.rfind(stop) + len(stop) > before for stop in params.stop if stop in text):
            return replace(sample.up_to(num), finish="stop")
    return sample
