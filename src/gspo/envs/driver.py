"""Many episodes at once against one sampler: a workflow (`train/rollout.py`) whose samples are whole episodes.

Environments run as asyncio tasks in a thread of their own and ask through their clients; here, on the trainer's side,
what they ask is submitted and what the sampler completes is handed back. Two ways to take turns:

rounds      (the sampler decodes in this process) all environments think until each waits for an answer or has ended;
            then everything that was asked is sampled; again. What is computed together is then a function of the seed,
            not of timing, and tools run beside each other.
otherwise   (sampler servers) whatever is asked is submitted at once; nobody waits for anybody.

Whatever goes wrong in an episode costs its one sample, which comes with a typed Failure: an environment that raises
(crash), takes longer than `timeout_s` between two requests (timeout), or would never end (limit). One that blocks the
thread, instead of awaiting, fails too; the others then begin anew in a new thread and get the answers they had.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gspo.envs.chat import Chat
from gspo.envs.client import Client, EpisodeError
from gspo.envs.episode import episode_sample
from gspo.errors import DataError, RolloutError
from gspo.sampling.api import Sampler
from gspo.types import Failure, Outcome, Request, Sample, SampleId, Score

# async (client, data) → a reward, {"reward": …, parts…}, or None: the configured reward reads the last answer.
Environment = Callable[[Client, Mapping[str, Any]], Awaitable[Any]]

# Seconds between two looks at sampler servers.
PAUSE = 0.005
# Seconds in which a thread of environments that is not blocked answers.
GRACE = 1.0
_LONGEST = 500  # characters of an environment's complaint that are kept


@dataclass(eq=False)
class _Episode:
    request: Request
    client: Client
    task: asyncio.Task[None] | None = None
    since: float = 0.0  # when its environment last got the word
    waiting: dict[SampleId, Future[Sample]] = field(default_factory=dict)
    answers: dict[SampleId, tuple[Request, Sample]] = field(default_factory=dict)  # for beginning anew


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
        self._environment, self._chat = environment, chat
        self._at_once = at_once  # episodes; the others begin as these end
        self._max_context, self._max_turns, self._timeout_s = max_context, max_turns, timeout_s
        self._rounds, self._request_timeout_s = rounds, request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False

    def __call__(self, requests: Sequence[Request], sampler: Sampler) -> Iterator[Sample]:
        lot = _Lot(self, sampler)
        try:
            lot.begin(requests)
            yield from lot.in_rounds() if self._rounds else lot.as_they_come()
        finally:
            lot.give_up()

    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the environments, in a thread that does nothing else."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            loop.set_default_executor(_Threads())
            threading.Thread(target=_run, args=(loop,), name="environments", daemon=True).start()
        return self._loop

    def metrics(self) -> Mapping[str, float]:
        """What the environment has counted since the last call, where it counts (`metrics()`)."""
        count = getattr(self._environment, "metrics", None)
        return {} if count is None else count()

    def close(self) -> None:
        """Let go of the thread, and close the environment where it has a `close`."""
        self.is_closed = True  # whoever plays in another thread stops at the next look
        self._leave_loop()
        if callable(close := getattr(self._environment, "close", None)):
            close()

    def _leave_loop(self) -> None:
        """Whoever blocks the thread keeps it until they are done, or the process is."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _Lot:
    """The episodes of one call."""

    def __init__(self, how: Episodes, sampler: Sampler) -> None:
        self._how, self._sampler = how, sampler
        self._to_come: deque[Request] = deque()
        self._open: dict[tuple[int, int], _Episode] = {}
        self._asked: list[Request] = []
        self._flying: dict[SampleId, Request] = {}  # what the sampler has not answered yet
        self._ended: list[Sample] = []
        # What environments say: (episode, request, future) or (episode, outcome).
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    # The two ways

    def in_rounds(self) -> Iterator[Sample]:
        while self._open and not self._how.is_closed:
            self._let_think()
            yield from self._take_ended()
            self._submit()
            for sample in self._sampler.completed(self._how._request_timeout_s):
                self._deliver(sample)
            if self._flying:
                self._refuse_silence()

    def as_they_come(self) -> Iterator[Sample]:
        heard = time.monotonic()
        while self._open or self._flying or self._to_come:
            self._admit()
            with contextlib.suppress(queue.Empty):
                self._hear(self._inbox.get(timeout=PAUSE))
                while True:
                    self._hear(self._inbox.get_nowait())
            self._end_the_late()
            yield from self._take_ended()
            if not self._flying:
                heard = time.monotonic()
            self._submit()
            for sample in self._sampler.completed(0.0):
                heard = time.monotonic()
                self._deliver(sample)
            if self._flying and time.monotonic() - heard > self._how._request_timeout_s:
                self._refuse_silence()
        yield from self._take_ended()

    # Environments

    def begin(self, requests: Sequence[Request]) -> None:
        self._to_come.extend(requests)
        self._admit()

    def _admit(self) -> None:
        while self._to_come and len(self._open) < self._how._at_once:
            self._start(self._to_come.popleft(), {})

    def _start(self, request: Request, answers: dict[SampleId, tuple[Request, Sample]]) -> None:
        how = self._how

        def ask(asked: Request) -> Future[Sample]:
            future: Future[Sample] = Future()
            self._inbox.put((episode, asked, future))
            return future

        client = Client(request, chat=how._chat, ask=ask, max_turns=how._max_turns, max_context=how._max_context)
        episode = _Episode(request, client, since=time.monotonic(), answers=answers)
        self._open[_key(request.id)] = episode
        loop = how.loop()
        loop.call_soon_threadsafe(self._live, loop, episode)

    def _live(self, loop: asyncio.AbstractEventLoop, episode: _Episode) -> None:
        episode.task = loop.create_task(self._play(episode))

    async def _play(self, episode: _Episode) -> None:
        """An environment from beginning to end; what becomes of it is always said, and never raised."""
        try:
            said = await self._how._environment(episode.client, dict(episode.client.prompt.data))
            outcome = outcome_of(said, episode.client.turn_rewards)
        except EpisodeError as error:
            outcome = Failure(error.kind, f"environment: {error}"[:_LONGEST])
        except asyncio.CancelledError:
            return  # given up: its end was said by whoever did
        except BaseException as error:  # a SystemExit of the user's code must not end this thread
            outcome = Failure("crash", f"environment: {type(error).__name__}: {str(error)[:_LONGEST]}")
        self._inbox.put((episode, outcome))

    def _let_think(self) -> None:
        """Until every episode waits for an answer or has ended; one that takes too long has ended."""
        while True:
            self._settle()
            self._admit()
            if not any(self._is_thinking(episode) for episode in self._open.values()):
                return
            with contextlib.suppress(queue.Empty):
                self._hear(self._inbox.get(timeout=0.1))
            self._end_the_late()

    def _settle(self) -> None:
        """Hear all that environments say without being answered: parallel requests of one come together."""
        for _ in range(4):
            passed = threading.Event()
            self._how.loop().call_soon_threadsafe(passed.set)
            if not passed.wait(GRACE):
                return  # busy or blocked; deadlines decide
        with contextlib.suppress(queue.Empty):
            while True:
                self._hear(self._inbox.get_nowait())

    def _hear(self, said: tuple[Any, ...]) -> None:
        episode = said[0]
        if self._open.get(_key(episode.request.id)) is not episode:
            return  # given up already
        if len(said) == 2:
            self._end(episode, said[1])
            return
        request, future = said[1:]
        known, flying = episode.answers.get(request.id), self._flying.get(request.id)
        if known is not None and known[0] == request:  # begun anew: what was sampled is not sampled again
            episode.since = time.monotonic()
            _set(future, known[1])
        elif flying is not None and flying != request:
            self._end(episode, Failure("crash", "environment: begun anew, it asked for something else"))
        else:
            episode.waiting[request.id] = future
            if flying is None:
                self._asked.append(request)

    def _is_thinking(self, episode: _Episode) -> bool:
        return not episode.waiting

    def _end_the_late(self) -> None:
        late = [e for e in self._open.values() if self._is_thinking(e) and self._is_late(e)]
        if not late:
            return
        alive = threading.Event()
        loop = self._how.loop()
        loop.call_soon_threadsafe(alive.set)
        limit = self._how._timeout_s
        if alive.wait(GRACE):
            for episode in late:
                self._end(episode, Failure("timeout", f"environment: silent for {limit:g} s (env.timeout)"))
            return
        running = asyncio.current_task(loop)
        why = Failure(
            "timeout", f"environment: blocked its thread for {limit:g} s (env.timeout); await what takes long"
        )
        blocking = [e for e in self._open.values() if e.task is not None and e.task is running] or late
        for episode in blocking:
            self._end(episode, why)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The episodes that a blocked thread holds, in a new one."""
        self._how._leave_loop()
        self._asked = []
        for episode in list(self._open.values()):
            episode.client.close("the episode was begun anew")
            self._start(episode.request, episode.answers)

    def _is_late(self, episode: _Episode) -> bool:
        return time.monotonic() - episode.since > self._how._timeout_s

    def _end(self, episode: _Episode, outcome: Outcome | None) -> None:
        """What the episode came to; requests that it leaves behind are answered to nobody."""
        del self._open[_key(episode.request.id)]
        client = episode.client
        client.close("the episode has ended")
        self._cancel(episode)
        self._asked = [request for request in self._asked if request.id not in episode.waiting]
        self._ended.append(
            episode_sample(
                episode.request.id,
                client.exchanges,
                prompt=episode.request.prompt,
                outcome=outcome,
                turn_rewards=client.turn_rewards,
            )
        )

    def _cancel(self, episode: _Episode) -> None:
        loop = self._how._loop
        if loop is not None and episode.task is not None and not episode.task.done():
            loop.call_soon_threadsafe(episode.task.cancel)

    def _take_ended(self) -> list[Sample]:
        ended, self._ended = self._ended, []
        return ended

    def give_up(self) -> None:
        """Nobody waits for what is left; an error or the caller's end came before theirs."""
        for episode in self._open.values():
            episode.client.close("the run has ended")
            self._cancel(episode)
        self._open.clear()
        self._to_come.clear()

    # The sampler

    def _submit(self) -> None:
        # By id: the order in which environments spoke up is timing.
        requests, self._asked = sorted(self._asked, key=lambda request: request.id), []
        if not requests:
            return
        try:
            self._sampler.submit(requests)
            self._flying |= {request.id: request for request in requests}
        except DataError:
            # One of them cannot be sampled, and costs its own episode alone.
            for request in requests:
                try:
                    self._sampler.submit([request])
                    self._flying[request.id] = request
                except DataError as error:
                    self._refuse(request, error)

    def _refuse(self, request: Request, error: DataError) -> None:
        episode = self._open[_key(request.id)]
        future = episode.waiting.pop(request.id)
        episode.since = time.monotonic()
        if future.set_running_or_notify_cancel():
            future.set_exception(EpisodeError(str(error)))

    def _deliver(self, sample: Sample) -> None:
        request, episode = self._flying.pop(sample.id, None), self._open.get(_key(sample.id))
        if request is None or episode is None:
            return  # its episode has ended
        episode.answers[sample.id] = request, sample
        if (future := episode.waiting.pop(sample.id, None)) is not None:
            episode.since = time.monotonic()
            _set(future, sample)

    def _refuse_silence(self) -> None:
        raise RolloutError(
            f"{len(self._flying)} answers to episodes are missing after {self._how._request_timeout_s:g} s; "
            "if the sampler needs longer, set rollout.request_timeout higher"
        )


