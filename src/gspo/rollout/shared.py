"""One sampler and one reward pool for two users: training, and evaluations or a user's workflow.

Each poll takes everything that is ready. The producer keeps what belongs to training; the rest goes to the inbox of the
`SharedSampler` or `SharedRewards` that submitted it. One lock guards all of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gspo.errors import RolloutError
from gspo.rewards.call import RewardItem
from gspo.rewards.route import Rewards
from gspo.sampling.api import Sampler
from gspo.types import Outcome, Request, Sample, SampleId

Scored = tuple[Hashable, tuple[Outcome, ...]]

# Seconds between two polls of the sampler and the rewards, when sampling runs in the background.
POLL_S = 0.005


class GroupSource(Protocol):
    """The part of a `RolloutProducer` that shared samplers and rewards use."""

    background: bool
    engine: Sampler
    scorer: Rewards
    lock: threading.RLock
    sample_inboxes: dict[SampleId, deque[Sample]]
    reward_inboxes: dict[Hashable, deque[Scored]]

    def poll_sampler(self) -> None: ...
    def poll_rewards(self, deadline_s: float | None, done: Callable[[], bool]) -> None: ...


class SharedSampler:
    """A sampler for requests other than training's; it returns only the samples that were submitted here."""

    def __init__(self, source: GroupSource) -> None:
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

    def __init__(self, source: GroupSource) -> None:
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
