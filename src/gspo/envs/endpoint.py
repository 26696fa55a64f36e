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
import json
import secrets
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gspo.envs import openai_api as api
from gspo.envs.openai_api import Answer, ApiError, Ask

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


class Endpoint(ThreadingHTTPServer):
    """Serves every open episode of a trainer to whoever has its key."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *, model: str = "policy", request_timeout_s: float = 600.0) -> None:
        self.model, self.request_timeout_s = model, request_timeout_s
        self.max_body, self.body_s, self.head_s, self.idle_s = MAX_BODY, 30.0, 10.0, IDLE_S
        self.refused = 0  # calls without a valid key, of nobody's episode
        self.stopping = False
        self._secret = secrets.token_bytes(32)
        self._lines: dict[str, Line] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._strangers: dict[socket.socket, float] = {}  # connections that have shown no key yet
        self._open = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.server_address[1])
        self.hosts = {f"{host}:{self.port}" for host in ("127.0.0.1", "localhost")}
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

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if self._open >= CONNECTIONS:
                with contextlib.suppress(OSError):
                    request.sendall(b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                self.shutdown_request(request)
                return
            self._open += 1
            self._strangers[request] = time.monotonic() + self.head_s
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open -= 1

    def shutdown_request(self, request: Any) -> None:
        self.known(request)
        super().shutdown_request(request)

    def known(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)

    def service_actions(self) -> None:
        """Called several times a second: who has not come to the point in time is sent away."""
        for connection, deadline in list(self._strangers.items()):
            if time.monotonic() > deadline:
                self.known(connection)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the other side's business."""

    def close(self) -> None:
        self.stopping = True
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gspo", ""
    disable_nagle_algorithm = True
    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]
    _line: Line | None = None
    _is_unread = False

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.head_s)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every method comes here: none may answer without a key
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        self._line = None
        self._is_unread = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
        try:
            self._serve()
        except ApiError as error:
            self._count(error.code)
            self._reply(error.status, error.body())
        except ConnectionError:
            self.close_connection = True
        except Exception as error:  # a bug of ours: told to the agent, whose episode it may cost
            self._reply(500, ApiError(500, "internal", f"{type(error).__name__}: {error}").body())

    def _count(self, code: str) -> None:
        if (line := self._line) is None:
            self.server.refused += 1
            return
        with line.lock:
            line.counts[code] += 1

    def _serve(self) -> None:
        line, what = self._checked()
        body = self._body() if self.command == "POST" else {}
        server = self.server
        if what == "/v1/models":
            self._reply(200, api.models_body(server.model))
        elif what.startswith("/v1/models/"):
            if what.removeprefix("/v1/models/") != server.model:
                raise ApiError(404, "model_not_found", f"the model here is {server.model!r}", "model")
            self._reply(200, api.model_body(server.model))
        elif what == "/reward":
            line.reward = api.read_reward(body)
            self._reply(200, {"reward": line.reward})
        else:
            is_chat = what == "/v1/chat/completions"
            ask = api.read_chat(body, server.model) if is_chat else api.read_completion(body, server.model)
            answer, number = self._ask(line, ask)
            names: dict[str, Any] = {"model": server.model, "created": int(time.time())}
            names["id"] = f"{'chatcmpl' if is_chat else 'cmpl'}-{line.name}-{number}"
            if ask.stream:
                self._stream(api.chunks(answer, ask, **names))
            else:
                self._reply(200, (api.chat_body if is_chat else api.completion_body)(answer, ask, **names))

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
        server, headers = self.server, self.headers
        if [host.lower() for host in headers.get_all("Host", [])] not in ([host] for host in server.hosts):
            raise ApiError(403, "wrong_host", "this server has another name")
        if headers.get("Origin") is not None:
            raise ApiError(403, "wrong_origin", "no web page has business here")
        name, slash, rest = self.path.partition("?")[0].removeprefix("/e/").partition("/")
        scheme, _, key = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.encode("utf-8", "replace"), server.key(name).encode()
        ):
            raise ApiError(401, "invalid_api_key", "the api key is missing, or of another episode")
        server.known(self.connection)
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

    def _body(self) -> dict[str, Any]:
        headers, server = self.headers, self.server
        if headers.get_content_type() != "application/json":
            raise ApiError(415, "wrong_type", "the body must be application/json")
        length = headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or headers.get("Transfer-Encoding") is not None:
            raise ApiError(411, "no_length", "the body's Content-Length is missing")
        if len(length) > 15 or int(length) > server.max_body:
            raise ApiError(413, "body_too_large", f"the body has more than {server.max_body} bytes")
        left, deadline, parts = int(length), time.monotonic() + server.body_s, []
        try:
            while left:
                self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self.rfile.read1(min(left, 2**20))  # pyright: ignore[reportAttributeAccessIssue]
                if not part:
                    raise ConnectionError("the body ended early")
                parts.append(part)
                left -= len(part)
        except TimeoutError:
            raise ApiError(408, "slow_body", f"the body did not come within {server.body_s:g} s") from None
        self.connection.settimeout(server.idle_s)
        self._is_unread = False
        return api.loads(b"".join(parts))

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        # What is left of a body is no next request.
        self.close_connection = self.close_connection or self._is_unread
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError, TimeoutError):
                self.wfile.write(data)

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

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself (a malformed head): plain, and the client's fault."""
        self.server.refused += 1
        self.close_connection, self.command = True, getattr(self, "command", None) or "GET"
        self.request_version = "HTTP/1.1"
        status = code if code < 500 else 400
        self._reply(status, ApiError(status, "malformed_request", "malformed request").body())

    def log_message(self, format: str, *args: Any) -> None:
        """Calls are counted; a log that strangers can fill is no log."""


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
