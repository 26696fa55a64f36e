"""One way to serve HTTP: starlette and uvicorn in a thread, behind one guard.

Host, Origin and key are checked before a byte of a body is read. Heads and bodies are bounded in size and time.
Connections are bounded in number: at the bound the oldest connection that has not shown a key is closed. A client that
disconnects cancels its request. Each server decides who has a key and how an error is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gspo.errors import GspoError

MAX_HEAD, MAX_FIELDS = 2**16, 100  # bytes and fields of a request's head
GRACE_S = 0.25  # from a client's end of file to closing: a client that only half-closes still gets quick replies


class RefusedCallError(GspoError):
    """A request that is answered with an HTTP error status. `details` are further fields of the reply."""

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.details = status, code, details

    def body(self) -> dict[str, Any]:
        return {"error": str(self), "kind": self.code, **self.details}


class Json(Response):
    """A JSON reply. Unlike starlette's, it can hold NaN, which a broken model's log-probs may be."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response] | Response]) -> Route:
    """A route of one method; starlette would add HEAD to GET."""
    made = Route(path, endpoint, methods=[method])
    made.methods = {method}
    return made


async def finished(future: Future[Any], timeout_s: float | None) -> bool:
    """Wait for a future of another thread, without cancelling it; whether it is done."""
    if future.done():
        return True
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(done.set)

    # The callback runs in the thread that completes the future, so it must not touch the event loop directly.
    future.add_done_callback(wake)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await done.wait()  # wait: none, asyncio.timeout around it
    # The future may complete between the timeout and this line.
    return future.done()


class HttpServer:
    """Listens and serves from its construction to `close`. A subclass overrides `authorize`, and `refusal` and `count`.

    names     host names under which clients may address it
    own_pages allow requests with an Origin, if it is this server's own address
    head_s    seconds from connecting to showing a key; body_s: for a body; idle_s: between two requests, or to read a
              reply
    """

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        names: Sequence[str] = ("127.0.0.1", "localhost"),
        max_connections: int,
        max_body: int = 0,
        idle_s: float,
        head_s: float = 10.0,
        body_s: float = 30.0,
        own_pages: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.max_connections, self.max_body = max_connections, max_body
        self.head_s, self.body_s, self.idle_s = head_s, body_s, idle_s
        self.refused = 0
        self.unauthenticated: dict[Connection, None] = {}  # oldest first
        # The socket is opened here, so that the port is known, and errors are raised, before the thread starts.
        listener = socket.create_server((host, port), backlog=128)
        self.port = int(listener.getsockname()[1])
        self.hosts = {f"{name}:{self.port}" for name in names}
        self.origins = {f"http://{name}" for name in self.hosts} if own_pages else set[str]()
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, server=self)],
            exception_handlers=dict.fromkeys((RefusedCallError, HTTPException, Exception), self.on_error),
        )
        # A wrong slash at the end of a path is an error (404), not a redirect.
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app,
            loop="uvloop",  # with httptools it keeps up with a thread per connection; asyncio and h11 do not
            http=partial(Connection, self),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a log that strangers can fill is no log; addresses may hold keys
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=list((headers or {}).items()),
            backlog=128,
            timeout_keep_alive=86400,  # `_Uvicorn.on_tick` closes idle connections
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http server", daemon=True)
        self._thread.start()

    def authorize(self, request: Request) -> None:
        """Raise a refusal unless the request has a key."""
        raise NotImplementedError

    def refusal(self, status: int, code: str, message: str) -> RefusedCallError:
        """An error of the guard, in the format of this server."""
        return RefusedCallError(status, code, message)

    def count(self, error: RefusedCallError, request: Request | None) -> None:
        """Count a refusal, before it is sent. There is no request if the head was malformed."""
        self.refused += 1

    async def on_error(self, request: Request, error: Exception) -> Response:
        # Errors of starlette's router get the format of this server.
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = self.refusal(404, "no_such_route", "no such route")
        elif isinstance(error, HTTPException):
            path, method = request.scope["path"][:64], request.method[:16]
            error = self.refusal(405, "wrong_method", f"{path} does not take {method}")
        if isinstance(error, RefusedCallError):
            self.count(error, request)
        else:
            error = self.refusal(500, "internal", f"{type(error).__name__}: {error}")
        return Json(error.body(), error.status)

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self._server.should_exit = True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has stopped."""
        self._thread.join(timeout_s)  # wait: timeout_s, the caller

    def close(self) -> None:
        self.stop()
        self.wait(10)  # wait: 10 s, the caller


def bearer_key(request: Request) -> bytes:
    """The key of `Authorization: Bearer KEY`, or nothing."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.encode("latin-1") if scheme.lower() == "bearer" else b""


