"""The HTTP face of episodes: an OpenAI-compatible endpoint on loopback, one address and one key for each episode.

    http://127.0.0.1:PORT/e/EPISODE/v1/chat/completions   (also /v1/completions, /v1/models), and /e/EPISODE/reward

An episode's key is a digest of its name under a secret of this process, so an agent can reach its own episode alone.
Host, origin and key are checked before a byte of a body is read; bodies are bounded in size and time. What an agent
asks wrongly is answered in OpenAI's error format, counted, and changes nothing (docs/agents.md has the table).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, wait
from typing import Any

from gspo.envs.agents import openai_api as api
from gspo.envs.agents.openai_api import Answer, ApiError, Ask
from gspo.system.http import GuardedHandler, GuardedServer, RefusedCallError

MAX_BODY = 2 * 2**20  # a history of half a million tokens of English; more is no chat
MAX_PARALLEL = 8  # calls of one episode at a time; more wait their turn by 429, which clients repeat
CONNECTIONS = 1024
IDLE_S = 60.0  # that a connection may be silent between two calls
REMEMBERED = 4096  # ended episodes that are answered with 410
LOOK_S = 0.25  # between two looks whether the agent is still on the line


class Line:
    """What one episode's calls go through, from `Endpoint.open` to `Endpoint.end`."""

    def __init__(self, name: str, answer: Callable[[Ask], Awaitable[Answer]], loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.answer, self.loop = name, answer, loop
        self.reward: float | None = None
        self.counts: Counter[str] = Counter()  # calls; refused calls by code; requests whose settings were replaced
        self.in_flight = 0
        self.ended = False
        self.lock = threading.Lock()


class Endpoint(GuardedServer):
    """Serves every open episode of a trainer to whoever has its key. `refused`: calls of nobody's episode."""

    def __init__(self, *, model: str = "policy", request_timeout_s: float = 600.0) -> None:
        self.model, self.request_timeout_s = model, request_timeout_s
        self.stopping = False
        self._secret = secrets.token_bytes(32)
        self._lines: dict[str, Line] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        names = ("127.0.0.1", "localhost")
        super().__init__(
            ("127.0.0.1", 0), _Handler, names=names, max_connections=CONNECTIONS, max_body=MAX_BODY, idle_s=IDLE_S
        )
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="agents' endpoint", daemon=True)
        self._thread.start()

    def open(self, line: Line) -> tuple[str, str]:
        """From now on the line is served; its base URL and its key."""
        with self._lock:
            self._lines[line.name] = line
        return f"http://127.0.0.1:{self.port}/e/{line.name}/v1", self.key(line.name)

    def end(self, line: Line) -> None:
        """Its calls are over: those in flight are answered with 410, like all that come later."""
        with line.lock:
            line.ended = True
        with self._lock:
            if self._lines.get(line.name) is line:  # and not of an episode that was begun anew
                del self._lines[line.name]
            self._ended.append(line.name)

    def key(self, name: str) -> str:
        return hmac.new(self._secret, name.encode("utf-8", "replace"), "sha256").hexdigest()

    def line(self, name: str) -> Line:
        with self._lock:
            line = self._lines.get(name)
            if line is not None:
                return line
            if name in self._ended:
                raise ApiError(410, "episode_ended", "this episode has ended")
        raise ApiError(404, "no_such_episode", "there is no such episode")

    def close(self) -> None:
        self.stopping = True
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(GuardedHandler):
    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]
    _line: Line | None = None

    def refusal(self, status: int, code: str, message: str) -> ApiError:
        return ApiError(status, code, message)

    def count(self, error: RefusedCallError) -> None:
        if (line := self._line) is None:
            super().count(error)
            return
        with line.lock:
            line.counts[error.code] += 1

    def serve(self) -> None:
        self._line = None
        line, what = self._checked()
        body = api.loads(self.read_body()) if self.command == "POST" else {}
        server = self.server
        if what == "/v1/models":
            self.reply(200, api.models_body(server.model))
        elif what.startswith("/v1/models/"):
            if what.removeprefix("/v1/models/") != server.model:
                raise ApiError(404, "model_not_found", f"the model here is {server.model!r}", "model")
            self.reply(200, api.model_body(server.model))
        elif what == "/reward":
            line.reward = api.read_reward(body)
            self.reply(200, {"reward": line.reward})
        else:
            is_chat = what == "/v1/chat/completions"
            ask = api.read_chat(body, server.model) if is_chat else api.read_completion(body, server.model)
            answer, number = self._ask(line, ask)
            names: dict[str, Any] = {"model": server.model, "created": int(time.time())}
            names["id"] = f"{'chatcmpl' if is_chat else 'cmpl'}-{line.name}-{number}"
            if ask.stream:
                self._stream(api.chunks(answer, ask, **names))
            else:
                self.reply(200, (api.chat_body if is_chat else api.completion_body)(answer, ask, **names))

    def _ask(self, line: Line, ask: Ask) -> tuple[Answer, int]:
        """The policy's answer, within the deadline and as long as the agent is there to hear it."""
        with line.lock:
            if line.in_flight >= MAX_PARALLEL:
                raise ApiError(429, "too_many_calls", f"this episode has {MAX_PARALLEL} calls in flight; try again")
            line.in_flight += 1
            line.counts["calls"] += 1
            line.counts["settings_replaced"] += bool(ask.replaced)
            number = line.counts["calls"]
        server, deadline = self.server, time.monotonic() + self.server.request_timeout_s
        asked = _awaited(line.answer, ask)
        try:
            future = asyncio.run_coroutine_threadsafe(asked, line.loop)
        except RuntimeError:  # the loop is closed: its episodes are over
            asked.close()
            with line.lock:
                line.in_flight -= 1
            raise ApiError(410, "episode_ended", "this episode has ended") from None
        try:
            while True:
                if wait([future], LOOK_S).done:
                    return future.result(), number
                if server.stopping:
                    raise ApiError(503, "stopping", "the trainer is stopping")
                if line.ended:
                    raise ApiError(410, "episode_ended", "this episode has ended")
                if time.monotonic() > deadline:
                    late = f"the policy did not answer within {server.request_timeout_s:g} s"
                    raise ApiError(408, "request_timeout", late)
                if self._is_gone():
                    raise ConnectionError
        except CancelledError:
            raise ApiError(410, "episode_ended", "this episode has ended") from None
        finally:
            future.cancel()
            with line.lock:
                line.in_flight -= 1

    def _is_gone(self) -> bool:
        """Whether the agent has hung up; a next request on the line (pipelined) counts as being there."""
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        try:
            return bool(look.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _checked(self) -> tuple[Line, str]:
        """The episode and the route below it; the key is checked before anything is said of either."""
        server = self.server
        name, slash, rest = self.path.partition("?")[0].removeprefix("/e/").partition("/")
        scheme, key = self.presented()
        has_key = scheme.lower() == "bearer" and hmac.compare_digest(key, server.key(name).encode())
        hosts = self.headers.get_all("Host", [])
        self.check_sender(hosts, has_key, "the api key is missing, or of another episode")
        self.connection.settimeout(server.idle_s)
        if server.stopping:
            raise ApiError(503, "stopping", "the trainer is stopping")
        self._line = line = server.line(name)
        what = slash + rest
        methods = {
            method for method, route in ROUTES if what == route or (route.endswith("/") and _is_below(what, route))
        }
        if not methods:
            raise ApiError(404, "no_such_route", "no such route; base_url must end with /v1")
        if self.command not in methods:
            raise ApiError(405, "wrong_method", f"{what[:64]} does not take {self.command[:16]}")
        return line, what

    def _stream(self, events: Iterable[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(ConnectionError, TimeoutError):
            for event in events:
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")


# Below /e/EPISODE; a route that ends with a slash takes one name after it.
ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/reward"),
)


def _is_below(what: str, route: str) -> bool:
    return what.startswith(route) and len(what) > len(route)


async def _awaited(answer: Callable[[Ask], Awaitable[Answer]], ask: Ask) -> Answer:
    return await answer(ask)
