"""Which prompts may be sampled now, and which groups make the next batch: pure bookkeeping, no threads and no clocks.

With a bound of η weight versions (rollout.max_head_offpolicyness) batch b may be sampled by version b − η and later.
So at version v a group may be submitted only while batches up to v + η are not full:

    taken · n + waiting + in flight < (v + η + 1) · n,   n groups per batch

A group's batch is decided by its submission index among the groups that were kept, never by when it arrived; and it
cannot be later than the one it was admitted for, since those before it can only be rejected. η = 0 is synchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gspo.types import Group


class Snapshot(NamedTuple):
    """What a checkpoint keeps of a buffer: nothing is lost and nothing is used twice."""

    submission: int  # next prompt of the stream
    again: tuple[int, ...]  # submissions before it that are to be sampled anew
    groups: tuple[Group, ...]  # scored and kept, by submission index


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
        queue_size: int | None = None,
        max_in_flight: int | None = None,
        num_batches: int | None = None,
        taken: int = 0,
        begin: Snapshot | None = None,
    ) -> None:
        """queue_size: groups in flight or waiting at once (None: as staleness allows); max_in_flight: groups being
        sampled at once; num_batches: how many are ever wanted; taken: batches the trainer has had; begin: where a
        checkpoint left off."""
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.num_batches = num_batches
        self.taken = taken
        self.submission, again, groups = begin or (0, (), ())
        self.rejected: Counter[str] = Counter()  # by reason, since the last batch was taken
        self._queue_size = queue_size or (max_staleness + 1) * batch_size
        self._max_in_flight = max_in_flight
        self._again: list[int] = sorted(again)
        self._in_flight: dict[int, int] = {}  # submission → how many before it were rejected in its place
        self._waiting: dict[int, Group] = {group.submission: group for group in groups}
        self._vacated: list[int] = []  # the same number, for places that a rejected group has left

    @property
    def held(self) -> int:
        """Groups that count against the bounds: waiting, in flight, or to be sampled again."""
        return len(self._waiting) + len(self._in_flight) + len(self._again)

    @property
    def num_waiting(self) -> int:
        """Groups that are scored and kept."""
        return len(self._waiting)

    @property
    def num_wanted(self) -> int:
        """Groups that would wait if none had been rejected."""
        return self.held + len(self._vacated)

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def rounds(self) -> int:
        """How often in a row a place has been refilled, at most."""
        return max((*self._in_flight.values(), *self._vacated), default=0)

    def allowance(self, version: int) -> int:
        """How many groups may be submitted at this version of the weights."""
        last = version + self.max_staleness + 1
        last = last if self.num_batches is None else min(last, self.num_batches)
        room = min((last - self.taken) * self.batch_size, self._queue_size) - self.held
        room = len(self._again) + max(room, 0)
        return room if self._max_in_flight is None else min(room, max(self._max_in_flight - len(self._in_flight), 0))

    def submit(self, version: int) -> list[int]:
        """The submissions to be sampled now, in order; they are in flight from here on."""
        out: list[int] = []
        for _ in range(self.allowance(version)):
            if self._again:
                submission, refills = self._again.pop(0), 0
            else:
                submission, refills = self.submission, self._vacated.pop() if self._vacated else 0
                self.submission += 1
            self._in_flight[submission] = refills
            out.append(submission)
        return out

    def keep(self, group: Group) -> None:
        """A group in flight is scored and worth training on."""
        del self._in_flight[group.submission]
        self._waiting[group.submission] = group

    def reject(self, submission: int, why: str) -> None:
        """A group in flight is not trained on; the next prompt of the stream takes its place."""
        self._vacated.append(self._in_flight.pop(submission) + 1)
        self.rejected[why] += 1

    @property
    def ready(self) -> bool:
        """Whether the next batch is decided: enough groups, and none still to come that belongs before them."""
        first = self._first()
        undecided = min((*self._in_flight, *self._again), default=None)
        return len(first) == self.batch_size and (undecided is None or first[-1] < undecided)

    def take(self) -> tuple[list[Group], int]:
        """The next batch in the order of submission, and how many were rejected on the way to it."""
        assert self.ready, "the next batch is not complete"
        groups, refilled = [self._waiting.pop(i) for i in self._first()], self.rejected.total()
        self.rejected.clear()
        self.taken += 1
        return groups, refilled

    def put_back(self, groups: Iterable[Group]) -> None:
        """A batch that was taken and could not be used: the same prompts are sampled again."""
        self._again = sorted([*self._again, *(group.submission for group in groups)])
        self.taken -= 1

    def snapshot(self) -> Snapshot:
        """What is in flight is to be sampled again; at the end of the stream that is the same as never submitted."""
        submission, again = self.submission, sorted([*self._in_flight, *self._again])
        while again and again[-1] == submission - 1:
            submission = again.pop()
        return Snapshot(submission, tuple(again), tuple(self._waiting[i] for i in sorted(self._waiting)))

    def _first(self) -> Sequence[int]:
        return sorted(self._waiting)[: self.batch_size]
