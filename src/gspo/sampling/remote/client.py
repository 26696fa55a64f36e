"""The sampler as seen by a trainer whose samplers are servers: `engine.Sampler` over N of them.

One thread per server finds it, gives it the published weights, hands it requests and fetches samples; every exchange is
short and has a deadline. A server that does not answer, restarts or answers nonsense loses its requests to the others
at once and gets new ones only after it has loaded the last published weights and proved it. A sample is used once: its
key is forgotten with its arrival. Tokens do not depend on who sampled them, as every draw is a function of its key.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gspo.errors import RolloutError, WeightSyncError
from gspo.sampling.remote import protocol as wire
from gspo.sampling.remote.discovery import Address, given_up, registered
from gspo.sampling.remote.transport import Channel, RefusedError
from gspo.sampling.requests import validate_request
from gspo.sampling.verify import Experts, invalid_reason
from gspo.sampling.weights.broadcast import Broadcaster, Published
from gspo.sampling.weights.probe import ScoreSequences, mismatch, probe_sequences
from gspo.sampling.weights.publish import publish
from gspo.sampling.weights.store import ChooseStore
from gspo.types import Request, Sample

if TYPE_CHECKING:
    import torch

ANSWER_S = 30.0  # an answer takes longer than this only if there is none
POLL_S = 0.2  # a poll waits this long for news, and so may a new order
IDLE_S = 2.0  # between two looks at a server without work
JOIN_S = 60.0  # the first step waits this long for servers that are still starting
PER_CALL, CALL_BYTES = 4096, 64 * 2**20  # requests of a call, and about their bytes; a server takes four times that


class _LostError(Exception):
    """This server cannot be worked with now; its requests go to others."""


class _LieError(_LostError):
    """It answered, and the answer cannot be true."""


@dataclass(slots=True)
class _Ticket:
    """An outstanding request."""

    key: str
    request: Request
    sent: bool = False
    since: int = 0  # weight version of its server when it was sent
    losses: int = 0  # servers lost with it


@dataclass(eq=False)
class _Link:
    """One server, as far as we know."""

    index: int
    reason: str = "has not registered yet"
    address: Address | None = None
    channel: Channel | None = None
    boot: str = ""
    serving: bool = False
    version: int | None = None  # of verified weights
    tickets: dict[str, _Ticket] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    refusals: int = 0  # of the published weights
    settled: int = -1  # the version it has taken, or failed to
    lies: int = 0
    barred: str = ""  # the boot that lied too often
    turns: int = -1
    moved: float = 0.0  # when its sampler last did something

    def name(self) -> str:
        return f"sampler {self.index}" + (f" ({self.address.url})" if self.address else "")


class HttpSampler:
    """Implements `gspo.sampling.api.Sampler` over the servers that register in `folder`.

    identity    what every server must be: model, seed, vocabulary, end-of-sequence tokens; others are refused
    weight_store  where a version is published, given the servers' addresses
    reference   the trainer's own log-probs of the probe, at the weights just published; None: servers are compared
                with the first that loaded them
    timeout_s   without any answer for so long the run fails (rollout.request_timeout)
    retries     servers that may be lost with one request (rollout.request_retries)
    experts     what the routes of a mixture's samples are made of, and whether they must be there
    join_s      the first step waits this long for servers that are still starting
    colocated   they share the trainer's device: they sleep from the last sample of a batch to the next request or
                weights
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        token: str,
        *,
        identity: Mapping[str, Any],
        max_context: int,
        ends: Collection[int],
        weight_store: ChooseStore,
        dtype: torch.dtype,
        reference: ScoreSequences | None,
        sees_text: bool = True,
        timeout_s: float = 3600.0,
        retries: int = 3,
        experts: Experts = Experts(),  # noqa: B008 - a tuple
        join_s: float = JOIN_S,
        colocated: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.version = -1
        self._folder, self._token, self._identity = folder, token, dict(identity)
        self._num_vocab, self._max_context, self._sees_text = int(identity["num_vocab"]), max_context, sees_text
        self._ends, self._weight_store, self._dtype, self._reference = frozenset(ends), weight_store, dtype, reference
        self._timeout_s, self._retries, self._say, self._experts = timeout_s, retries, say, experts
        self._join_s, self._colocated, self._asleep = join_s, colocated, False
        # So that a server can be given up and its work be done by others before the whole batch is late.
        self._answer_s = min(ANSWER_S, timeout_s / 3)
        # Newer trainers win over older ones that were left behind.
        self._session = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self._next_key = 0
        self._changed = threading.Condition(threading.RLock())
        self._tickets: dict[str, _Ticket] = {}  # all outstanding
        self._pending: list[_Ticket] = []  # those without a server
        self._done: deque[Sample] = deque()
        self._partial: list[Sample] | None = None  # where an abort gathers
        self._paused = self._closed = False
        self._published: Published | None = None
        self._probe = probe_sequences(self._num_vocab)
        self._expected: list[NDArray] | None = None
        self._started = self._without_since = time.monotonic()
        self._fatal: Exception | None = None
        self._counts: Counter[str] = Counter()
        self._notes: deque[str] = deque()
        self._links = [_Link(index) for index in range(count)]
        self._threads = [
            threading.Thread(target=self._tend, args=(link,), name=f"sampler {link.index}", daemon=True)
            for link in self._links
        ]
        for thread in self._threads:
            thread.start()

    # The interface

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:
            validate_request(
                request, num_vocab=self._num_vocab, max_context=self._max_context, sees_text=self._sees_text
            )
        with self._changed:
            tickets = []
            for request in requests:
                tickets.append(_Ticket(str(self._next_key), request))
                self._next_key += 1
            self._tickets |= {ticket.key: ticket for ticket in tickets}
            self._assign(tickets)
            self._changed.notify_all()
        self.wake()

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            self._tell()
            with self._changed:
                if not self._done:
                    if not self._tickets or self._paused or self._closed:
                        break
                    self._refuse_hopeless()
                    left = 0.5 if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        if deadline_s is not None and deadline_s >= self._timeout_s:
                            raise self._failed(f"{len(self._tickets)} samples are missing after {deadline_s:g} s")
                        return
                    self._changed.wait(min(left, 0.5))
                    continue
                sample = self._done.popleft()
            yield sample
        if not self._tickets:
            self.sleep()

    def abort(self) -> list[Sample]:
        with self._changed:
            self._partial = []
            self._give_back(self._pending)
            self._pending = []
            for link in self._links:
                self._give_back([ticket for ticket in link.tickets.values() if not ticket.sent])
                link.tickets = {key: ticket for key, ticket in link.tickets.items() if ticket.sent}
            asked = [link for link in self._links if link.tickets]
        deadline = time.monotonic() + self._answer_s
        while asked and time.monotonic() < deadline:
            self._order(asked, "/abort")
            with self._changed:
                self._changed.wait_for(lambda: not self._tickets, timeout=1.0)
                asked = [link for link in asked if link.tickets]  # what was on its way when we asked
        with self._changed:
            self._give_back(list(self._tickets.values()))
            for link in self._links:
                link.tickets = {}
            partial, self._partial = self._partial, None
        return partial

    def pause(self) -> None:
        with self._changed:
            self._paused = True
            self._changed.notify_all()
        self._order(self._links, "/pause")

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            for link in self._links:
                link.moved = time.monotonic()
        self._order(self._links, "/resume")

    def sleep(self) -> None:
        """Servers with a device of their own have nothing to give up."""
        if self._colocated and not self._asleep:
            self._asleep = True
            self._order(self._links, "/sleep")

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._order(self._links, "/wake")

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Publish a version and have every server that answers take it; the others get it before their next request."""
        if tensors is None:
            raise WeightSyncError("sampler servers hold their own weights: load_weights needs the tensors")
        self.wake()
        first = self._published is None
        if first:
            self._await_registrations()
        store = self._weight_store([registered(self._folder, link.index) for link in self._links])
        is_broadcast = isinstance(store, Broadcaster)
        published = store.publish(version, tensors) if is_broadcast else publish(store, version, tensors)
        expected = None if self._reference is None else self._reference(self._probe)
        with self._changed:
            before, self._published, self._expected = self._published, published, expected
            self.version = version
            for link in self._links:
                link.refusals = 0
            self._changed.notify_all()
        self._await_load(version, first)
        if before is not None:
            before.forget(published)

    def health(self) -> Mapping[str, Any]:
        with self._changed:
            return {
                "version": self.version,
                "outstanding": len(self._tickets),
                "servers": [
                    {"name": link.name(), "serving": link.serving, "outstanding": len(link.tickets)}
                    | ({} if link.serving else {"reason": link.reason})
                    for link in self._links
                ],
                **{name: self._counts[name] for name in ("lost", "lies", "moved_requests", "late_samples", "restarts")},
            }

    def close(self) -> None:
        with self._changed:
            busy = [link for link in self._links if link.tickets]
            self._closed = True
            self._changed.notify_all()
        self._order(busy, "/abort", timeout_s=1.0)
        for link, thread in zip(self._links, self._threads, strict=True):
            thread.join(timeout=POLL_S * 2)
            _hang_up(link)
            thread.join(timeout=2.0)
        self._tell()
        if self._published is not None:
            self._published.forget()

    # Waiting, always with a deadline

    def _await_registrations(self) -> None:
        """Which servers share this machine decides where the weights go; those still starting are waited for."""
        deadline = time.monotonic() + min(self._timeout_s, self._join_s)
        while time.monotonic() < deadline:
            if all(registered(self._folder, n) or given_up(self._folder, n) for n in range(len(self._links))):
                return
            time.sleep(0.1)

    def _await_load(self, version: int, first: bool) -> None:
        begin = time.monotonic()
        with self._changed:
            if first:
                self._without_since = begin
            while True:
                serving = [link for link in self._links if link.serving and link.version == version]
                grace = first and time.monotonic() - begin < min(self._timeout_s, self._join_s)
                open_ones = [
                    link for link in self._links if link.settled != version and (link.serving or link.version or grace)
                ]
                if serving and not open_ones:
                    break
                if not serving and all(link.refusals > self._retries for link in self._links):
                    raise WeightSyncError(
                        f"no sampler server takes weight version {version}: {self._links[0].name()}: "
                        f"{self._links[0].reason}"
                    )
                self._refuse_hopeless()
                self._tell()
                if time.monotonic() - begin > self._timeout_s:
                    if serving:
                        break
                    raise self._failed(f"weight version {version} reached none of them in {self._timeout_s:g} s")
                self._changed.wait(0.2)
        self._tell()

    def _refuse_hopeless(self) -> None:
        """Raise what makes waiting vain: nobody serves, and nobody has for too long."""
        if self._fatal is not None:
            raise self._fatal
        if any(link.serving for link in self._links):
            return
        if all(link.barred for link in self._links):
            raise self._failed("none of them can be believed")
        if all(gone := [given_up(self._folder, link.index) for link in self._links]):
            raise RolloutError(f"sampler servers: none of them is started again: {gone[0]}")
        if time.monotonic() - self._without_since > self._timeout_s:
            raise self._failed(f"none of them has served for {self._timeout_s:g} s")

    def _failed(self, what: str) -> RolloutError:
        lines = [
            f"{link.name()}: " + (f"{len(link.tickets)} samples outstanding" if link.serving else link.reason)
            for link in self._links
        ]
        return RolloutError(
            f"sampler servers: {what}. {'; '.join(lines)}. Servers that need longer want a higher "
            "rollout.request_timeout"
        )

    def _tell(self) -> None:
        """Notes of the servers' threads are said by the trainer's: a display belongs to one thread."""
        while self._notes:
            with suppress(IndexError):
                self._say(self._notes.popleft())

    # Requests and their servers; all under the lock

    def _assign(self, tickets: Sequence[_Ticket]) -> None:
        """Give requests to the servers with the least to do; those of one prompt go together and share its prefill."""
        serving = [link for link in self._links if link.serving]
        if not serving:
            self._pending += tickets
            return
        groups: dict[tuple[int, ...], list[_Ticket]] = {}
        for ticket in tickets:
            groups.setdefault(ticket.request.prompt, []).append(ticket)
        for group in groups.values():
            link = min(serving, key=lambda link: len(link.tickets))
            link.tickets |= {ticket.key: ticket for ticket in group}

    def _give_back(self, tickets: Sequence[_Ticket]) -> None:
        """What an abort leaves of requests that no server has said anything about."""
        for ticket in tickets:
            request = ticket.request
            self._tickets.pop(ticket.key, None)
            said = request.prefix or Sample.of(request.id, [], [], self.version)
            assert self._partial is not None
            self._partial.append(replace(said, id=request.id, finish="abort"))

    def _lose(self, link: _Link, why: str) -> None:
        _hang_up(link)
        if self._closed:
            return
        with self._changed:
            was_serving = link.serving
            if not was_serving and why != link.reason and link.address is not None:
                self._notes.append(f"{link.name()} does not serve yet: {why}")
            link.serving, link.version, link.reason = False, None, why
            link.settled = -1 if self._published is None else self._published.version
            tickets, link.tickets, link.received = list(link.tickets.values()), {}, []
            if was_serving:
                self._counts["lost"] += 1
                self._counts["moved_requests"] += len(tickets)
                self._notes.append(f"{link.name()}: {why}; its {len(tickets)} requests go to the others")
                if not any(other.serving for other in self._links):
                    self._without_since = time.monotonic()
            for ticket in tickets:
                ticket.losses += ticket.sent
                ticket.sent = False
                if ticket.losses > self._retries and self._fatal is None:
                    self._fatal = RolloutError(
                        f"request {tuple(ticket.request.id)} was lost with {ticket.losses} servers (allowed: "
                        f"rollout.request_retries = {self._retries}); the last, {link.name()}: {why}"
                    )
            if self._partial is not None:
                self._give_back(tickets)
            else:
                self._assign(tickets)
            self._changed.notify_all()

    # The thread of a server

    def _tend(self, link: _Link) -> None:
        pause_s = 0.1
        while not self._closed:
            try:
                self._join(link)
                while not self._closed:
                    self._exchange(link)
                    pause_s = 0.1
            except _LieError as lie:
                link.lies += 1
                with self._changed:
                    self._counts["lies"] += 1
                if link.lies > self._retries:
                    link.barred = link.boot
                self._lose(link, str(lie))
            except _LostError as why:
                self._lose(link, str(why))
            except RefusedError as refusal:
                self._lose(link, f"it refused ({refusal.status}): {refusal}")
            except Exception as error:  # nothing a server sends may end this thread
                self._lose(link, f"{type(error).__name__}: {error}")
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _join(self, link: _Link) -> None:
        """Find the server and take it over; what it is must be what was asked for."""
        link.address = registered(self._folder, link.index)
        if link.address is None:
            raise _LostError(f"it has not registered in {self._folder}")
        reply = self._call(link, "/attach", {"session": self._session})
        boot = wire.field(reply, "boot", str)
        with self._changed:
            self._counts["restarts"] += bool(link.boot) and boot != link.boot
        if boot != link.boot:
            link.boot, link.lies, link.barred = boot, 0, ""
        if link.barred == boot:
            raise _LostError(link.reason)
        theirs = wire.field(reply, "facts", dict)
        for name, value in self._identity.items():
            if theirs.get(name) != value:
                link.lies = self._retries  # it will not become another one
                raise _LieError(f"its {name} is {theirs.get(name)!r}, the trainer's {value!r}")

    def _exchange(self, link: _Link) -> None:
        """One look at a server: new weights first, then new requests, then what has finished."""
        with self._changed:
            news = self._changed.wait_for(lambda: self._closed or self._has_news(link), IDLE_S)
            published = self._published
            if self._closed:
                return
        if not news:
            self._same_boot(link, self._call(link, "/health"))
            return
        if published is not None and link.version != published.version:
            self._sync(link, published)
        with self._changed:
            if self._published is None or link.version != self._published.version:
                return  # a newer version came meanwhile: nothing is sampled from an older one
            fresh = [ticket for ticket in link.tickets.values() if not ticket.sent]
            for ticket in fresh:
                ticket.sent, ticket.since = True, link.version or 0
        packed = ({"key": ticket.key, **wire.pack_request(ticket.request)} for ticket in fresh)
        for part in wire.portions(packed, PER_CALL, CALL_BYTES):
            self._same_boot(link, self._call(link, "/generate", {"session": self._session, "requests": part}))
        if fresh:
            link.moved = time.monotonic()
        if link.tickets or link.received:
            self._collect(link)

    def _has_news(self, link: _Link) -> bool:
        behind = self._published is not None and link.version != self._published.version
        return behind or bool(link.tickets or link.received)

    def _collect(self, link: _Link) -> None:
        received, link.received = link.received, []
        body = {"session": self._session, "received": received, "wait_s": POLL_S}
        reply = self._same_boot(link, self._call(link, "/collect", body))
        for item in wire.field(reply, "samples", list):
            try:
                key, sample = wire.field(item, "key", str), wire.unpack_sample(item.get("sample"))
            except (wire.WireError, AttributeError) as error:
                raise _LieError(f"it sent what is no sample: {error}") from None
            self._take(link, key, sample)
        if (failure := reply.get("failure")) is not None:
            raise _LostError(f"its sampler failed: {failure}")
        turns = wire.field(reply, "turns", int)
        if turns != link.turns or not link.tickets or self._paused:
            link.turns, link.moved = turns, time.monotonic()
        elif time.monotonic() - link.moved > self._timeout_s:
            raise _LostError(f"it answers but has sampled nothing for {self._timeout_s:g} s (rollout.request_timeout)")

    def _take(self, link: _Link, key: str, sample: Sample) -> None:
        """A sample arrives: once, by whom it was asked of, and only if it can be true."""
        with self._changed:
            link.received.append(key)
            ticket = link.tickets.get(key)
            if ticket is None:
                self._counts["late_samples"] += 1
                return
            aborting = self._partial is not None
            why = invalid_reason(
                ticket.request,
                sample,
                num_vocab=self._num_vocab,
                ends=self._ends,
                versions=(ticket.since, self.version),
                aborting=aborting,
                experts=self._experts,
            )
            if why is not None:
                raise _LieError(f"sample {tuple(ticket.request.id)}: {why}")
            del link.tickets[key], self._tickets[key]
            if sample.finish == "abort":
                assert self._partial is not None
                self._partial.append(sample)
            else:
                self._done.append(sample)
            self._changed.notify_all()

    def _sync(self, link: _Link, published: Published) -> None:
        """Have a server take the published version, and compare what it then says with what the trainer says."""
        body = {
            "session": self._session,
            "version": published.version,
            "path": published.address(link.index, link.boot),
            "sha256": published.sha256,
            "probe": self._probe,
            "wait_s": published.wait_s,
        }
        deadline = time.monotonic() + self._timeout_s
        try:
            while (reply := self._same_boot(link, self._call(link, "/load_weights", body)))["loading"] is not False:
                if self._published is not published:
                    return
                published.deliver(link.index, link.boot)
                if time.monotonic() > deadline:
                    raise _LostError(f"weight version {published.version} did not arrive in {self._timeout_s:g} s")
        except RefusedError as refusal:
            if self._published is not published:
                return  # the file has made room for a newer one
            link.refusals += 1
            raise _LostError(f"it does not take weight version {published.version}: {refusal}") from None
        except RuntimeError as error:
            raise _LostError(f"weight version {published.version} could not be sent: {error}") from None
        if (reply.get("version"), reply.get("sha256")) != (published.version, published.sha256):
            raise _LieError(f"it was given weight version {published.version} and holds {reply.get('version')}")
        try:
            self._compare(reply.get("probe"), published)
        except _LieError:
            link.refusals += 1  # it says that it took them, and samples from something else
            raise
        if self._paused:
            self._call(link, "/pause", {"session": self._session})
        with self._changed:
            if self._published is not published:
                link.version = published.version
                return
            if not link.serving:
                self._notes.append(f"{link.name()} serves, with verified weights of version {published.version}")
            link.version, link.settled, link.serving, link.moved = (
                published.version,
                published.version,
                True,
                time.monotonic(),
            )
            pending, self._pending = self._pending, []
            self._assign(pending)
            self._changed.notify_all()

    def _compare(self, probe: Any, published: Published) -> None:
        try:
            values = [np.array(row, dtype=np.float64) for row in probe]
        except (TypeError, ValueError):
            raise _LieError("it did not say the log-probs of the probe") from None
        with self._changed:
            if self._published is not published:
                return
            if self._expected is None:
                self._expected = values
            if (why := mismatch(values, self._expected, self._dtype)) is not None:
                raise _LieError(f"weight version {published.version}: {why}")

    # HTTP

    def _call(self, link: _Link, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert link.address is not None
        if link.channel is None:
            link.channel = Channel(link.address.url, self._token, self._answer_s)
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    return link.channel.call(path, body)
                except RefusedError as refusal:
                    # A long prefill: it will come to it, and what it is asked twice it does once.
                    if refusal.kind != "busy" or time.monotonic() > deadline or self._closed:
                        raise
        except (OSError, HTTPException) as error:
            what = f"no answer in {self._answer_s:g} s" if isinstance(error, TimeoutError) else _words(error)
            raise _LostError(f"{path}: {what}") from error
        except wire.WireError as error:
            raise _LieError(f"{path}: {error}") from None

    def _same_boot(self, link: _Link, reply: dict[str, Any]) -> dict[str, Any]:
        if reply.get("boot") != link.boot:
            raise _LostError("it has started anew")
        return reply

    def _order(self, links: Sequence[_Link], path: str, timeout_s: float | None = None) -> None:
        """Tell servers something at once, beside their threads; who cannot be told is found out by them."""
        for link in links:
            if link.address is None or not link.boot:
                continue
            channel = Channel(link.address.url, self._token, timeout_s or self._answer_s)
            with suppress(OSError, HTTPException, RefusedError, wire.WireError):
                channel.call(path, {"session": self._session})
            channel.hang_up()


def _hang_up(link: _Link) -> None:
    channel, link.channel = link.channel, None
    if channel is not None:
        channel.hang_up()


def _words(error: Exception) -> str:
    return type(error).__name__ + (f": {error}" if str(error) else "")
