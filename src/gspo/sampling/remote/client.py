"""The sampler of a trainer whose samplers are servers: `api.Sampler` over N of them.

`pool.py` moves requests and samples between this process and the servers, with one thread per server; this file waits
for the results, always with a deadline. Tokens do not depend on the server, as every random draw is a function of the
request's key.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.errors import RolloutError, WeightSyncError
from gspo.sampling.api import Experts, invalid_reason, validate_request
from gspo.sampling.remote.discovery import given_up, registered
from gspo.sampling.remote.engine import Session
from gspo.sampling.remote.link import POLL_S, LinkState, PendingRequest, Server
from gspo.sampling.remote.pool import ServerPool
from gspo.sampling.weights.load import ProbeCheck, ScoreSequences
from gspo.sampling.weights.publish import ChooseStore, publish_to
from gspo.system import HttpClient, beat
from gspo.types import Request, Sample

if TYPE_CHECKING:
    import torch

ANSWER_S = 30.0  # deadline of one call
JOIN_S = 60.0  # the first step waits this long for servers that are still starting
_SERVER_COUNTERS = ("disconnects", "invalid_responses", "moved_requests", "late_samples", "restarts")


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
        self._folder, self._weight_store, self._say = folder, weight_store, say
        num_vocab = int(identity["num_vocab"])
        self._validate = partial(validate_request, num_vocab=num_vocab, max_context=max_context, sees_text=sees_text)
        self._timeout_s, self._retries, self._join_s = timeout_s, retries, min(timeout_s, join_s)
        # A third: a lost server's requests can still be sampled by others before the batch is too late.
        self._answer_s = min(ANSWER_S, timeout_s / 3)
        self._colocated, self._asleep = colocated, False
        self._next_key = 0
        self._http = HttpClient(headers={"Authorization": f"Bearer {token}"})
        trainer, closed = Session(folder), threading.Event()
        servers = [
            Server(i, folder, self._http, trainer, answer_s=self._answer_s, timeout_s=timeout_s, closed=closed)
            for i in range(count)
        ]
        self._pool = ServerPool(
            servers,
            identity=identity,
            probe=ProbeCheck(num_vocab, dtype, reference),
            invalid_reason=partial(invalid_reason, num_vocab=num_vocab, ends=frozenset(ends), experts=experts),
            retries=retries,
            closed=closed,
        )

    @property
    def version(self) -> int:
        return self._pool.version

    def submit(self, requests: Sequence[Request]) -> None:
        if self._pool.closed.is_set():
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:
            self._validate(request)
        # Keys are never reused, so a late reply for an old request cannot match a new one.
        with self._pool.state_changed:
            pending = [PendingRequest(str(key), request) for key, request in enumerate(requests, self._next_key)]
            self._next_key += len(pending)
            self._pool.requests |= {p.key: p for p in pending}
            self._pool.assign(pending)
            self._pool.state_changed.notify_all()
        # Outside the lock: `wake` waits for replies of servers.
        self.wake()

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            self._log_notes()
            with self._pool.state_changed:
                # Wait for a sample, at most 0.5 s at a time: failures and log messages are checked in between.
                if not self._pool.done:
                    if not self._pool.requests or self._pool.paused or self._pool.closed.is_set():
                        break
                    self._raise_if_hopeless()
                    left = 0.5 if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        # A deadline as long as request_timeout is a limit, not a poll: missing samples are an error.
                        if deadline_s is not None and deadline_s >= self._timeout_s:
                            raise self._failed(f"{len(self._pool.requests)} samples are missing after {deadline_s:g} s")
                        return
                    # wait: 0.5 s, the trainer after rollout.request_timeout
                    self._pool.state_changed.wait(min(left, 0.5))
                    continue
                sample = self._pool.done.popleft()
            yield sample
        # The batch is complete: colocated servers release the device for training.
        if not self._pool.requests:
            self.sleep()

    def abort(self) -> list[Sample]:
        with self._pool.state_changed:
            # From now on, aborted samples are accepted, and requests of a lost server are not submitted again.
            self._pool.partial = []
            self._pool.return_unsampled(self._pool.unassigned)
            self._pool.unassigned = []
            for server in self._pool.servers:
                self._pool.return_unsampled([p for p in server.requests.values() if not p.is_sent])
                server.requests = {key: p for key, p in server.requests.items() if p.is_sent}
            # Servers may have sampled tokens of the other requests: wait for their partial samples.
            aborting = [server for server in self._pool.servers if server.requests]
        deadline = time.monotonic() + self._answer_s
        while aborting and time.monotonic() < deadline:
            self._command(aborting, "/abort")
            with self._pool.state_changed:
                # wait: 1 s, the servers' answer time
                self._pool.state_changed.wait_for(lambda: not self._pool.requests, timeout=1.0)
                aborting = [
                    server for server in aborting if server.requests
                ]  # a /generate may have come after the /abort
        # What has not come back by the deadline returns without new tokens.
        with self._pool.state_changed:
            self._pool.return_unsampled(list(self._pool.requests.values()))
            for server in self._pool.servers:
                server.requests = {}
            samples, self._pool.partial = self._pool.partial, None
        return samples

    def pause(self) -> None:
        with self._pool.state_changed:
            self._pool.paused = True
            self._pool.state_changed.notify_all()
        self._command(self._pool.servers, "/pause")

    def resume(self) -> None:
        with self._pool.state_changed:
            self._pool.paused = False
            for server in self._pool.servers:
                # The time of a pause does not count as time without progress.
                server.note_progress()
        self._command(self._pool.servers, "/resume")

    def sleep(self) -> None:
        """Only servers that share the trainer's device have memory to release."""
        if self._colocated and not self._asleep:
            self._asleep = True
            self._command(self._pool.servers, "/sleep")

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._command(self._pool.servers, "/wake")

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Publish a version and wait until connected servers have loaded it; others do so before they get requests."""
        if tensors is None:
            raise WeightSyncError("sampler servers hold their own weights: load_weights needs the tensors")
        self.wake()
        is_first = self._pool.published is None
        # Before the first version, the servers' machines must be known.
        if is_first:
            self._await_registrations()
        store = self._weight_store([registered(self._folder, server.index) for server in self._pool.servers])
        published = publish_to(store, version, tensors)
        # Before the lock: the trainer's forward takes time. The weights are still those that were published.
        probe = self._pool.probe
        expected = None if probe.reference is None else probe.reference(probe.sequences)
        with self._pool.state_changed:
            self._pool.probe.expected = expected
            before, self._pool.published, self._pool.version = self._pool.published, published, version
            for server in self._pool.servers:
                server.refused_loads = 0
            self._pool.state_changed.notify_all()
        self._await_load(version, is_first)
        # Only now: no server needs the files of the earlier version any more.
        if before is not None:
            before.forget(published)

    def health(self) -> Mapping[str, Any]:
        with self._pool.state_changed:
            return {
                "version": self.version,
                "outstanding": len(self._pool.requests),
                "servers": [
                    {"name": server.name(), "serving": server.is_serving, "outstanding": len(server.requests)}
                    | ({} if server.is_serving else {"reason": server.reason})
                    for server in self._pool.servers
                ],
                **{name: self._pool.counts[name] for name in _SERVER_COUNTERS},
            }

    def close(self) -> None:
        with self._pool.state_changed:
            is_closed = self._pool.closed.is_set()
            busy = [server for server in self._pool.servers if server.requests]
            self._pool.closed.set()
            self._pool.state_changed.notify_all()
        if is_closed:
            return
        # Servers stop sampling for a client that closes; a short deadline, as the reply does not matter.
        self._command(busy, "/abort", timeout_s=1.0)
        for thread in self._pool.threads:
            thread.join(timeout=POLL_S * 2)  # wait: POLL_S * 2, the trainer
        self._http.close()  # cancels the calls of the threads that are left
        for thread in self._pool.threads:
            thread.join(timeout=2.0)  # wait: 2 s, the trainer
        self._log_notes()
        if self._pool.published is not None:
            self._pool.published.forget()

    def _await_registrations(self) -> None:
        """Wait for servers that are still starting: their machines decide where weights are published."""
        deadline = time.monotonic() + self._join_s
        while time.monotonic() < deadline:
            if all(registered(self._folder, s.index) or given_up(self._folder, s.index) for s in self._pool.servers):
                return
            beat("waiting for sampler servers to start")  # the wait has a deadline of its own
            time.sleep(0.1)  # wait: 0.1 s, the trainer after rollout.request_timeout

    def _await_load(self, version: int, is_first: bool) -> None:
        begin = time.monotonic()
        with self._pool.state_changed:
            # The time before the first weights does not count as time without a server.
            if is_first:
                self._pool.unserved_since = begin
            while True:
                may_join = is_first and time.monotonic() - begin < self._join_s
                ready = [server for server in self._pool.servers if server.is_serving and server.version == version]
                # Servers that may still load this version; for the first one, also those that have not connected yet.
                unsettled = [
                    server
                    for server in self._pool.servers
                    if server.settled_version != version
                    and (server.is_serving or server.version is not None or may_join)
                ]
                if ready and not unsettled:
                    break
                # Each server has refused this version several times: waiting longer does not help.
                if not ready and all(server.refused_loads > self._retries for server in self._pool.servers):
                    first = self._pool.servers[0]
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
                if is_first:  # servers may still load their model
                    beat("waiting for sampler servers to load the first weights")
                self._pool.state_changed.wait(0.2)  # wait: 0.2 s, the trainer after rollout.request_timeout
        self._log_notes()

    def _raise_if_hopeless(self) -> None:
        """Raise if no server serves and none will, or none has for too long."""
        if self._pool.fatal is not None:
            raise self._pool.fatal
        if any(server.is_serving for server in self._pool.servers):
            return
        # No server serves. Raise at once if none can serve again; otherwise after the timeout.
        if all(server.state is LinkState.BANNED for server in self._pool.servers):
            raise self._failed("all of them sent invalid responses")
        if all(reasons := [given_up(self._folder, server.index) for server in self._pool.servers]):
            raise RolloutError(f"sampler servers: all have ended and none will be restarted: {reasons[0]}")
        if time.monotonic() - self._pool.unserved_since > self._timeout_s:
            raise self._failed(f"none of them has served for {self._timeout_s:g} s")

    def _failed(self, what: str) -> RolloutError:
        lines = [
            f"{server.name()}: "
            + (f"{len(server.requests)} samples outstanding" if server.is_serving else server.reason)
            for server in self._pool.servers
        ]
        return RolloutError(
            f"sampler servers: {what}. {'; '.join(lines)}. If the servers need more time, raise rollout.request_timeout"
        )

    def _log_notes(self) -> None:
        """Log from the trainer's thread: a display belongs to one thread."""
        while self._pool.notes:
            # Another thread may empty the queue between the test and popleft().
            with suppress(IndexError):
                self._say(self._pool.notes.popleft())

    def _command(self, servers: Sequence[Server], path: str, timeout_s: float | None = None) -> None:
        """Send a command to all servers at once, from this thread; wait for the replies or their deadline."""
        calls = [server.command(path, timeout_s) for server in servers if server.address and server.boot]
        concurrent.futures.wait(calls)  # wait: none, the deadline of each request
