"""The HTTP server of agents on loopback, with one address and one key for each episode.

    http://127.0.0.1:PORT/e/EPISODE/v1/chat/completions   (also /v1/completions, /v1/responses, /v1/models of OpenAI and
    /v1/messages of Anthropic), and /e/EPISODE/reward

An episode's key is a digest of its name under a secret of this process, so an agent reaches only its own episode. A
wrong request is answered in OpenAI's error format, counted, and changes nothing (docs/agents.md has the table).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gspo.envs.agents import messages_api, responses_api
from gspo.envs.agents import openai_api as api
from gspo.envs.agents import openai_api as replies
from gspo.envs.agents.openai_api import Answer, ApiError, ApiRequest
from gspo.system import HttpServer, Json, RefusedCallError, bearer_key, finished, route

MAX_BODY = 2 * 2**20  # half a million tokens of English text; no chat is longer
MAX_PARALLEL = 8  # calls of one episode at a time; further ones get 429, and clients retry
# One agent must not take the places of all; a client library keeps at most 100 connections open.
CONNECTIONS, PER_EPISODE = 1024, 128
IDLE_S = 60.0  # a connection may be silent this long between two calls
REMEMBERED = 4096  # ended episodes that are answered with 410
SHARED = "shared"  # the address of episodes that a header tells apart
_SESSION = "x-session-id"


class Dialect(NamedTuple):
    """A format of requests and replies: how it is read, and how an answer is written, whole or as events."""

    prefix: str  # of the ids of replies
    read: Callable[..., ApiRequest]
    body: Callable[..., dict[str, Any]]
    events: Callable[..., Iterable[bytes]]


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Dialect("chatcmpl", api.read_chat, replies.chat_body, replies.chunks),
    "/v1/completions": Dialect("cmpl", api.read_completion, replies.completion_body, replies.chunks),
    "/v1/responses": Dialect(
        "resp", responses_api.read_response, responses_api.response_body, responses_api.response_events
    ),
    "/v1/messages": Dialect("msg", messages_api.read_messages, messages_api.message_body, messages_api.message_events),
}
# Below /e/EPISODE
ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model:path}"),
    *(("POST", path) for path in DIALECTS),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/reward"),
)


class OpenEpisode:
    """One episode at the endpoint, from `Endpoint.open` to `Endpoint.end`."""

    def __init__(
        self,
        name: str,
        answer: Callable[[ApiRequest], Awaitable[Answer]],
        loop: asyncio.AbstractEventLoop,
        count_tokens: Callable[[ApiRequest], int] | None = None,
    ) -> None:
        self.name, self.answer, self.loop, self.count_tokens = name, answer, loop, count_tokens
        self.reward: float | None = None
        self.counts: Counter[str] = Counter()  # calls; refused calls by code; requests whose settings were replaced
        self.in_flight: set[Future[Answer]] = set()
        self.ended = False


class Endpoint(HttpServer):
    """Serves the open episodes of a trainer. `refused` counts the refused calls that belong to no episode."""

    def __init__(self, *, model: str = "policy", request_timeout_s: float = 600.0) -> None:
        self.model, self.request_timeout_s = model, request_timeout_s
        self.stopping = False
        # The secret exists only in this process, so keys are invalid after a restart.
        self._secret = secrets.token_bytes(32)
        self._episodes: dict[str, OpenEpisode] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._sessions: dict[str, OpenEpisode] = {}  # of the shared address
        self._connections: dict[str, set[Any]] = {}  # by episode; only the server's thread adds and counts
        self._lock = threading.Lock()  # wait: none, held for dictionary operations
        # In the order of ROUTES.
        generate = [partial(self._generate, dialect) for dialect in DIALECTS.values()]
        calls = (self._models, self._one_model, *generate, self._count_tokens, self._reward)
        super().__init__(
            [route(method, f"/e/{{episode}}{path}", call) for (method, path), call in zip(ROUTES, calls, strict=True)],
            max_connections=CONNECTIONS,
            max_body=MAX_BODY,
            idle_s=IDLE_S,
        )

    def open(self, episode: OpenEpisode) -> tuple[str, str]:
        """Serve an episode from now on; its base URL and its key."""
        with self._lock:
            self._episodes[episode.name] = episode
        return self.address(episode.name), self.key(episode.name)

    def address(self, name: str = SHARED) -> str:
        return f"http://127.0.0.1:{self.port}/e/{name}/v1"

    def share(self, session: str, episode: OpenEpisode) -> None:
        """Calls of the shared address with the header X-Session-ID: `session` belong to this episode, which is open."""
        with self._lock:
            self._sessions[session] = episode

    def end(self, episode: OpenEpisode) -> None:
        """Answer 410 to the episode's calls in flight, and to all later ones."""
        # First, so that a call that starts now is cancelled by `_sample` itself.
        episode.ended = True
        with self._lock:
            if self._episodes.get(episode.name) is episode:  # the episode may have been started again
                del self._episodes[episode.name]
            self._ended.append(episode.name)
            for session in [session for session, of in self._sessions.items() if of is episode]:
                del self._sessions[session]
                self._ended.append(session)
            self._connections.pop(episode.name, None)
        # A copy: the server's thread changes the set.
        for future in list(episode.in_flight):
            future.cancel()

    def key(self, name: str) -> str:
        return hmac.new(self._secret, name.encode("utf-8", "replace"), "sha256").hexdigest()

    def close(self) -> None:
        self.stopping = True
        for episode in list(self._episodes.values()):
            for future in list(episode.in_flight):
                future.cancel()
        super().close()

    async def on_error(self, request: Request, error: Exception) -> Response:
        is_known = isinstance(error, messages_api.MessagesError)
        if isinstance(error, ApiError) and not is_known and "/v1/messages" in request.scope["path"]:
            error = messages_api.MessagesError(error)
        return await super().on_error(request, error)

    def authorize(self, request: Request) -> None:
        """Check the key first, so that a reply reveals nothing about an episode to a caller without its key."""
        name = request.scope["path"].removeprefix("/e/").partition("/")[0]
        # Anthropic's older clients send their key in a header of its own.
        key = bearer_key(request) or request.headers.get("x-api-key", "").encode("utf-8", "replace")
        if not hmac.compare_digest(key, self.key(name).encode()):
            raise ApiError(401, "invalid_api_key", "the api key is missing, or of another episode")
        if self.stopping:
            raise ApiError(503, "stopping", "the trainer is stopping")
        with self._lock:
            is_shared = name == SHARED
            if is_shared:
                name = request.headers.get(_SESSION, "")
            episode = request.state.episode = (self._sessions if name in self._sessions else self._episodes).get(name)
            # An ended episode is told apart from an unknown one, so that its agent can stop.
            if episode is None and name in self._ended:
                raise _ended()
        if episode is None:
            raise ApiError(404, "no_such_episode", "there is no such episode")
        # The connections of the shared address belong to no single episode.
        if not is_shared:
            self._limit(episode, request.scope["state"]["connection"])

    def _limit(self, episode: OpenEpisode, connection: Any) -> None:
        held = self._connections.setdefault(episode.name, set())
        held &= connection.connections  # those that are still open
        if len(held | {connection}) > PER_EPISODE:
            raise ApiError(429, "too_many_connections", f"an episode has at most {PER_EPISODE} connections")
        held.add(connection)

    def refusal(self, status: int, code: str, message: str) -> ApiError:
        return ApiError(status, code, message + ("; base_url must end with /v1" if code == "no_such_route" else ""))

    def count(self, error: RefusedCallError, request: Request | None) -> None:
        # Refusals with a valid key count for the episode, others for the server.
        episode = None if request is None else getattr(request.state, "episode", None)
        if episode is None:
            super().count(error, request)
        else:
            episode.counts[error.code] += 1

    async def _models(self, request: Request) -> Response:
        return Json(replies.models_body(self.model))

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["model"] != self.model:
            raise ApiError(404, "model_not_found", f"the model here is {self.model!r}", "model")
        return Json(replies.model_body(self.model))

    async def _reward(self, request: Request) -> Response:
        request.state.episode.reward = api.read_body(api.read_reward, await request.body())
        return Json({"reward": request.state.episode.reward})

    async def _count_tokens(self, request: Request) -> Response:
        episode = request.state.episode
        read = partial(messages_api.read_messages, model=self.model, needs_max_tokens=False)
        api_request = api.read_body(read, await request.body())
        if episode.count_tokens is None:
            raise ApiError(404, "no_such_route", "this episode does not count tokens")
        return Json({"input_tokens": episode.count_tokens(api_request)})

    async def _generate(self, dialect: Dialect, request: Request) -> Response:
        episode = request.state.episode
        api_request = api.read_body(partial(dialect.read, model=self.model), await request.body())
        answer, number = await self._sample(episode, api_request)
        names: dict[str, Any] = {"model": self.model, "created": int(time.time())}
        names["id"] = f"{dialect.prefix}-{episode.name}-{number}"
        # A streamed reply has the same content; it is sent after the sample is complete.
        if api_request.stream:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            return StreamingResponse(_sent(dialect.events(answer, api_request, **names)), headers=headers)
        return Json(dialect.body(answer, api_request, **names))

    async def _sample(self, episode: OpenEpisode, api_request: ApiRequest) -> tuple[Answer, int]:
        """The policy's answer, computed in the event loop of the episode; a disconnect or a timeout cancels it."""
        # A limit per episode, so that one agent cannot occupy the sampler.
        if len(episode.in_flight) >= MAX_PARALLEL:
            raise ApiError(429, "too_many_calls", f"this episode has {MAX_PARALLEL} calls in flight; try again")
        episode.counts["calls"] += 1
        episode.counts["settings_replaced"] += bool(api_request.replaced)
        number = episode.counts["calls"]
        asked = _awaited(episode.answer, api_request)
        try:
            future = asyncio.run_coroutine_threadsafe(asked, episode.loop)
        except RuntimeError:  # the loop is closed
            asked.close()
            raise _ended() from None
        # Registered before the test for the end: either `end` sees this future, or this call sees `ended`.
        episode.in_flight.add(future)
        try:
            if episode.ended or self.stopping:
                future.cancel()
            if not await finished(future, self.request_timeout_s):
                late = f"the policy did not answer within {self.request_timeout_s:g} s"
                raise ApiError(408, "request_timeout", late)
            return future.result(0), number  # wait: 0 s, the sample has arrived
        except CancelledError:
            # `end` or `close` has cancelled the future.
            raise ApiError(503, "stopping", "the trainer is stopping") if self.stopping else _ended() from None
        finally:
            # After a timeout or a disconnect, the sample is not needed any more.
            future.cancel()
            episode.in_flight.discard(future)


def _ended() -> ApiError:
    return ApiError(410, "episode_ended", "this episode has ended")


async def _sent(events: Iterable[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def _awaited(answer: Callable[[ApiRequest], Awaitable[Answer]], api_request: ApiRequest) -> Answer:
    return await answer(api_request)
