"""Sampling and scoring ahead of the trainer, within the staleness bound η of `rollout/buffer.py`.

Each poll takes everything that is ready. The producer keeps what belongs to training; the rest goes to the inbox of the
`SharedSampler` or `SharedRewards` that submitted it. One lock guards all of it.

One buffer, two modes:

inline      (the sampler shares the trainer's process and weights) at the start of step v the producer samples all that
            the bound admits with version v, so batch b is sampled by version max(0, b − η) and a run is a function of
            its seed. Rewards are scored while the trainer trains.
background  (sampler servers) a thread submits requests, collects samples and submits them for scoring while the
            trainer trains. New weights interrupt generation; the samples continue with the new weights.

With η = 0 nothing runs ahead, and both modes are the synchronous loop.
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
from gspo.rewards import RewardItem, Rewards
from gspo.rollout.buffer import Buffer, Snapshot
from gspo.rollout.groups import GroupAssembler, RejectReason, Workflow, is_single_turn, refuse_failures, submit_rewards
from gspo.sampling import Sampler
from gspo.system import Clock
from gspo.types import Group, Outcome, Prompt, Request, Sample, SampleId

Scored = tuple[Hashable, tuple[Outcome, ...]]

# Seconds between two polls of the sampler and the rewards, when sampling runs in the background.
POLL_S = 0.005


class SharedSampler:
    """A sampler for requests other than training's; it returns only the samples that were submitted here."""

    def __init__(self, source: RolloutProducer) -> None:
        self._source = source
        self._inbox: deque[Sample] = deque()
        self._num_out = 0

    @property
    def version(self) -> int:
        return self._source.engine.version

    def submit(self, requests: Sequence[Request]) -> None:
        with self._source.lock:
            # The request is registered after submit() has accepted it, under the same lock as every poll.
            self._source.engine.submit(requests)
            self._source.sample_inboxes |= {request.id: self._inbox for request in requests}
            self._num_out += len(requests)

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while self._num_out:
            with self._source.lock:
                # The producer's thread may have filled the inbox already.
                if not self._inbox:
                    self._source.poll_sampler()
            # Outside the lock: the caller runs between two samples.
            while self._inbox:
                self._num_out -= 1
                yield self._inbox.popleft()
            if deadline is not None and time.monotonic() >= deadline:
                return
            # Without the lock, so that the producer's thread can take it.
            if self._num_out:
                time.sleep(POLL_S)  # wait: POLL_S, the caller's deadline or the stall timeout

    def health(self) -> Mapping[str, Any]:
        with self._source.lock:
            return self._source.engine.health()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RolloutError(
            "a workflow cannot abort, pause or reload a sampler that training uses at the same time; "
            "set rollout.max_head_offpolicyness=0"
        )

    abort = pause = resume = sleep = wake = load_weights = close = _refuse


class SharedRewards:
    """Rewards for groups other than training's; it returns only the outcomes that were submitted here."""

    def __init__(self, source: RolloutProducer) -> None:
        self._source = source
        self._inbox: deque[Scored] = deque()
        self._num_out = 0

    def submit(self, key: Hashable, item: RewardItem) -> None:
        with self._source.lock:
            self._source.scorer.submit(key, item)
            self._source.reward_inboxes[key] = self._inbox
            self._num_out += 1

    def completed(self, deadline_s: float | None = None) -> Iterator[Scored]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while self._num_out:
            wait_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            with self._source.lock:
                # Inline there is no other thread that needs the lock.
                slice_s = 0.0 if self._source.background else wait_s
                self._source.poll_rewards(slice_s, lambda: len(self._inbox) == self._num_out)
            # Outside the lock: the caller runs between two outcomes.
            while self._inbox:
                self._num_out -= 1
                yield self._inbox.popleft()
            if wait_s == 0.0:
                return
            if self._num_out and self._source.background:
                # wait: POLL_S, the caller's deadline or the stall timeout
                time.sleep(POLL_S)  # without the lock, so that the sampling thread can take it

    def close(self) -> None:
        self._source.scorer.close()


# Seconds that `close` waits for the sampling thread; it is a daemon thread and ends with the process in any case.
CLOSE_S = 30.0


class NullProducer:
    """The producer of a rank other than 0: takes part in gathering the weights and has no sampler."""

    def __init__(self, in_process: bool) -> None:
        self.in_process = in_process  # whether rank 0 samples in its own process

    def publish(self, version: int, tensors: Iterable[Any] | None) -> None:
        for _ in tensors or ():  # each tensor is gathered from all ranks as it is read
            pass


