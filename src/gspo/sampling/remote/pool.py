"""The servers of a client, their threads, and the requests that they share.

One thread per server attaches to it, has it load the published weights, sends requests and collects samples. When a
server does not answer, restarts or sends an invalid response, its requests go to other servers at once; it gets new
requests after it has loaded the last published weights and passed the probe. Each sample is used once: its key is
removed when it arrives.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gspo.errors import RolloutError
from gspo.sampling.api import interrupted
from gspo.sampling.remote.link import (
    DisconnectedError,
    InvalidResponseError,
    LinkState,
    PendingRequest,
    RefusedError,
    Server,
)
from gspo.sampling.weights.load import ProbeCheck
from gspo.sampling.weights.publish import Published
from gspo.types import PromptKey, Sample

CHECK_S = 2.0  # between two health checks of a server without work


class ServerPool:
    """Servers that sample one set of requests.

    identity         what every server must be; others are refused
    invalid_reason   why a sample contradicts its request (`verify.invalid_reason`)
    retries          how many servers may be lost with one request, and how many invalid responses one server may send
    closed           set when the client ends
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        identity: Mapping[str, Any],
        probe: ProbeCheck,
        invalid_reason: Callable[..., str | None],
        retries: int,
        closed: threading.Event,
    ) -> None:
        self.servers, self.probe, self.closed = servers, probe, closed
        self._identity, self._invalid_reason, self._retries = dict(identity), invalid_reason, retries
        # wait: none, held for list operations; waits release it
        self.state_changed = threading.Condition(threading.RLock())  # guards everything below
        self.version = -1
        self.paused = False
        self.requests: dict[str, PendingRequest] = {}  # all outstanding
        self.unassigned: list[PendingRequest] = []  # those without a server
        self.done: deque[Sample] = deque()
        self.partial: list[Sample] | None = None  # samples of an abort that is under way
        self.published: Published | None = None
        self.unserved_since = time.monotonic()
        self.fatal: Exception | None = None
        self.counts: Counter[str] = Counter()
        self.notes: deque[str] = deque()  # log messages of the servers' threads
        self.threads = [
            threading.Thread(target=self._run, args=(server,), name=f"sampler {server.index}", daemon=True)
            for server in servers
        ]
        # The threads use all fields above, so they start last.
        for thread in self.threads:
            thread.start()

    def assign(self, requests: Sequence[PendingRequest]) -> None:
        """Give requests to the least loaded servers; the caller holds the lock.

        Those with the same prompt stay together and share its prefill.
        """
        serving = [server for server in self.servers if server.is_serving]
        if not serving:
            self.unassigned += requests
            return
        groups: dict[PromptKey, list[PendingRequest]] = {}
        for pending in requests:
            groups.setdefault(pending.request.key, []).append(pending)
        for group in groups.values():
            server = min(serving, key=lambda server: len(server.requests))
            server.requests |= {pending.key: pending for pending in group}

    def return_unsampled(self, requests: Sequence[PendingRequest]) -> None:
        """The aborted samples of requests that no server has added a token to; the caller holds the lock."""
        for pending in requests:
            self.requests.pop(pending.key, None)
            assert self.partial is not None
            self.partial.append(interrupted(pending.request, self.version))

    def _take(self, server: Server, key: str, sample: Sample) -> None:
        """Accept a sample: once, from the server that has the request, and only if it is valid."""
        with self.state_changed:
            pending = server.requests.get(key)
            # The request was moved to another server, aborted, or its sample has arrived already.
            if pending is None:
                self.counts["late_samples"] += 1
                return
            # New tokens may be of the version at the time of sending, or of any version since.
            versions, is_aborting = (pending.sent_version, self.version), self.partial is not None
            why = self._invalid_reason(pending.request, sample, versions=versions, aborting=is_aborting)
            if why is not None:
                raise InvalidResponseError(f"sample {tuple(pending.request.id)}: {why}")
            del server.requests[key], self.requests[key]
            if sample.finish == "abort":
                assert self.partial is not None
                self.partial.append(sample)
            else:
                self.done.append(sample)
            self.state_changed.notify_all()

    def _disconnect(self, server: Server, why: str, is_banned: bool = False) -> None:
        """Stop using a server, for now or until it restarts, and resubmit its requests to the others."""
        if self.closed.is_set():
            return
        with self.state_changed:
            was_serving = server.is_serving
            if not was_serving and why != server.reason and server.address is not None:
                self.notes.append(f"{server.name()} does not serve yet: {why}")
            settled_version = -1 if self.published is None else self.published.version
            requests = server.disconnect(why, settled_version, is_banned)
            if was_serving:
                # Only a server that served is a loss; others are still starting.
                self.counts["disconnects"] += 1
                self.counts["moved_requests"] += len(requests)
                self.notes.append(f"{server.name()}: {why}; its {len(requests)} requests go to the others")
                if not any(other.is_serving for other in self.servers):
                    self.unserved_since = time.monotonic()
            for pending in requests:
                # A request that was never sent cannot have caused the loss.
                pending.losses += pending.is_sent
                pending.is_sent = False
                # A request that is lost with several servers may be what makes them fail.
                if pending.losses > self._retries and self.fatal is None:
                    self.fatal = RolloutError(
                        f"request {tuple(pending.request.id)} was lost with {pending.losses} servers; at most "
                        f"{self._retries} are allowed. The last, {server.name()}: {why}"
                    )
            if self.partial is not None:
                self.return_unsampled(requests)
            else:
                self.assign(requests)
            self.state_changed.notify_all()

    def _run(self, server: Server) -> None:
        pause_s = 0.1
        while not self.closed.is_set():
            try:
                is_restarted = server.attach(self._identity)
                with self.state_changed:
                    self.counts["restarts"] += is_restarted
                while not self.closed.is_set():
                    self._exchange(server)
                    pause_s = 0.1
            # Invalid responses are counted: a server that repeats them is banned until it restarts.
            except InvalidResponseError as error:
                server.invalid_responses += 1
                with self.state_changed:
                    self.counts["invalid_responses"] += 1
                self._disconnect(server, str(error), is_banned=server.invalid_responses > self._retries)
            except Exception as error:  # no reply of a server may end this thread
                is_known = isinstance(error, DisconnectedError | RefusedError)
                self._disconnect(server, str(error) if is_known else f"{type(error).__name__}: {error}")
            # Exponential backoff; close() ends the wait at once.
            self.closed.wait(pause_s)  # wait: the pause of the server's state, close()
            pause_s = min(2 * pause_s, 1.0)

    def _exchange(self, server: Server) -> None:
        """One round with a server: first a new weight version, then new requests, then finished samples."""
        with self.state_changed:
            has_work = self.state_changed.wait_for(
                lambda: (
                    self.closed.is_set()
                    or server.has_work
                    or (self.published is not None and server.version != self.published.version)
                ),
                CHECK_S,
            )
            published = self.published
            if self.closed.is_set():
                return
        # An idle server is checked as well, so that a lost one is noticed before it gets requests.
        if not has_work:
            server.call("/health")
            return
        if published is not None and server.version != published.version:
            self._sync(server, published)
        with self.state_changed:
            version = server.version
            if version is None or self.published is None or version != self.published.version:
                return  # a newer version was published meanwhile: nothing may be sampled from this one
            fresh = [pending for pending in server.requests.values() if not pending.is_sent]
            # Marked before the call: if the reply is lost, the server may have the request.
            for pending in fresh:
                pending.is_sent, pending.sent_version = True, version
        # Outside the lock: calls may take as long as their deadline.
        server.generate(fresh)
        if server.has_work:
            server.collect(partial(self._take, server), lambda: self.paused)

    def _sync(self, server: Server, published: Published) -> None:
        """Have a server load the published version, and compare its probe result with the trainer's."""
        values = server.load(published, self.probe.sequences, lambda: self.published is published)
        if values is None:
            return
        with self.state_changed:
            # A newer version has its own expected values: this result can no longer be compared.
            why = self.probe.mismatch(values) if self.published is published else None
        if why is not None:
            server.refused_loads += 1  # it claims to have loaded them, but samples from something else
            raise InvalidResponseError(f"weight version {published.version}: {why}")
        # An attach resumes the server's sampler. If this client is paused, pause the server again.
        if self.paused:
            server.call("/pause")
        with self.state_changed:
            server.version = published.version
            # Superseded during the load: the next round loads the newer version first.
            if self.published is not published:
                return
            if not server.is_serving:
                self.notes.append(f"{server.name()} serves, with verified weights of version {published.version}")
            server.state, server.settled_version = LinkState.SERVING, published.version
            server.note_progress()
            unassigned, self.unassigned = self.unassigned, []
            self.assign(unassigned)
            self.state_changed.notify_all()
