"""HTTP requests by httpx with a total deadline and a bounded reply. Redirects are never followed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import httpx

T = TypeVar("T")
MAX_REPLY = 512 * 2**20
_CLOSE_S = 5.0


class Reply(NamedTuple):
    status: int
    headers: httpx.Headers
    content: bytes


class ReplyTooLargeError(ValueError):
    """The reply has more bytes than allowed."""


class HttpClient:
    """An httpx client for synchronous code. It keeps connections, and any thread may call it.

    Requests run on an event loop in a thread of the client: only there can a total deadline end a request whose bytes
    trickle in, since httpx's own timeouts restart with each byte.

    base_url    prefix of relative addresses
    socket      path of a Unix socket to connect to instead of the address's host
    trust_env   use the proxies of the environment (HTTPS_PROXY, NO_PROXY, …)
    """

    def __init__(
        self,
        base_url: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        socket: str | None = None,
        max_connections: int | None = None,
        max_reply: int = MAX_REPLY,
        trust_env: bool = False,
    ) -> None:
        # Idle connections are bounded. Active ones are not: a request must not wait for another one's connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_connections)
        self._client = httpx.AsyncClient(
            # With a transport of its own, a client reads no proxies from the environment.
            transport=None if trust_env else httpx.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False),
            base_url=base_url,
            # "identity": replies are read as raw bytes, so they must not be compressed.
            headers={"Accept-Encoding": "identity", **(headers or {})},
            limits=limits,
            # httpx's timeouts are per read; `request` sets a total deadline.
            timeout=None,
            trust_env=trust_env,
        )
        self._max_reply, self._closed = max_reply, False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http client", daemon=True)
        self._thread.start()

    def call(self, method: str, url: str, body: bytes | None = None, *, timeout_s: float) -> Reply:
        """Send a request and wait for the whole reply, whatever its status.

        Raises TimeoutError after `timeout_s`, ConnectionError if there is no complete reply, ReplyTooLargeError.
        """
        future = self.run(self.request(method, url, body, timeout_s=timeout_s))
        try:
            # wait: the request's total deadline, the caller
            return future.result(timeout_s + _CLOSE_S)  # the loop's own deadline comes first
        except TimeoutError:
            future.cancel()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, such as `request(…)`, on the client's event loop."""
        if self._closed:
            # An unawaited coroutine would cause a warning.
            coroutine.close()
            raise ConnectionError("the HTTP client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def request(
        self, method: str, url: str, body: bytes | None = None, *, timeout_s: float | None = None
    ) -> Reply:
        """As `call`, on the client's event loop. `timeout_s` None: no deadline."""
        head = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, url, content=body, headers=head) as response,
            ):
                parts, total = [], 0
                # Read in parts, so that a reply that is too large is refused before it fills the memory.
                async for part in response.aiter_raw():
                    total += len(part)
                    if total > self._max_reply:
                        raise ReplyTooLargeError(f"the reply has more than {self._max_reply} bytes")
                    parts.append(part)
                return Reply(response.status_code, response.headers, b"".join(parts))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error

    def close(self) -> None:
        """End the requests under way (their callers get CancelledError) and close all connections."""
        if self._closed:
            return
        self._closed = True
        # Cancel requests on the loop's own thread, then stop the loop, then close it.
        with suppress(TimeoutError):
            # wait: _CLOSE_S, the caller
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)  # wait: _CLOSE_S, the caller
        # A loop that still runs cannot be closed; its daemon thread ends with the process.
        if not self._thread.is_alive():
            self._loop.close()

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # wait: none, close has the deadline
        await self._client.aclose()

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
