"""Which prompts may be sampled now, and which groups form the next batch: no threads, no clocks.

With a staleness bound of η weight versions (rollout.max_head_offpolicyness) batch b may be sampled by version b − η and
later. So at version v a group may be submitted only while batches up to v + η are not full:

    taken · n + pending + in flight < (v + η + 1) · n,   n groups per batch

The submission index decides a group's batch, never the time of arrival. A group never slips to a later batch than the
one that it was admitted for, because the groups before it can only be rejected. η = 0 is synchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gspo.types import Group


class Snapshot(NamedTuple):
    """What a checkpoint saves of a buffer: no group is lost and none is used twice."""

    submission: int  # next prompt of the stream
    resubmit: tuple[int, ...]  # submissions before it that must be sampled again
    groups: tuple[Group, ...]  # scored and accepted, by submission index


class Buffer:
    """Groups on their way from the prompt stream to the trainer.

    >>> buffer = Buffer(batch_size=2, max_staleness=1)
    >>> buffer.submit(version=0), buffer.submit(version=0), buffer.submit(version=1)
    ([0, 1, 2, 3], [], [4, 5])
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int = 0,
        *,
        max_in_flight: int | None = None,
        num_batches: int | None = None,
        taken: int = 0,
        begin: Snapshot | None = None,
    ) -> None:
        """max_in_flight: most groups being sampled; num_batches: length of the run; taken: batches that the trainer
        has taken; begin: a checkpoint's snapshot."""
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.num_batches = num_batches
        self.taken = taken
        self.submission, resubmit, groups = begin or (0, (), ())
        self.rejected: Counter[str] = Counter()  # by reason, since the last batch was taken
        self._max_in_flight = max_in_flight
        self._resubmit: list[int] = sorted(resubmit)
        self._in_flight: dict[int, int] = {}  # submission → how many groups were rejected in its place
        self._pending: dict[int, Group] = {group.submission: group for group in groups}
        self._vacated: list[int] = []  # that number, for each place that a rejected group has left

    @property
    def held(self) -> int:
        """Groups that count against the bounds: pending, in flight, or to be resubmitted."""
        return len(self._pending) + len(self._in_flight) + len(self._resubmit)

    @property
    def num_pending(self) -> int:
        """Groups that are scored and accepted."""
        return len(self._pending)

    @property
    def num_wanted(self) -> int:
        """Groups that would be here if none had been rejected."""
        return self.held + len(self._vacated)

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def rounds(self) -> int:
        """The largest number of times that one place has been refilled."""
        return max((*self._in_flight.values(), *self._vacated), default=0)

    def allowance(self, version: int) -> int:
        """How many groups may be submitted at this version of the weights."""
        # Batches up to version + η may be sampled now, but none beyond the end of the run.
        last = version + self.max_staleness + 1
        last = last if self.num_batches is None else min(last, self.num_batches)
        room = (last - self.taken) * self.batch_size - self.held
        # Groups to be resubmitted are already counted in `held`, so they are always allowed.
        room = len(self._resubmit) + max(room, 0)
        return room if self._max_in_flight is None else min(room, max(self._max_in_flight - len(self._in_flight), 0))

    def submit(self, version: int) -> list[int]:
        """The submissions to sample now, in order; from here on they are in flight."""
        out: list[int] = []
        for _ in range(self.allowance(version)):
            # Earlier submissions come first: the next batch waits for them.
            if self._resubmit:
                submission, refills = self._resubmit.pop(0), 0
            else:
                # A new prompt takes the place of a rejected group and inherits its number of refills.
                submission, refills = self.submission, self._vacated.pop() if self._vacated else 0
                self.submission += 1
            self._in_flight[submission] = refills
            out.append(submission)
        return out

    def accept(self, group: Group) -> None:
        """A group in flight is scored and will be trained on."""
        del self._in_flight[group.submission]
        self._pending[group.submission] = group

    def reject(self, submission: int, why: str) -> None:
        """A group in flight is not trained on; the next prompt of the stream takes its place."""
        self._vacated.append(self._in_flight.pop(submission) + 1)
        self.rejected[why] += 1

    @property
    def ready(self) -> bool:
        """Whether the next batch is complete: enough groups, and no earlier submission is still open."""
        first = self._first()
        # An earlier group that is still open could belong to this batch: wait until it is accepted or rejected.
        undecided = min((*self._in_flight, *self._resubmit), default=None)
        return len(first) == self.batch_size and (undecided is None or first[-1] < undecided)

    def take(self) -> tuple[list[Group], int]:
        """The next batch in the order of submission, and how many were rejected on the way to it."""
        assert self.ready, "the next batch is not complete"
        groups, refilled = [self._pending.pop(i) for i in self._first()], self.rejected.total()
        self.rejected.clear()
        self.taken += 1
        return groups, refilled

    def put_back(self, groups: Iterable[Group]) -> None:
        """Return a batch that could not be used: its prompts are sampled again."""
        # Pending groups stay; `ready` waits for these submissions, because their indices are lower.
        self._resubmit = sorted([*self._resubmit, *(group.submission for group in groups)])
        self.taken -= 1

    def snapshot(self) -> Snapshot:
        """Groups in flight must be resubmitted; at the end of the stream they count as never submitted."""
        submission, resubmit = self.submission, sorted([*self._in_flight, *self._resubmit])
        # Open submissions at the end of the stream need no entry: the stream resumes at the first of them.
        while resubmit and resubmit[-1] == submission - 1:
            submission = resubmit.pop()
        return Snapshot(submission, tuple(resubmit), tuple(self._pending[i] for i in sorted(self._pending)))

    def _first(self) -> Sequence[int]:
        return sorted(self._pending)[: self.batch_size]
