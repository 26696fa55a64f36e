"""Many episodes at once: environments and the sampler alternate in rounds.

Environments run as asyncio tasks in their own thread and send requests through their clients. The driver, in the
trainer's thread, submits the requests and returns the samples. Two modes:

rounds      (the sampler decodes in this process) all environments run until each waits for a sample or has ended; then
            the driver samples all requests of the round. The seed, not timing, decides what is computed together, and
            tools run concurrently.
otherwise   (sampler servers) the driver submits every request at once; no episode waits for another.

An error in an episode costs one sample, which carries a typed Failure: an environment that raises (crash), runs longer
than `timeout_s` between two requests (timeout), or exceeds its limits (limit). An environment that blocks the thread
instead of awaiting fails too; the other episodes restart in a new thread and get the samples that they already had.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gspo.envs.chat import Chat
from gspo.envs.client import CANCELLED, Client, Environment, EpisodeError, play
from gspo.envs.episode import episode_sample
from gspo.errors import DataError, RolloutError
from gspo.sampling import KeepsCache, Sampler
from gspo.types import Failure, Outcome, Request, Sample, SampleId

# Seconds in which an event loop that is not blocked runs a callback.
GRACE = 1.0


class EnvironmentThread:
    """The event loop of the environments, in its own thread; `current` is None if it does not run."""

    def __init__(self) -> None:
        self.current: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; it is started if there is none."""
        if self.current is None:
            loop = self.current = asyncio.new_event_loop()
            # The default executor is bounded; `_Threads` explains why this one is not.
            loop.set_default_executor(_Threads())
            # A daemon thread: an environment that blocks must not keep the process alive.
            args = (loop, lambda: self.current is loop)
            threading.Thread(target=_run, args=args, name="environments", daemon=True).start()
        return self.current

    def leave(self) -> None:
        """Ask the loop to stop. A blocked thread keeps running until its environment returns or the process ends."""
        if self.current is not None:
            loop, self.current = self.current, None
            loop.call_soon_threadsafe(loop.stop)


