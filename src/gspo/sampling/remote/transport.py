"""One HTTP exchange with a sampler server, within a deadline. Torch-free."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gspo.sampling.remote import protocol as wire

MAX_REPLY = 512 * 2**20


class RefusedError(Exception):
    """The server answered with an error of its own."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Channel:
    """A connection that is kept; every failure closes it. `hang_up` may be called by another thread."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._token, self._timeout_s = token, timeout_s
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """GET, or POST where there is a body. OSError or HTTPException: no answer; WireError: nonsense."""
        deadline = time.monotonic() + self._timeout_s
        connection = self._connection
        head = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if connection.sock is None:
            connection.connect()
        sock: socket.socket = connection.sock  # pyright: ignore[reportAssignmentType]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(self._timeout_s)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), head)
        response = connection.getresponse()
        parts, total = [], 0
        while part := response.read1(2**20):
            total += len(part)
            if total > MAX_REPLY:
                raise wire.WireError(f"the reply has more than {MAX_REPLY} bytes")
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            parts.append(part)
            sock.settimeout(left)
        response.close()  # read1 to the end does not say that the connection is free again
        reply = wire.loads(b"".join(parts))
        if response.status != 200:
            raise RefusedError(response.status, str(reply.get("kind")), str(reply.get("error"))[:500])
        return reply

    def hang_up(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        self._connection.close()
