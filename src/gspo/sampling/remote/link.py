"""One sampler server, in the trainer's client: its address, its state, its requests, and the calls it answers.

Only the server's own thread uses the methods that call it and wait; any thread may send a `command`. Every call has a
deadline, and every call may be repeated after a lost reply.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gspo.sampling.remote import protocol
from gspo.sampling.remote.discovery import Address, registered
from gspo.sampling.remote.engine import Session
from gspo.sampling.weights.publish import Published
from gspo.system import HttpClient, Reply, ReplyTooLargeError
from gspo.types import Request, Sample

POLL_S = 0.2  # /collect waits this long for a sample; a new request or a new version may have to wait as long
PER_CALL, CALL_BYTES = 4096, 64 * 2**20  # limits of one /generate; a server accepts four times as many bytes


class DisconnectedError(Exception):
    """The server cannot be used now: no reply, a restart, or a failure of its sampler."""


class InvalidResponseError(DisconnectedError):
    """Invalid response: the reply contradicts the request or the protocol."""


class RefusedError(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, holder: Any = None) -> None:
        super().__init__(f"it refused ({status}): {message}")
        self.message = message
        self.holder = holder  # session of the trainer that the server works for, if that is the reason


class LinkState(Enum):
    DISCONNECTED = "disconnected"  # not registered yet, or lost; its thread tries again
    ATTACHED = "attached"  # works for this trainer; its weights are not verified yet
    SERVING = "serving"  # has verified weights and gets requests
    BANNED = "banned"  # sent too many invalid responses; gets nothing until its process restarts


@dataclass(slots=True)
class PendingRequest:
    """A request without its sample yet."""

    key: str
    request: Request
    is_sent: bool = False
    sent_version: int = 0  # weight version of its server when it was sent
    losses: int = 0  # servers lost while they had it


class Server:
    """One sampler server.

    http        sends the token with every request
    trainer     this trainer's session: a server works for the newest trainer
    answer_s    deadline of one call
    timeout_s   a server that samples nothing, or stays busy, for so long is disconnected (rollout.request_timeout)
    closed      set when the client ends
    """

    def __init__(
        self,
        index: int,
        folder: Path,
        http: HttpClient,
        trainer: Session,
        *,
        answer_s: float,
        timeout_s: float,
        closed: threading.Event,
    ) -> None:
        self.index, self.state, self.reason = index, LinkState.DISCONNECTED, "it has not registered yet"
        self.address: Address | None = None
        self.boot = ""  # id of its process
        self.version: int | None = None  # of its verified weights
        self.settled_version = -1  # the version that it loaded, or failed to load, last
        self.requests: dict[str, PendingRequest] = {}
        self.invalid_responses = self.refused_loads = 0
        self._folder, self._http, self._trainer = folder, http, trainer
        self._session = trainer.id  # as this server knows it
        self._answer_s, self._timeout_s, self._closed = answer_s, timeout_s, closed
        self._received: list[str] = []  # keys of samples to confirm with the next /collect
        self._turns, self._progress_at = -1, 0.0

    def name(self) -> str:
        return f"sampler {self.index}" + (f" ({self.address.url})" if self.address else "")

    @property
    def is_serving(self) -> bool:
        return self.state is LinkState.SERVING

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._received)

    def attach(self, identity: Mapping[str, Any]) -> bool:
        """Find the server, take it over, and compare its identity. True if its process is another than before."""
        self.address = registered(self._folder, self.index)
        if self.address is None:
            raise DisconnectedError(f"it has not registered in {self._folder}")
        try:
            reply = self._call("/attach")
        except RefusedError as refusal:
            if not isinstance(refusal.holder, str) or not self._trainer.outbid(refusal.holder):
                raise
            self._session = self._trainer.id
            reply = self._call("/attach")
        boot = protocol.field(reply, "boot", str)
        is_restarted = bool(self.boot) and boot != self.boot
        # A ban lasts as long as the process.
        if boot == self.boot and self.state is LinkState.BANNED:
            raise DisconnectedError(self.reason)
        if boot != self.boot:
            self.boot, self.invalid_responses = boot, 0
        self.state = LinkState.ATTACHED
        theirs = protocol.field(reply, "facts", dict)
        for name, value in identity.items():
            if theirs.get(name) != value:
                self.state = LinkState.BANNED  # a retry cannot help: only a new process can have another identity
                raise InvalidResponseError(f"its {name} is {theirs.get(name)!r}, the trainer's is {value!r}")
        return is_restarted

    def generate(self, requests: Sequence[PendingRequest]) -> None:
        packed = ({"key": pending.key, **protocol.pack_request(pending.request)} for pending in requests)
        # One call has a limited size, so that its body is accepted and its deadline is met.
        for part in protocol.portions(packed, PER_CALL, CALL_BYTES):
            self.call("/generate", requests=part)
        if requests:
            self.note_progress()

    def collect(self, take: Callable[[str, Sample], None], is_paused: Callable[[], bool]) -> None:
        """Give finished samples to `take(key, sample)`, and confirm those of the last call."""
        # If this call fails, the server is disconnected, and the next attach drops its unconfirmed samples.
        received, self._received = self._received, []
        reply = self.call("/collect", received=received, wait_s=POLL_S)
        for item in protocol.field(reply, "samples", list):
            try:
                key, sample = protocol.field(item, "key", str), protocol.unpack_sample(item.get("sample"))
            except (protocol.WireError, AttributeError) as error:
                raise InvalidResponseError(f"it sent an invalid sample: {error}") from None
            # Also for a late sample: an unconfirmed sample would be sent again with every call.
            self._received.append(key)
            take(key, sample)
        if (failure := reply.get("failure")) is not None:
            raise DisconnectedError(f"its sampler failed: {failure}")
        turns = protocol.field(reply, "turns", int)
        # No requests or a pause: the server is not expected to make progress.
        if turns != self._turns or not self.requests or is_paused():
            self._turns = turns
            self.note_progress()
        elif time.monotonic() - self._progress_at > self._timeout_s:
            raise DisconnectedError(
                f"it answers but has sampled nothing for {self._timeout_s:g} s (rollout.request_timeout)"
            )

    def note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def load(self, published: Published, probe: Sequence[Sequence[int]], is_current: Callable[[], bool]) -> Any:
        """Have the server load a version; its probe result, or None if a newer version was published meanwhile."""
        body = {
            "version": published.version,
            "path": published.address(self.index, self.boot),
            "sha256": published.sha256,
            "probe": probe,
            "wait_s": published.wait_s,
        }
        what, deadline = f"weight version {published.version}", time.monotonic() + self._timeout_s
        try:
            # Short calls, repeated until the load has finished: a long load does not exceed the deadline of a call.
            while (reply := self.call("/load_weights", **body)).get("loading") is not False:
                if not is_current():
                    return None
                published.deliver(self.index, self.boot)
                if time.monotonic() > deadline:
                    raise DisconnectedError(f"{what} did not arrive in {self._timeout_s:g} s")
        except RefusedError as refusal:
            if not is_current():
                return None  # the file was removed for the newer version
            self.refused_loads += 1
            raise DisconnectedError(f"it does not load {what}: {refusal.message}") from None
        except RuntimeError as error:
            raise DisconnectedError(f"{what} could not be sent: {error}") from None
        # The reply must name the version and the content that were requested.
        if (reply.get("version"), reply.get("sha256")) != (published.version, published.sha256):
            raise InvalidResponseError(f"it should have loaded {what}, but reports version {reply.get('version')}")
        return reply.get("probe") or []

    def disconnect(self, reason: str, settled_version: int, is_banned: bool) -> list[PendingRequest]:
        """Stop using the server; its requests, for others to sample."""
        self.state = LinkState.BANNED if is_banned or self.state is LinkState.BANNED else LinkState.DISCONNECTED
        self.version, self.reason, self.settled_version = None, reason, settled_version
        requests, self.requests, self._received = list(self.requests.values()), {}, []
        return requests

    def call(self, path: str, /, **body: Any) -> dict[str, Any]:
        """The reply of the process that this client has attached to."""
        reply = self._call(path, **body)
        if reply.get("boot") != self.boot:
            raise DisconnectedError("it has restarted")
        return reply

    def command(self, path: str, timeout_s: float | None = None) -> Future[Reply]:
        """Send a command without waiting: the reply does not matter. Its own thread notices a server that is gone."""
        assert self.address is not None
        body = json.dumps({"session": self._session}).encode()
        url = self.address.url + path
        return self._http.run(self._http.request("POST", url, body, timeout_s=timeout_s or self._answer_s))

    def _call(self, path: str, /, **body: Any) -> dict[str, Any]:
        """The reply to a POST (to a GET for /health)."""
        assert self.address is not None
        is_get = path == "/health"
        content = None if is_get else json.dumps({"session": self._session, **body}).encode()
        deadline = time.monotonic() + self._timeout_s
        # Repeat only while the server reports that it is busy; every other failure ends the call.
        while not self._closed.is_set():
            try:
                url = self.address.url + path
                reply = self._http.call("GET" if is_get else "POST", url, content, timeout_s=self._answer_s)
                value = protocol.loads(reply.content)
            except TimeoutError:
                raise DisconnectedError(f"{path}: no answer in {self._answer_s:g} s") from None
            except ConnectionError as error:
                raise DisconnectedError(f"{path}: {error}") from error
            except (ReplyTooLargeError, protocol.WireError) as error:
                raise InvalidResponseError(f"{path}: {error}") from None
            if reply.status == 200:
                return value
            if value.get("kind") != "busy" or time.monotonic() > deadline:
                raise RefusedError(reply.status, str(value.get("error"))[:500], value.get("session"))
        raise DisconnectedError("the client is closed")
