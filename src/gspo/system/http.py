"""An HTTP server that strangers can reach and only holders of a key can use: the guard before this package's servers.

Host, origin and key are checked before a byte of a body is read; bodies are bounded in size and time; connections are
bounded in number, and one that shows no key in time is sent away. Who may ask what, and in which words a call is
refused, is the business of the server that stands behind it. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gspo.errors import GspoError


class RefusedCallError(GspoError):
    """A call that is answered with an HTTP status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        return {"error": str(self), "kind": self.code}


class GuardedServer(ThreadingHTTPServer):
    """Counts connections and refusals, and knows who has shown a key. `names`: as which callers may address it."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[GuardedHandler],
        *,
        names: tuple[str, ...],
        max_connections: int,
        max_body: int,
        idle_s: float,
    ) -> None:
        self.max_connections, self.max_body = max_connections, max_body
        self.head_s, self.body_s, self.idle_s = 10.0, 30.0, idle_s  # idle: between two calls of who has a key
        self.refused = 0
        self._strangers: dict[socket.socket, float] = {}  # connections that have shown no key yet
        self._open = 0
        self._lock = threading.Lock()
        super().__init__(address, handler)
        self.port = int(self.server_address[1])
        self.hosts = {f"{name}:{self.port}" for name in names}

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if self._open >= self.max_connections:
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


class GuardedHandler(BaseHTTPRequestHandler):
    """One connection. A server's own handler overrides `serve`, `refusal` and `count`."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gspo", ""
    disable_nagle_algorithm = True
    server: GuardedServer  # pyright: ignore[reportIncompatibleVariableOverride]
    is_unread = False  # the call has a body that nobody has read: what is left of it is no next request

    def serve(self) -> None:
        """Check the call, do it and reply, or raise a refusal."""
        raise NotImplementedError

    def refusal(self, status: int, code: str, message: str) -> RefusedCallError:
        """An error in the server's own words, of what is refused here."""
        return RefusedCallError(status, code, message)

    def count(self, error: RefusedCallError) -> None:
        """Note a refusal, before it is told."""
        self.server.refused += 1

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.head_s)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every method comes here: none may answer without a key
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        self.is_unread = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
        try:
            self.serve()
        except RefusedCallError as error:
            self.count(error)
            self.reply(error.status, error.body())
        except ConnectionError:
            self.close_connection = True
        except Exception as error:  # a bug of ours, or no memory: told to the caller, who can act on it
            self.reply(500, self.refusal(500, "internal", f"{type(error).__name__}: {error}").body())

    def presented(self) -> tuple[str, bytes]:
        """Scheme and key of the call, as they were sent."""
        scheme, _, key = (self.headers.get("Authorization") or "").partition(" ")
        return scheme, key.encode("utf-8", "replace")

    def check_sender(self, hosts: list[str], has_key: bool, without_key: str) -> None:
        """`hosts`: what the call names as its host. From here on the connection is no stranger's."""
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise self.refusal(403, "wrong_host", "this server has another name")
        if self.headers.get("Origin") is not None:
            raise self.refusal(403, "wrong_origin", "no web page has business here")
        if not has_key:
            raise self.refusal(401, "invalid_api_key", without_key)
        self.server.known(self.connection)

    def read_body(self) -> bytes:
        headers, server = self.headers, self.server
        if headers.get_content_type() != "application/json":
            raise self.refusal(415, "wrong_type", "the body must be application/json")
        length = headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or headers.get("Transfer-Encoding") is not None:
            raise self.refusal(411, "no_length", "the body's Content-Length is missing")
        if len(length) > 15 or int(length) > server.max_body:
            raise self.refusal(413, "body_too_large", f"the body has more than {server.max_body} bytes")
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
            raise self.refusal(408, "slow_body", f"the body did not come within {server.body_s:g} s") from None
        self.connection.settimeout(server.idle_s)
        self.is_unread = False
        return b"".join(parts)

    def reply(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.close_connection = self.close_connection or self.is_unread
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError, TimeoutError):
                self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself (a malformed head): plain, and the client's fault."""
        self.server.refused += 1
        self.close_connection, self.command = True, getattr(self, "command", None) or "GET"
        self.request_version = "HTTP/1.1"
        status = code if code < 500 else 400
        self.reply(status, self.refusal(status, "malformed_request", "malformed request").body())

    def log_message(self, format: str, *args: Any) -> None:
        """Refusals are counted; a log that strangers can fill is no log."""