class _Threads(ThreadPoolExecutor):
    """For `asyncio.to_thread`: one thread per call. In a bounded pool, calls that wait could block the calls that they
    wait for; and a pool's thread that hangs would keep the process from ending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="environment's call", daemon=True).start()
        return future


def _run(loop: asyncio.AbstractEventLoop, is_in_use: Callable[[], bool]) -> None:
    asyncio.set_event_loop(loop)
    # Again after an environment has stopped the loop, which it shares with the others.
    while True:
        loop.run_forever()
        if not is_in_use():
            break
    # After stop(): cancel what is left, so that the environments' `finally` blocks run.
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=GRACE))  # wait: GRACE, the environments' thread
    loop.close()


# Seconds between two polls of sampler servers.
PAUSE = 0.005


@dataclass(eq=False)
class _Episode:
    request: Request
    client: Client
    task: asyncio.Task[None] | None = None
    since: float = 0.0  # when its environment last continued to run
    pending: dict[SampleId, Future[Sample]] = field(default_factory=dict)  # requests that it waits for
    answers: dict[SampleId, tuple[Request, Sample]] = field(default_factory=dict)  # for a restart


class _RequestSent(NamedTuple):
    """An environment sent a request and waits for `future`."""

    episode: _Episode
    request: Request
    future: Future[Sample]


class _Ended(NamedTuple):
    """An environment returned, or failed."""

    episode: _Episode
    outcome: Outcome | None


class Episodes:
    """The workflow: `episodes(requests, sampler)` yields one sample per request, each a whole episode."""

    def __init__(
        self,
        environment: Environment,
        chat: Chat,
        *,
        max_context: int,
        max_turns: int = 16,
        timeout_s: float = 60.0,
        rounds: bool = True,
        request_timeout_s: float = 3600.0,
        at_once: int = 256,
    ) -> None:
        self.environment, self.chat = environment, chat
        self.at_once = at_once  # most episodes that run; the others start as these end
        self.max_context, self.max_turns, self.timeout_s = max_context, max_turns, timeout_s
        self.rounds, self.request_timeout_s = rounds, request_timeout_s
        self.thread = EnvironmentThread()
        self.is_closed = False

    def __call__(self, requests: Sequence[Request], sampler: Sampler) -> Iterator[Sample]:
        call = _Call(self, sampler)
        try:
            call.begin(requests)
            yield from call.in_rounds() if self.rounds else call.without_rounds()
        finally:
            # This runs also if the caller stops iterating early or an error occurs.
            call.abandon()

    def metrics(self) -> Mapping[str, float]:
        """What the environment counted since the last call, if it has a method `metrics`."""
        count = getattr(self.environment, "metrics", None)
        return {} if count is None else count()

    def close(self) -> None:
        """Stop the thread, and close the environment if it has a method `close`."""
        self.is_closed = True  # a call in another thread stops at its next round
        self.thread.leave()
        if callable(close := getattr(self.environment, "close", None)):
            close()


class _Call:
    """The episodes of one call."""

    def __init__(self, how: Episodes, sampler: Sampler) -> None:
        self._how, self._sampler = how, sampler
        # Only in rounds: there the rows that are kept, and so the last bits of log-probs, do not depend on timing.
        self._keeper = sampler if how.rounds and isinstance(sampler, KeepsCache) else None
        self._not_started: deque[Request] = deque()
        self._open: dict[tuple[int, int], _Episode] = {}
        self._not_submitted: list[Request] = []
        self._in_flight: dict[SampleId, Request] = {}  # what the sampler has not completed yet
        self._ended: list[Sample] = []
        self._inbox: queue.SimpleQueue[_RequestSent | _Ended] = queue.SimpleQueue()  # from the environments' thread

    # The two modes

    def in_rounds(self) -> Iterator[Sample]:
        while self._open and not self._how.is_closed:
            # All environments stop at a request or at their end before anything is sampled.
            self._run_environments()
            yield from self._take_ended()
            self._submit()
            for sample in self._sampler.completed(self._how.request_timeout_s):
                self._deliver(sample)
            # Samples are missing although the sampler returned: its deadline has passed.
            if self._in_flight:
                self._refuse_missing()

    def without_rounds(self) -> Iterator[Sample]:
        last_sample_at = time.monotonic()
        while self._open or self._in_flight or self._not_started:
            self._admit()
            # Wait for the first message only, then take all that are there.
            with contextlib.suppress(queue.Empty):
                # wait: PAUSE, the driver after env.timeout or rollout.request_timeout
                self._handle(self._inbox.get(timeout=PAUSE))
                while True:
                    self._handle(self._inbox.get_nowait())
            self._end_late()
            yield from self._take_ended()
            # Nothing is outstanding: the time without samples begins at the next request.
            if not self._in_flight:
                last_sample_at = time.monotonic()
            self._submit()
            for sample in self._sampler.completed(0.0):
                last_sample_at = time.monotonic()
                self._deliver(sample)
            if self._in_flight and time.monotonic() - last_sample_at > self._how.request_timeout_s:
                self._refuse_missing()
        yield from self._take_ended()

    # Environments

    def begin(self, requests: Sequence[Request]) -> None:
        self._not_started.extend(requests)
        self._admit()

    def _admit(self) -> None:
        while self._not_started and len(self._open) < self._how.at_once:
            self._start(self._not_started.popleft(), {})

    def _start(self, request: Request, answers: dict[SampleId, tuple[Request, Sample]]) -> None:
        how = self._how

        def submit(sent: Request) -> Future[Sample]:
            # Called in the environment's thread; the driver's thread takes the request from the inbox.
            future: Future[Sample] = Future()
            self._inbox.put(_RequestSent(episode, sent, future))
            return future

        client = Client(request, chat=how.chat, submit=submit, max_turns=how.max_turns, max_context=how.max_context)
        episode = _Episode(request, client, since=time.monotonic(), answers=answers)
        self._open[_key(request.id)] = episode
        loop = how.thread.loop()
        # Tasks must be created in the loop's own thread.
        loop.call_soon_threadsafe(self._create_task, loop, episode)

    def _create_task(self, loop: asyncio.AbstractEventLoop, episode: _Episode) -> None:
        task = episode.task = loop.create_task(self._play(episode))
        # A task that is cancelled before its first step, by another environment, does not enter `_play`.
        late = _Ended(episode, CANCELLED)
        task.add_done_callback(lambda task: self._inbox.put(late) if task.cancelled() else None)

    async def _play(self, episode: _Episode) -> None:
        self._inbox.put(_Ended(episode, await play(self._how.environment, episode.client)))

    def _run_environments(self) -> None:
        """Run until every episode waits for a sample or has ended; a timeout ends an episode, too."""
        while True:
            self._take_messages()
            self._admit()
            # `_settle` waits for the loop several times: once per round, not once per message.
            if not self._any_running():
                self._settle()
                self._admit()
                if not self._any_running():
                    return
            with contextlib.suppress(queue.Empty):
                # wait: 0.1 s, the driver after env.timeout or rollout.request_timeout
                self._handle(self._inbox.get(timeout=0.1))
            self._end_late()

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    def _settle(self) -> None:
        """Take all messages that are ready: parallel requests of one environment arrive together."""
        # Each turn of the loop lets tasks run one step: parallel requests of a task arrive before the driver samples.
        for _ in range(4):
            passed = threading.Event()
            self._how.thread.loop().call_soon_threadsafe(passed.set)
            if not passed.wait(GRACE):  # wait: GRACE, the driver replaces a loop that is blocked
                break  # busy or blocked; `_end_late` decides
        self._take_messages()

    def _handle(self, message: _RequestSent | _Ended) -> None:
        episode = message.episode
        # A message of an episode that was replaced must not affect its successor.
        if self._open.get(_key(episode.request.id)) is not episode:
            return  # ended or restarted before
        if isinstance(message, _Ended):
            self._end(episode, message.outcome)
            return
        request, future = message.request, message.future
        known, in_flight = episode.answers.get(request.id), self._in_flight.get(request.id)
        if known is not None and known[0] == request:  # after a restart: use the sample from before
            episode.since = time.monotonic()
            _set(future, known[1])
        # The sampler still works on a request with this id from before the restart; only an equal one can use it.
        elif in_flight is not None and in_flight != request:
            self._end(episode, Failure("crash", "environment: after a restart it sent another request"))
        else:
            episode.pending[request.id] = future
            # Otherwise the sample of the request in flight will answer this future.
            if in_flight is None:
                self._not_submitted.append(request)

    def _is_running(self, episode: _Episode) -> bool:
        return not episode.pending

    def _any_running(self) -> bool:
        return any(self._is_running(episode) for episode in self._open.values())

    def _end_late(self) -> None:
        # Only an episode that runs can be late. The time that it waits for samples does not count.
        late = [e for e in self._open.values() if self._is_running(e) and self._is_late(e)]
        if not late:
            return
        # Find out whether the loop is blocked: a loop that is not blocked runs this callback soon.
        alive = threading.Event()
        loop = self._how.thread.loop()
        loop.call_soon_threadsafe(alive.set)
        limit = self._how.timeout_s
        if alive.wait(GRACE):  # wait: GRACE, the driver
            for episode in late:
                self._end(episode, Failure("timeout", f"environment: sent no request for {limit:g} s (env.timeout)"))
            return
        # The task that runs now is the one that blocks the loop. If it cannot be found, all late ones are ended.
        running = asyncio.current_task(loop)
        why = Failure(
            "timeout", f"environment: blocked its thread for {limit:g} s (env.timeout); use await for slow calls"
        )
        blocking = [e for e in self._open.values() if e.task is not None and e.task is running] or late
        for episode in blocking:
            self._end(episode, why)
        self._restart()

    def _restart(self) -> None:
        """Start the episodes of a blocked thread again, in a new one."""
        self._how.thread.leave()
        # The restarted episodes send these requests again.
        self._not_submitted = []
        for episode in list(self._open.values()):
            # The old task may still run in the blocked thread: its requests are refused.
            episode.client.close("the episode was restarted")
            self._start(episode.request, episode.answers)

    def _is_late(self, episode: _Episode) -> bool:
        return time.monotonic() - episode.since > self._how.timeout_s

    def _end(self, episode: _Episode, outcome: Outcome | None) -> None:
        """Record the outcome of an episode; samples of its open requests are dropped when they arrive."""
        # First of all: messages of this episode that arrive later are ignored.
        del self._open[_key(episode.request.id)]
        self._release(episode)
        client = episode.client
        client.close("the episode has ended")
        self._cancel(episode)
        # Requests that were not submitted need not be sampled.
        self._not_submitted = [request for request in self._not_submitted if request.id not in episode.pending]
        self._ended.append(
            episode_sample(
                episode.request.id,
                client.exchanges,
                prompt=episode.request.prompt,
                outcome=outcome,
                turn_rewards=client.turn_rewards,
            )
        )

    def _release(self, episode: _Episode) -> None:
        if self._keeper is not None:
            self._keeper.release(*_key(episode.request.id))

    def _cancel(self, episode: _Episode) -> None:
        loop = self._how.thread.current
        if loop is not None and episode.task is not None and not episode.task.done():
            loop.call_soon_threadsafe(episode.task.cancel)

    def _take_ended(self) -> list[Sample]:
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> None:
        """Cancel what is left: an error occurred, or the caller stopped iterating."""
        for episode in self._open.values():
            self._release(episode)
            episode.client.close("the run has ended")
            self._cancel(episode)
        self._open.clear()
        self._not_started.clear()

    # The sampler

    def _submit(self) -> None:
        # By id: the order in which environments sent them depends on timing.
        requests, self._not_submitted = sorted(self._not_submitted, key=lambda request: request.id), []
        if not requests:
            return
        if self._keeper is not None:
            requests = [replace(request, keep_cache=True) for request in requests]
        # Normally one call for all requests, so that the sampler can batch them.
        try:
            self._sampler.submit(requests)
            self._in_flight |= {request.id: request for request in requests}
        except DataError:
            # A request that cannot be sampled ends only its own episode.
            for request in requests:
                try:
                    self._sampler.submit([request])
                    self._in_flight[request.id] = request
                except DataError as error:
                    self._refuse(request, error)

    def _refuse(self, request: Request, error: DataError) -> None:
        episode = self._open[_key(request.id)]
        future = episode.pending.pop(request.id)
        # The environment runs again from now on.
        episode.since = time.monotonic()
        if future.set_running_or_notify_cancel():
            future.set_exception(EpisodeError(str(error)))

    def _deliver(self, sample: Sample) -> None:
        request, episode = self._in_flight.pop(sample.id, None), self._open.get(_key(sample.id))
        if request is None or episode is None:
            return  # its episode has ended before
        # Kept for a restart, also if the environment does not wait for it any more.
        episode.answers[sample.id] = request, sample
        if (future := episode.pending.pop(sample.id, None)) is not None:
            episode.since = time.monotonic()
            _set(future, sample)

    def _refuse_missing(self) -> None:
        raise RolloutError(
            f"{len(self._in_flight)} requests of episodes have no sample after {self._how.request_timeout_s:g} s; "
            "if the sampler needs longer, set rollout.request_timeout higher"
        )


def _key(id: SampleId) -> tuple[int, int]:
    return id.submission, id.sample


def _set(future: Future[Sample], sample: Sample) -> None:
    if future.set_running_or_notify_cancel():  # False: the environment cancelled the request
        future.set_result(sample)