class _Threads(ThreadPoolExecutor):
    """For `asyncio.to_thread`: a thread per call. A pool's bound would let waiting agents keep out those they wait for,
    and its threads, if one hangs, would not let the process end."""

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


def outcome_of(said: Any, turn_rewards: Mapping[int, float]) -> Outcome | None:
    """What an environment's return value means: a number, {"reward": number, part: number, …}, or None.

    The first part, `reward`, says whether the episode was right, as evaluations count it.

    >>> outcome_of({"reward": 1.0, "format": 0.5}, {0: 0.25})
    Score(value=1.25, parts={'reward': 1.0, 'format': 0.5})
    >>> outcome_of(0.5, {})
    Score(value=0.5, parts={})
    """
    if said is None:
        return Score(sum(turn_rewards.values())) if turn_rewards else None
    if not isinstance(said, Mapping):
        said = {"reward": said}
    parts = {str(name): _number(value, str(name)) for name, value in said.items()}
    if "reward" not in parts:
        raise EpisodeError("an environment's dict needs a 'reward'; got " + (", ".join(parts) or "an empty one"))
    parts = {"reward": parts["reward"], **parts}
    value = parts["reward"] + sum(turn_rewards.values())
    return Score(value, {} if len(parts) == 1 and not turn_rewards else parts)


def _number(value: Any, name: str) -> float:
    if not hasattr(value, "__float__") or isinstance(value, str | bytes):
        raise EpisodeError(f"{name} must be a number, got {type(value).__name__}: an environment returns a number, a "
                           "dict of numbers, or None")  # fmt: skip
    number = float(value)
    if not math.isfinite(number):
        raise EpisodeError(f"{name} is {number}; it must be a finite number")
    return number


def _key(id: SampleId) -> tuple[int, int]:
    return id.submission, id.sample


def _set(future: Future[Sample], sample: Sample) -> None:
    if future.set_running_or_notify_cancel():  # its asker may have stopped waiting
        future.set_result(sample)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
    loop.close()
