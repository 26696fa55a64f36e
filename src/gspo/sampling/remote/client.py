"""The sampler of a trainer whose samplers are servers: `api.Sampler` over N of them.

One thread per server attaches to it, has it load the published weights, sends requests and collects samples. When a
server does not answer, restarts or sends an invalid response, its requests go to other servers at once; it gets new
requests after it has loaded the last published weights and passed the probe. Each sample is used once: its key is
removed when it arrives. Tokens do not depend on the server, as every random draw is a function of the request's key.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.errors import RolloutError, WeightSyncError
from gspo.sampling.remote.discovery import given_up, registered
from gspo.sampling.remote.link import (
    POLL_S,
    DisconnectedError,
    InvalidResponseError,
    PendingRequest,
    RefusedError,
    Server,
    State,
)
from gspo.sampling.remote.session import Session
from gspo.sampling.requests import validate_request
from gspo.sampling.verify import Experts, invalid_reason
from gspo.sampling.weights.probe import ProbeCheck, ScoreSequences
from gspo.sampling.weights.store import ChooseStore, Published, publish_to
from gspo.system.http_client import HttpClient
from gspo.types import Request, Sample

if TYPE_CHECKING:
    import torch

ANSWER_S = 30.0  # deadline of one call
IDLE_S = 2.0  # between two health checks of a server without work
JOIN_S = 60.0  # the first step waits this long for servers that are still starting
_COUNTERS = ("disconnects", "invalid_responses", "moved_requests", "late_samples", "restarts")


class HttpSampler:
    """Implements `gspo.sampling.api.Sampler` over the servers that register in `folder`.

    identity      what every server must be: model, seed, vocabulary, end-of-sequence tokens; others are refused
    weight_store  where a version is published, given the servers' addresses
    reference     the trainer's own log-probs of the probe for the weights just published; None: each server is compared
                  with the first that loaded them
    timeout_s     the run fails after this time without any answer (rollout.request_timeout)
    retries       how many servers may be lost with one request
    experts       the expected form of the expert routes of a MoE model's samples
    join_s        the first step waits this long for servers that are still starting
    colocated     the servers share the trainer's device: they sleep from the last sample of a batch to the next request
                  or weight version
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
        self._folder, self._identity, self._weight_store, self._say = folder, dict(identity), weight_store, say
        num_vocab = int(identity["num_vocab"])
        self._validate = partial(validate_request, num_vocab=num_vocab, max_context=max_context, sees_text=sees_text)
        self._invalid_reason = partial(invalid_reason, num_vocab=num_vocab, ends=frozenset(ends), experts=experts)
        self._timeout_s, self._retries, self._join_s = timeout_s, retries, min(timeout_s, join_s)
        self._probe = ProbeCheck(num_vocab, dtype, reference)
        # A third: a lost server's requests can still be sampled by others before the batch is too late.
        self._answer_s = min(ANSWER_S, timeout_s / 3)
        self._colocated, self._asleep, self._paused = colocated, False, False
        self._closed = threading.Event()
        self._changed = threading.Condition(threading.RLock())  # guards everything below
        self._next_key = 0
        self._requests: dict[str, PendingRequest] = {}  # all outstanding
        self._unassigned: list[PendingRequest] = []  # those without a server
        self._done: deque[Sample] = deque()
        self._partial: list[Sample] | None = None  # samples of an abort that is under way
        self._published: Published | None = None
        self._unserved_since = time.monotonic()
        self._fatal: Exception | None = None
        self._counts: Counter[str] = Counter()
        self._notes: deque[str] = deque()  # log messages of the servers' threads
        self._http = HttpClient(headers={"Authorization": f"Bearer {token}"})
        trainer = Session(folder)
        self._servers = [
            Server(i, folder, self._http, trainer, answer_s=self._answer_s, timeout_s=timeout_s, closed=self._closed)
            for i in range(count)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(server,), name=f"sampler {server.index}", daemon=True)
            for server in self._servers
        ]
        # The threads use all fields above, so they start last.
        for thread in self._threads:
            thread.start()

    # The interface

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed.is_set():
            raise RolloutError("the sampler is closed: nothing can be submitted")
        # All are checked before any is queued.
        for request in requests:
            self._validate(request)
        # Keys are never reused, so a late reply for an old request cannot match a new one.
        with self._changed:
            pending = [PendingRequest(str(key), request) for key, request in enumerate(requests, self._next_key)]
            self._next_key += len(pending)
            self._requests |= {p.key: p for p in pending}
            self._assign(pending)
            self._changed.notify_all()
        # Outside the lock: `wake` waits for replies of servers.
        self.wake()

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            self._log_notes()
            with self._changed:
                # Wait for a sample, at most 0.5 s at a time: failures and log messages are checked in between.
                if not self._done:
                    if not self._requests or self._paused or self._closed.is_set():
                        break
                    self._raise_if_hopeless()
                    left = 0.5 if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        # A deadline as long as request_timeout is a limit, not a poll: missing samples are an error.
                        if deadline_s is not None and deadline_s >= self._timeout_s:
                            raise self._failed(f"{len(self._requests)} samples are missing after {deadline_s:g} s")
                        return
                    self._changed.wait(min(left, 0.5))
                    continue
                sample = self._done.popleft()
            # Outside the lock: the caller runs between two samples.
            yield sample
        # The batch is complete: colocated servers release the device for training.
        if not self._requests:
            self.sleep()

    def abort(self) -> list[Sample]:
        with self._changed:
            # From now on, aborted samples are accepted, and requests of a lost server are not submitted again.
            self._partial = []
            # Requests that were never sent come back at once.
            self._return_unsampled(self._unassigned)
            self._unassigned = []
            for server in self._servers:
                self._return_unsampled([p for p in server.requests.values() if not p.is_sent])
                server.requests = {key: p for key, p in server.requests.items() if p.is_sent}
            # Servers may have sampled tokens of the other requests: wait for their partial samples.
            aborting = [server for server in self._servers if server.requests]
        deadline = time.monotonic() + self._answer_s
        while aborting and time.monotonic() < deadline:
            self._command(aborting, "/abort")
            with self._changed:
                self._changed.wait_for(lambda: not self._requests, timeout=1.0)
                aborting = [
                    server for server in aborting if server.requests
                ]  # a /generate may have come after the /abort
        # What has not come back by the deadline returns without new tokens.
        with self._changed:
            self._return_unsampled(list(self._requests.values()))
            for server in self._servers:
                server.requests = {}
            samples, self._partial = self._partial, None
        return samples

    def pause(self) -> None:
        with self._changed:
            self._paused = True
            self._changed.notify_all()
        self._command(self._servers, "/pause")

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            for server in self._servers:
                # The time of a pause does not count as time without progress.
                server.note_progress()
        self._command(self._servers, "/resume")

    def sleep(self) -> None:
        """Only servers that share the trainer's device have memory to release."""
        if self._colocated and not self._asleep:
            self._asleep = True
            self._command(self._servers, "/sleep")

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._command(self._servers, "/wake")

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Publish a version and wait until connected servers have loaded it; others do so before they get requests."""
        if tensors is None:
            raise WeightSyncError("sampler servers hold their own weights: load_weights needs the tensors")
        # A sleeping server may have released the memory that the load needs.
        self.wake()
        is_first = self._published is None
        # Before the first version, the servers' machines must be known.
        if is_first:
            self._await_registrations()
        store = self._weight_store([registered(self._folder, server.index) for server in self._servers])
        published = publish_to(store, version, tensors)
        # Before the lock: the trainer's forward takes time. The weights are still those that were published.
        expected = self._probe.reference_values()
        with self._changed:
            self._probe.expected = expected
            before, self._published, self.version = self._published, published, version
            # Earlier refusals concern the earlier version.
            for server in self._servers:
                server.refused_loads = 0
            self._changed.notify_all()
        self._await_load(version, is_first)
        # Only now: no server needs the files of the earlier version any more.
        if before is not None:
            before.forget(published)

    def health(self) -> Mapping[str, Any]:
        with self._changed:
            return {
                "version": self.version,
                "outstanding": len(self._requests),
                "servers": [
                    {"name": server.name(), "serving": server.is_serving, "outstanding": len(server.requests)}
                    | ({} if server.is_serving else {"reason": server.reason})
                    for server in self._servers
                ],
                **{name: self._counts[name] for name in _COUNTERS},
            }

    def close(self) -> None:
        with self._changed:
            # The first call of close() does the work; later ones return.
            is_closed = self._closed.is_set()
            busy = [server for server in self._servers if server.requests]
            self._closed.set()
            self._changed.notify_all()
        if is_closed:
            return
        # Servers stop sampling for a client that closes; a short deadline, as the reply does not matter.
        self._command(busy, "/abort", timeout_s=1.0)
        for thread in self._threads:
            thread.join(timeout=POLL_S * 2)
        self._http.close()  # cancels the calls of the threads that are left
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._log_notes()
        if self._published is not None:
            self._published.forget()

    # Waiting, always with a deadline

    def _await_registrations(self) -> None:
        """Wait for servers that are still starting: their machines decide where weights are published."""
        deadline = time.monotonic() + self._join_s
        while time.monotonic() < deadline:
            if all(registered(self._folder, s.index) or given_up(self._folder, s.index) for s in self._servers):
                return
            time.sleep(0.1)

    def _await_load(self, version: int, is_first: bool) -> None:
        begin = time.monotonic()
        with self._changed:
            # The time before the first weights does not count as time without a server.
            if is_first:
                self._unserved_since = begin
            while True:
                may_join = is_first and time.monotonic() - begin < self._join_s
                ready = [server for server in self._servers if server.is_serving and server.version == version]
                # Servers that may still load this version; for the first one, also those that have not connected yet.
                unsettled = [
                    server
                    for server in self._servers
                    if server.settled_version != version
                    and (server.is_serving or server.version is not None or may_join)
                ]
                if ready and not unsettled:
                    break
                # Each server has refused this version several times: waiting longer does not help.
                if not ready and all(server.refused_loads > self._retries for server in self._servers):
                    first = self._servers[0]
                    raise WeightSyncError(
                        f"no sampler server loads weight version {version}: {first.name()}: {first.reason}"
                    )
                self._raise_if_hopeless()
                self._log_notes()
                if time.monotonic() - begin > self._timeout_s:
                    # At least one server has loaded it: the others load it before they get requests.
                    if ready:
                        break
                    raise self._failed(f"weight version {version} reached none of them in {self._timeout_s:g} s")
                self._changed.wait(0.2)
        self._log_notes()

    def _raise_if_hopeless(self) -> None:
        """Raise if no server serves and none will, or none has for too long."""
        if self._fatal is not None:
            raise self._fatal
        if any(server.is_serving for server in self._servers):
            return
        # No server serves. Raise at once if none can serve again; otherwise after the timeout.
        if all(server.state is State.BANNED for server in self._servers):
            raise self._failed("all of them sent invalid responses")
        if all(reasons := [given_up(self._folder, server.index) for server in self._servers]):
            raise RolloutError(f"sampler servers: all have ended and none will be restarted: {reasons[0]}")
        if time.monotonic() - self._unserved_since > self._timeout_s:
            raise self._failed(f"none of them has served for {self._timeout_s:g} s")

    def _failed(self, what: str) -> RolloutError:
        lines = [
            f"{server.name()}: "
            + (f"{len(server.requests)} samples outstanding" if server.is_serving else server.reason)
            for server in self._servers
        ]
        return RolloutError(
            f"sampler servers: {what}. {'; '.join(lines)}. If the servers need more time, raise rollout.request_timeout"
        )

    def _log_notes(self) -> None:
        """Log from the trainer's thread: a display belongs to one thread."""
        while self._notes:
            # Another thread may empty the queue between the test and popleft().
            with suppress(IndexError):
                self._say(self._notes.popleft())

    # Requests and their servers; all under the lock

    def _assign(self, requests: Sequence[PendingRequest]) -> None:
        """Give requests to the least loaded servers. Those with the same prompt stay together and share its prefill."""
        serving = [server for server in self._servers if server.is_serving]
        if not serving:
            self._unassigned += requests
            return
        groups: dict[tuple[int, ...], list[PendingRequest]] = {}
        for pending in requests:
            groups.setdefault(pending.request.prompt, []).append(pending)
        for group in groups.values():
            server = min(serving, key=lambda server: len(server.requests))
            server.requests |= {pending.key: pending for pending in group}

    def _return_unsampled(self, requests: Sequence[PendingRequest]) -> None:
        """The aborted samples of requests that no server has added a token to."""
        for pending in requests:
            request = pending.request
            self._requests.pop(pending.key, None)
            prefix = request.prefix or Sample.of(request.id, [], [], self.version)
            assert self._partial is not None
            self._partial.append(replace(prefix, id=request.id, finish="abort"))

    def _take(self, server: Server, key: str, sample: Sample) -> None:
        """Accept a sample: once, from the server that has the request, and only if it is valid."""
        with self._changed:
            pending = server.requests.get(key)
            # The request was moved to another server, aborted, or its sample has arrived already.
            if pending is None:
                self._counts["late_samples"] += 1
                return
            # New tokens may be of the version at the time of sending, or of any version since.
            versions, is_aborting = (pending.sent_version, self.version), self._partial is not None
            why = self._invalid_reason(pending.request, sample, versions=versions, aborting=is_aborting)
            if why is not None:
                raise InvalidResponseError(f"sample {tuple(pending.request.id)}: {why}")
            # Removing the key makes a second copy of this sample a late one.
            del server.requests[key], self._requests[key]
            if sample.finish == "abort":
                assert self._partial is not None
                self._partial.append(sample)
            else:
                self._done.append(sample)
            self._changed.notify_all()

    def _disconnect(self, server: Server, why: str, is_banned: bool = False) -> None:
        """Stop using a server, for now or until it restarts, and resubmit its requests to the others."""
        if self._closed.is_set():
            return
        with self._changed:
            was_serving = server.is_serving
            # Log a reason once, not at every attempt to connect.
            if not was_serving and why != server.reason and server.address is not None:
                self._notes.append(f"{server.name()} does not serve yet: {why}")
            settled_version = -1 if self._published is None else self._published.version
            requests = server.disconnect(why, settled_version, is_banned)
            if was_serving:
                # Only a server that served is a loss; others are still starting.
                self._counts["disconnects"] += 1
                self._counts["moved_requests"] += len(requests)
                self._notes.append(f"{server.name()}: {why}; its {len(requests)} requests go to the others")
                if not any(other.is_serving for other in self._servers):
                    self._unserved_since = time.monotonic()
            for pending in requests:
                # A request that was never sent cannot have caused the loss.
                pending.losses += pending.is_sent
                pending.is_sent = False
                # A request that is lost with several servers may be what makes them fail.
                if pending.losses > self._retries and self._fatal is None:
                    self._fatal = RolloutError(
                        f"request {tuple(pending.request.id)} was lost with {pending.losses} servers; at most "
                        f"{self._retries} are allowed. The last, {server.name()}: {why}"
                    )
            # During an abort nothing is sampled again.
            if self._partial is not None:
                self._return_unsampled(requests)
            else:
                self._assign(requests)
            self._changed.notify_all()

    # The thread of a server

    def _run(self, server: Server) -> None:
        pause_s = 0.1
        while not self._closed.is_set():
            try:
                # Attach, then exchange messages until an error.
                is_restarted = server.attach(self._identity)
                with self._changed:
                    self._counts["restarts"] += is_restarted
                while not self._closed.is_set():
                    self._exchange(server)
                    # A successful round ends the backoff.
                    pause_s = 0.1
            # Invalid responses are counted: a server that repeats them is banned until it restarts.
            except InvalidResponseError as error:
                server.invalid_responses += 1
                with self._changed:
                    self._counts["invalid_responses"] += 1
                self._disconnect(server, str(error), is_banned=server.invalid_responses > self._retries)
            except Exception as error:  # no reply of a server may end this thread
                is_known = isinstance(error, DisconnectedError | RefusedError)
                self._disconnect(server, str(error) if is_known else f"{type(error).__name__}: {error}")
            # Exponential backoff; close() ends the wait at once.
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _exchange(self, server: Server) -> None:
        """One round with a server: first a new weight version, then new requests, then finished samples."""
        with self._changed:
            has_work = self._changed.wait_for(lambda: self._closed.is_set() or self._has_work(server), IDLE_S)
            published = self._published
            if self._closed.is_set():
                return
        # An idle server is checked as well, so that a lost one is noticed before it gets requests.
        if not has_work:
            server.check_alive()
            return
        if published is not None and server.version != published.version:
            self._sync(server, published)
        with self._changed:
            version = server.version
            if version is None or self._published is None or version != self._published.version:
                return  # a newer version was published meanwhile: nothing may be sampled from this one
            fresh = [pending for pending in server.requests.values() if not pending.is_sent]
            # Marked before the call: if the reply is lost, the server may have the request.
            for pending in fresh:
                pending.is_sent, pending.sent_version = True, version
        # Outside the lock: calls may take as long as their deadline.
        server.generate(fresh)
        if server.has_work:
            server.collect(partial(self._take, server), lambda: self._paused)

    def _has_work(self, server: Server) -> bool:
        is_behind = self._published is not None and server.version != self._published.version
        return is_behind or server.has_work

    def _sync(self, server: Server, published: Published) -> None:
        """Have a server load the published version, and compare its probe result with the trainer's."""
        values = server.load(published, self._probe.sequences, lambda: self._published is published)
        if values is None:
            return
        with self._changed:
            # A newer version has its own expected values: this result can no longer be compared.
            why = self._probe.mismatch(values) if self._published is published else None
        if why is not None:
            server.refused_loads += 1  # it claims to have loaded them, but samples from something else
            raise InvalidResponseError(f"weight version {published.version}: {why}")
        # An attach resumes the server's sampler. If this client is paused, pause the server again.
        if self._paused:
            server.call("/pause")
        with self._changed:
            server.version = published.version
            # Superseded during the load: the next round loads the newer version first.
            if self._published is not published:
                return
            if not server.is_serving:
                self._notes.append(f"{server.name()} serves, with verified weights of version {published.version}")
            server.state, server.settled_version = State.SERVING, published.version
            server.note_progress()
            # Requests that found no server can be sent now.
            unassigned, self._unassigned = self._unassigned, []
            self._assign(unassigned)
            self._changed.notify_all()

    def _command(self, servers: Sequence[Server], path: str, timeout_s: float | None = None) -> None:
        """Send a command to all servers at once, from this thread; wait for the replies or their deadline."""
        calls = [server.command(path, timeout_s) for server in servers if server.address and server.boot]
        concurrent.futures.wait(calls)