class RolloutProducer:
    """Produces batches of scored groups in the order of submission; see `next`.

    `sampler` and `rewards` are for evaluations: samples and scores of training that arrive meanwhile reach the buffer.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        sampler: Sampler,
        rewards: Rewards,
        prompt_of: Callable[[int], Prompt],
        assembler: GroupAssembler,
        workflow: Workflow,
        background: bool,
        reject_reason: RejectReason | None = None,
        max_refills: int = 0,
        max_failure_fraction: float = 1.0,
        timeout_s: float = 3600.0,
    ) -> None:
        self.buffer, self.background = buffer, background
        self.engine, self.scorer, self._prompt_of = sampler, rewards, prompt_of
        self._assembler, self._workflow, self._reject_reason = assembler, workflow, reject_reason
        self._max_refills, self._max_failure_fraction = max_refills, max_failure_fraction
        self._timeout_s = timeout_s
        self._unscored: dict[int, Group] = {}
        self._unfiltered: list[Group] = []  # scored, but the filter has not seen them
        self._recent: list[Group] = []  # scored since failures were last counted
        self._sampled_tokens = 0
        self._failed = False
        # One lock for buffer, sampler and rewards: none of them is thread-safe.
        # wait: none, held for one slice of sampling or publishing weights; waits release it
        self.lock = threading.RLock()
        # wait: none, held for one slice of sampling or publishing weights; waits release it
        self._changed = threading.Condition(self.lock)
        self.sample_inboxes: dict[SampleId, deque[Sample]] = {}  # of requests that are not training's
        self.reward_inboxes: dict[Hashable, deque[Scored]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._version = 0
        self._last_sample_at = time.monotonic()
        self.sampler: Sampler = SharedSampler(self) if background else sampler
        self.rewards: Rewards = SharedRewards(self)

    def next(self, version: int, clock: Clock) -> tuple[list[Group], int]:
        """The batch to train on at this version, and how many groups were rejected on the way to it."""
        try:
            with clock("rollout"):
                if self.background:
                    self._wait(version)
                else:
                    self._fill(version, clock)
            return self._take(version)
        # After an error `snapshot` must not wait for rewards, which may never arrive.
        except BaseException:
            self._failed = True
            raise

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Load new weights into the sampler; from now on the staleness bound counts from this version."""
        with self.lock:
            # Under the lock: the background thread must not use the sampler during a load.
            self.engine.load_weights(version, tensors)
            self._version = version

    def snapshot(self) -> Snapshot:
        """What a checkpoint saves. Inline, sampled groups are scored first, so that none is sampled twice."""
        with self.lock:
            if not self.background and not self._failed:
                self.poll_rewards(None, lambda: not self._unscored)
            return self.buffer.snapshot()

    def count_sampled(self) -> int:
        """Tokens sampled since the last call."""
        with self.lock:
            count, self._sampled_tokens = self._sampled_tokens, 0
            return count

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # wait: CLOSE_S, the trainer

    def _fill(self, version: int, clock: Clock) -> None:
        """Sample what the bound admits; then wait for the scores of the next batch only."""
        while submissions := self.buffer.submit(version):
            for sample in self._workflow(self._requests(submissions), self.engine):
                self._add(sample)
            self._assembler.refuse_missing(len(submissions))
            if self._reject_reason is not None:  # a rejected group makes room for another
                with clock("reward"):
                    reached("reward.wait")
                    self.poll_rewards(None, lambda: not self._unscored)
                self._filter(self._reject_reason)
        # Only the next batch is waited for; other groups are scored while the trainer trains.
        if not self.buffer.ready:
            with clock("reward"):
                reached("reward.wait")
                self.poll_rewards(None, lambda: self.buffer.ready)

    def _wait(self, version: int) -> None:
        with self._changed:
            self._version = version
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rollout producer", daemon=True)
                self._thread.start()
            while not self.buffer.ready:
                if self._error is not None:
                    # Errors of gspo keep their type and message; others get an explanation.
                    if isinstance(self._error, GspoError):
                        raise self._error
                    what = f"{type(self._error).__name__}: {self._error}"
                    raise RolloutError(f"sampling in the background failed: {what}") from self._error
                # The timeout is a safety net: the thread notifies when a batch is ready or an error occurred.
                self._changed.wait(1.0)  # wait: 1 s, rollout.request_timeout without a sample or the stall timeout

    def _run(self) -> None:
        try:
            while not self._closing:
                self._iterate()
                # wait: POLL_S, the sampling thread
                time.sleep(POLL_S)  # without the lock: it is not fair, and the trainer may be waiting for it
        # The trainer's thread raises the error: an exception in this thread would only be printed.
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _iterate(self) -> None:
        """Submit what the bound admits, collect what is ready."""
        single = is_single_turn(self._workflow)
        # The lock is held only for short steps, so that the trainer can publish weights in between.
        with self.lock:
            submissions = self.buffer.submit(self._version)
            requests = self._requests(submissions)
            if requests and single:
                self.engine.submit(requests)
        if requests and not single:
            # A user's workflow runs its own loop: it gets the admitted requests, one batch after another.
            for sample in self._workflow(requests, SharedSampler(self)):
                with self.lock:
                    self._add(sample)
                    self._collect()
            with self.lock:
                self._assembler.refuse_missing(len(submissions))
        with self.lock:
            self._collect()

    def _collect(self) -> None:
        """Take what the sampler and the rewards have ready."""
        if self._assembler:
            self.poll_sampler()
            if self._assembler and time.monotonic() - self._last_sample_at > self._timeout_s:
                raise RolloutError(
                    f"no sample arrived for {self._timeout_s:g} s while {len(self._assembler)} groups were being "
                    "sampled; if the sampler needs longer, set rollout.request_timeout higher"
                )
        if self._unscored:
            self.poll_rewards(0.0, lambda: False)
        if self._unfiltered and self._reject_reason is not None:
            self._filter(self._reject_reason)
        if self.buffer.ready:
            self._changed.notify_all()

    def poll_sampler(self) -> None:
        """Take finished samples: training's own, or those of a `SharedSampler`, which go to its inbox."""
        for sample in self.engine.completed(0.0):
            self._last_sample_at = time.monotonic()
            inbox = self.sample_inboxes.pop(sample.id, None)
            if inbox is None:
                self._add(sample)
            else:
                inbox.append(sample)

    def poll_rewards(self, deadline_s: float | None, done: Callable[[], bool]) -> None:
        """Take outcomes until `done` or the deadline (None: no deadline)."""
        if done():
            return
        for key, outcomes in self.scorer.completed(deadline_s):
            inbox = self.reward_inboxes.pop(key, None)
            if inbox is None:
                self._score(key, outcomes)
            else:
                inbox.append((key, outcomes))
            if done():
                return

    def _requests(self, submissions: Sequence[int]) -> list[Request]:
        if submissions and not self._assembler:
            self._last_sample_at = time.monotonic()
        return self._assembler.expect([(i, self._prompt_of(i)) for i in submissions])

    def _add(self, sample: Sample) -> None:
        # Only sampled tokens count; those of an environment have mask False.
        self._sampled_tokens += sum(int(s.mask.sum()) for s in sample.sequences)
        if (group := self._assembler.add(sample)) is not None:
            self._unscored[group.submission] = group
            submit_rewards(self.scorer, group)

    def _score(self, key: Any, outcomes: tuple[Outcome, ...]) -> None:
        group = replace(self._unscored.pop(key), outcomes=outcomes)
        if self._reject_reason is None:
            self.buffer.accept(group)
        else:
            self._unfiltered.append(group)

    def _filter(self, reject_reason: RejectReason) -> None:
        """Accept or reject newly scored groups; too many failures or too many refills end the run."""
        # By submission: the order in which the rewards finished does not matter.
        groups, self._unfiltered = sorted(self._unfiltered, key=lambda group: group.submission), []
        self._recent += groups
        # In the background groups arrive one by one: count failures over as many groups as a batch has.
        if not self.background or len(self._recent) >= self.buffer.batch_size:
            recent, self._recent = self._recent, []
            refuse_failures(recent, self._max_failure_fraction)
        # A rejected group leaves a place, which the next prompt of the stream fills.
        for group in groups:
            if (why := reject_reason(group)) is None:
                self.buffer.accept(group)
            else:
                self.buffer.reject(group.submission, why)
        if self.buffer.rounds > self._max_refills:
            reasons = "; ".join(f"{count} groups {why}" for why, count in self.buffer.rejected.most_common())
            raise TrainingError(
                f"{1 + self._max_refills} rounds of sampling (actor.max_refills) gave {self.buffer.num_pending} of "
                f"{self.buffer.num_wanted} groups to train on: {reasons}"
            )

    def _take(self, version: int) -> tuple[list[Group], int]:
        with self.lock:
            groups, refilled = self.buffer.take()
            # With a filter, `_filter` has counted the failures already.
            if self._reject_reason is None:
                try:
                    refuse_failures(groups, self._max_failure_fraction)
                except RewardError:
                    self.buffer.put_back(groups)  # a resumed run samples and scores them again
                    raise
        # The bound is checked again on the tokens themselves, as a guard against a sampler with old weights.
        sequences = [sequence for g in groups for s in g.samples for sequence in s.sequences]
        oldest = min((int(s.versions.min()) for s in sequences if len(s.versions)), default=version)
        if oldest < version - self.buffer.max_staleness:
            with self.lock:
                self.buffer.put_back(groups)
            raise RolloutError(
                f"a sample of version {oldest} would be trained on at version {version}, beyond "
                f"rollout.max_head_offpolicyness = {self.buffer.max_staleness}: the sampler did not load the weights "
                "that it was sent"
            )
        return groups, refilled
