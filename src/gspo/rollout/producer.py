"""Sampling and scoring ahead of the trainer, within the bound that `rollout/buffer.py` keeps.

Two ways to drive one buffer. In turn (the sampler shares the trainer's process and weights): at the start of step v all
that the bound admits is sampled by version v, so batch b is sampled by version max(0, b − η) and a run is a function of
its seed; rewards are scored while the trainer trains. Beside (sampler servers): a thread submits, collects and hands to
the rewards while the trainer trains; new weights interrupt what is being generated, which goes on with them. With η = 0
nothing runs ahead and both are the synchronous loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gspo.errors import GspoError, RewardError, RolloutError, TrainingError
from gspo.faults import reached
from gspo.rewards.route import Rewards
from gspo.rewards.spec import RewardItem
from gspo.rollout.buffer import Buffer, Snapshot
from gspo.rollout.groups import Arrivals, Keeps, Workflow, hand_in, is_single_turn, refuse_failures
from gspo.sampling.api import Sampler
from gspo.system.clock import Clock
from gspo.types import Group, Outcome, Prompt, Request, Sample, SampleId

Scored = tuple[Hashable, tuple[Outcome, ...]]

# Seconds between two looks at the sampler and the rewards, when sampling runs beside the trainer.
PAUSE = 0.005
# Seconds that the sampling thread has to end in; it ends with the process in any case.
PATIENCE = 30.0


class Ahead:
    """Batches of scored groups, in the order of submission; see `next`.

    sampler and rewards are for evaluations: what they return of training's finds its way into the buffer.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        sampler: Sampler,
        rewards: Rewards,
        prompt_of: Callable[[int], Prompt],
        arrivals: Arrivals,
        workflow: Workflow,
        beside: bool,
        keeps: Keeps | None = None,
        max_refills: int = 0,
        max_failure_fraction: float = 1.0,
        timeout_s: float = 3600.0,
    ) -> None:
        self.buffer, self.beside = buffer, beside
        self._sampler, self._rewards, self._prompt_of = sampler, rewards, prompt_of
        self._arrivals, self._workflow, self._keeps = arrivals, workflow, keeps
        self._max_refills, self._max_failure_fraction = max_refills, max_failure_fraction
        self._timeout_s = timeout_s
        self._unscored: dict[int, Group] = {}
        self._unjudged: list[Group] = []
        self._recent: list[Group] = []  # scored since failures were last counted
        self._sampled_tokens = 0
        self._failed = False
        # One lock for buffer, sampler and rewards: none of them is made for two threads.
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._owners: dict[SampleId, deque[Sample]] = {}
        self._reward_owners: dict[Hashable, deque[Scored]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._version = 0
        self._heard_at = time.monotonic()
        self.sampler: Sampler = SharedSampler(self) if beside else sampler
        self.rewards: Rewards = SharedRewards(self)

    def next(self, version: int, clock: Clock) -> tuple[list[Group], int]:
        """The batch to train on at this version, and how many groups were rejected on the way to it."""
        try:
            with clock("rollout"):
                if self.beside:
                    self._wait(version)
                else:
                    self._fill(version, clock)
            return self._take(version)
        except BaseException:
            self._failed = True
            raise

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """New weights for the sampler; from here on the bound counts from them."""
        with self._lock:
            self._sampler.load_weights(version, tensors)
            self._version = version

    def snapshot(self) -> Snapshot:
        """What a checkpoint keeps. In turn, what was sampled is scored first, so that nothing is sampled twice."""
        with self._lock:
            if not self.beside and not self._failed:
                self._take_outcomes(None, lambda: not self._unscored)
            return self.buffer.snapshot()

    def count_sampled(self) -> int:
        """Tokens sampled since the last call."""
        with self._lock:
            count, self._sampled_tokens = self._sampled_tokens, 0
            return count

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join(PATIENCE)

    # In turn

    def _fill(self, version: int, clock: Clock) -> None:
        """Sample what the bound admits; then wait for the scores of the next batch alone."""
        while submissions := self.buffer.submit(version):
            for sample in self._workflow(self._expect(submissions), self._sampler):
                self._arrived(sample)
            self._arrivals.refuse_missing(len(submissions))
            if self._keeps is not None:  # what is rejected makes room
                with clock("reward"):
                    reached("reward.wait")
                    self._take_outcomes(None, lambda: not self._unscored)
                self._judge()
        if not self.buffer.ready:
            with clock("reward"):
                reached("reward.wait")
                self._take_outcomes(None, lambda: self.buffer.ready)

    # Beside

    def _wait(self, version: int) -> None:
        with self._news:
            self._version = version
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sampling ahead", daemon=True)
                self._thread.start()
            while not self.buffer.ready:
                if self._error is not None:
                    if isinstance(self._error, GspoError):
                        raise self._error
                    what = f"{type(self._error).__name__}: {self._error}"
                    raise RolloutError(f"sampling beside the trainer failed: {what}") from self._error
                self._news.wait(1.0)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
                time.sleep(PAUSE)  # without the lock: it is not fair, and the trainer may be waiting for it
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()

    def _turn(self) -> None:
        """Submit what is admitted, take what is ready."""
        continuous = is_single_turn(self._workflow)
        with self._lock:
            submissions = self.buffer.submit(self._version)
            requests = self._expect(submissions)
            if requests and continuous:
                self._sampler.submit(requests)
        if requests and not continuous:
            # A workflow of the user's is a loop of its own: it gets what is admitted, one lot after another.
            for sample in self._workflow(requests, SharedSampler(self)):
                with self._lock:
                    self._arrived(sample)
                    self._look()
            with self._lock:
                self._arrivals.refuse_missing(len(submissions))
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Take what the sampler and the rewards have ready."""
        if self._arrivals:
            self._poll_sampler()
            if self._arrivals and time.monotonic() - self._heard_at > self._timeout_s:
                raise RolloutError(
                    f"no sample came for {self._timeout_s:g} s while {len(self._arrivals)} groups were being sampled; "
                    "if the sampler needs longer, set rollout.request_timeout higher"
                )
        if self._unscored:
            self._take_outcomes(0.0, lambda: False)
        if self._unjudged:
            self._judge()
        if self.buffer.ready:
            self._news.notify_all()

    def _poll_sampler(self) -> None:
        for sample in self._sampler.completed(0.0):
            self._heard_at = time.monotonic()
            inbox = self._owners.pop(sample.id, None)
            if inbox is None:
                self._arrived(sample)
            else:
                inbox.append(sample)

    # Both

    def _expect(self, submissions: Sequence[int]) -> list[Request]:
        if submissions and not self._arrivals:
            self._heard_at = time.monotonic()
        return self._arrivals.expect([(i, self._prompt_of(i)) for i in submissions])

    def _arrived(self, sample: Sample) -> None:
        self._sampled_tokens += sum(int(s.mask.sum()) for s in sample.sequences)
        if (group := self._arrivals.add(sample)) is not None:
            self._unscored[group.submission] = group
            hand_in(self._rewards, group)

    def _take_outcomes(self, deadline_s: float | None, done: Callable[[], bool]) -> None:
        """Take what the rewards say until `done` (None: however long it takes)."""
        if done():
            return
        for key, outcomes in self._rewards.completed(deadline_s):
            inbox = self._reward_owners.pop(key, None)
            if inbox is None:
                self._score(key, outcomes)
            else:
                inbox.append((key, outcomes))
            if done():
                return

    def _score(self, key: Any, outcomes: tuple[Outcome, ...]) -> None:
        group = replace(self._unscored.pop(key), outcomes=outcomes)
        if self._keeps is None:
            self.buffer.keep(group)
        else:
            self._unjudged.append(group)

    def _judge(self) -> None:
        """Which of the groups scored since are trained on; too many failures, or too few worth training on, end it."""
        assert self._keeps is not None
        groups, self._unjudged = sorted(self._unjudged, key=lambda group: group.submission), []
        self._recent += groups
        # Beside the trainer groups come one by one: a share of failures is then of as many as a batch has.
        if not self.beside or len(self._recent) >= self.buffer.batch_size:
            recent, self._recent = self._recent, []
            refuse_failures(recent, self._max_failure_fraction)
        for group in groups:
            if (why := self._keeps(group)) is None:
                self.buffer.keep(group)
            else:
                self.buffer.reject(group.submission, why)
        if self.buffer.rounds > self._max_refills:
            reasons = "; ".join(f"{count} groups {why}" for why, count in self.buffer.rejected.most_common())
            raise TrainingError(
                f"{1 + self._max_refills} rounds of sampling (actor.max_refills) gave {self.buffer.num_waiting} of "
                f"{self.buffer.num_wanted} groups to train on: {reasons}"
            )

    def _take(self, version: int) -> tuple[list[Group], int]:
        with self._lock:
            groups, refilled = self.buffer.take()
            if self._keeps is None:
                try:
                    refuse_failures(groups, self._max_failure_fraction)
                except RewardError:
                    self.buffer.put_back(groups)  # another time their rewards may answer
                    raise
        sequences = [sequence for g in groups for s in g.samples for sequence in s.sequences]
        oldest = min((int(s.versions.min()) for s in sequences if len(s.versions)), default=version)
        if oldest < version - self.buffer.max_staleness:
            with self._lock:
                self.buffer.put_back(groups)
            raise RolloutError(
                f"a sample of version {oldest} came to be trained on at version {version}, beyond "
                f"rollout.max_head_offpolicyness = {self.buffer.max_staleness}: the sampler did not load the weights "
                "it was given"
            )
        return groups, refilled


class SharedSampler:
    """A sampler beside the training requests of an `Ahead`: everybody gets their own samples."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._inbox: deque[Sample] = deque()
        self._num_out = 0

    @property
    def version(self) -> int:
        return self._ahead._sampler.version

    def submit(self, requests: Sequence[Request]) -> None:
        with self._ahead._lock:
            self._ahead._sampler.submit(requests)
            self._ahead._owners |= {request.id: self._inbox for request in requests}
            self._num_out += len(requests)

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while self._num_out:
            with self._ahead._lock:
                if not self._inbox:
                    self._ahead._poll_sampler()
            while self._inbox:
                self._num_out -= 1
                yield self._inbox.popleft()
            if deadline is not None and time.monotonic() >= deadline:
                return
            if self._num_out:
                time.sleep(PAUSE)

    def health(self) -> Mapping[str, Any]:
        with self._ahead._lock:
            return self._ahead._sampler.health()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RolloutError(
            "a workflow cannot abort, pause or reload a sampler that also samples for others; "
            "set rollout.max_head_offpolicyness=0"
        )

    abort = pause = resume = sleep = wake = load_weights = close = _refuse


class SharedRewards:
    """Rewards beside the training groups of an `Ahead`."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._inbox: deque[Scored] = deque()
        self._num_out = 0

    def submit(self, key: Hashable, item: RewardItem) -> None:
        with self._ahead._lock:
            self._ahead._rewards.submit(key, item)
            self._ahead._reward_owners[key] = self._inbox
            self._num_out += 1

    def completed(self, deadline_s: float | None = None) -> Iterator[Scored]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while self._num_out:
            wait_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            with self._ahead._lock:
                # In turn there is nobody to make room for.
                slice_s = 0.0 if self._ahead.beside else wait_s
                self._ahead._take_outcomes(slice_s, lambda: len(self._inbox) == self._num_out)
            while self._inbox:
                self._num_out -= 1
                yield self._inbox.popleft()
            if wait_s == 0.0:
                return
            if self._num_out and self._ahead.beside:
                time.sleep(PAUSE)  # without the lock, as everywhere

    def close(self) -> None:
        self._ahead._rewards.close()