class Guard:
    """The ASGI middleware: checks who sends a request, then bounds the body that the application reads."""

    def __init__(self, app: ASGIApp, server: HttpServer) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        # `connection_lost` cancels this task if the client disconnects.
        connection.task = asyncio.current_task()
        request = Request(scope)
        # Whether the client sends a body, from the head alone.
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        is_read = False

        async def read() -> Message:
            nonlocal is_read
            # The application gets the whole body as one message; later messages are those of the connection.
            if is_read:
                return await receive()
            body = await self._body(request, receive)
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def write(message: Message) -> None:
            if message["type"] == "http.response.start" and has_body and not is_read:
                # The connection is closed, so that an unread body is not taken for the next request.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            # A client that does not read its reply must not occupy the connection forever.
            connection.expect_within(self.server.idle_s)
            await send(message)
            connection.expect_within(math.inf)

        # Refuse before the application runs, and so before any byte of the body is read.
        try:
            self._check(request)
            connection.authenticated()
        except RefusedCallError as error:
            response = await self.server.on_error(request, error)
            await response(scope, read, write)
        else:
            await self.app(scope, read, write)
        finally:
            # Between two requests, the idle limit applies.
            connection.expect_within(self.server.idle_s)

    def _check(self, request: Request) -> None:
        server, headers = self.server, request.headers
        size = sum(len(name) + len(value) for name, value in headers.raw) + len(request.scope["raw_path"])
        if size + len(request.scope["query_string"]) > MAX_HEAD or len(headers.raw) > MAX_FIELDS:
            raise server.refusal(431, "malformed_request", "the head of the request is too large")
        # Against DNS rebinding: a web page must not reach this server under a host name of its own.
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in server.hosts:
            raise server.refusal(403, "wrong_host", "this server has another name")
        # `GET http://other/path` names a host beside the Host field.
        if not request.scope["state"]["is_plain_path"]:
            raise server.refusal(400, "malformed_request", "the request must name a path, not an address")
        if headers.get("origin", None) not in {None, *server.origins}:
            raise server.refusal(403, "wrong_origin", "this server does not answer to other web pages")
        server.authorize(request)

    async def _body(self, request: Request, receive: Receive) -> bytes:
        server, headers = self.server, request.headers
        # Check the declared type and length before a byte is read.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise server.refusal(415, "wrong_type", "the body must be application/json")
        length = headers.get("content-length", "")
        if not length.isdigit() or "transfer-encoding" in headers:
            raise server.refusal(411, "no_length", "the body's Content-Length is missing")
        if int(length) > server.max_body:
            raise server.refusal(413, "body_too_large", f"the body has more than {server.max_body} bytes")
        body, more = bytearray(), True
        try:
            # One deadline for the whole body: a client that sends byte by byte does not extend it.
            async with asyncio.timeout(server.body_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message["body"]
                    more = message["more_body"]
        except TimeoutError:
            raise server.refusal(408, "slow_body", f"the body did not arrive within {server.body_s:g} s") from None
        return bytes(body)


class Connection(HttpToolsProtocol):
    """uvicorn's connection with a deadline and a bounded head. Only the event loop's thread uses it."""

    def __init__(self, server: HttpServer, *, app_state: dict[str, Any], **settings: Any) -> None:
        super().__init__(app_state={**app_state, "connection": self}, **settings)
        self._owner = server
        self.task: asyncio.Task[Any] | None = None  # of the request that is being answered
        self.deadline = time.monotonic() + server.head_s
        self._in_head, self._head_size = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        waiting = self._owner.unauthenticated
        waiting[self] = None
        # Connections without a key are closed first, so that they cannot lock out authenticated clients.
        if len(self.connections) > self._owner.max_connections:
            next(iter(waiting))._refuse(429, "too_many_connections", "the server has too many connections")

    def authenticated(self) -> None:
        """The request has a key: its body and its answer have deadlines of their own, not that of the head."""
        self._owner.unauthenticated.pop(self, None)
        self.expect_within(math.inf)

    def expect_within(self, seconds: float) -> None:
        """Set the deadline; without a key it stays what it was."""
        # Without a key, activity does not extend the deadline: the head must arrive in time.
        if self not in self._owner.unauthenticated:
            self.deadline = time.monotonic() + seconds

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The client may have closed only its sending side and still wait for the reply.
        if self._is_busy():
            self.loop.call_later(GRACE_S, self.transport.close)
        return self._is_busy()  # False: the event loop closes the connection

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._owner.unauthenticated.pop(self, None)
        self.app_state = {}  # it held a reference to this object
        # The reply can no longer be sent.
        if self.task is not None:
            self.task.cancel()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        # In the scope, because `url` is already that of the next request if a client sends several at once.
        self.scope["state"]["is_plain_path"] = self.url.startswith((b"/", b"*"))  # pyright: ignore[reportTypedDictNotRequiredAccess]
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        # Only data that leaves the head incomplete counts here; `Guard._check` bounds a complete head.
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse(431, "malformed_request", "the head of the request is too large")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that httptools cannot parse."""
        if self._is_busy():  # answer the request before them, then close
            self.cycle.keep_alive = False
            self.transport.pause_reading()
        elif "Content-Length" in (cause := str(sys.exc_info()[1])) or "Transfer-Encoding" in cause:
            self._refuse(411, "no_length", "the body's Content-Length is missing or malformed")
        else:
            self._refuse(400, "malformed_request", "malformed request")

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer without a request, and close."""
        # Removed first, so that the next connection does not choose this one again.
        self._owner.unauthenticated.pop(self, None)
        error = self._owner.refusal(status, code, message)
        self._owner.count(error, None)
        reply = Json(error.body())
        fields = (*self.server_state.default_headers, *reply.raw_headers, (b"connection", b"close"))
        head = b"".join(b"%s: %s\r\n" % field for field in fields)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(line + head + b"\r\n" + bytes(reply.body))
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: close the connections whose deadline is over."""
        now = time.monotonic()
        # A copy: a connection that is lost is removed from the set.
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.deadline < now:
                connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Connections that outlived the graceful shutdown.
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore[reportOptionalMemberAccess]
        # One turn of the loop, in which the aborted connections are cleaned up.
        await asyncio.sleep(0)
