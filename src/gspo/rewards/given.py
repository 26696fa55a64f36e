"""Rewards that an environment has given already: only what is missing is asked of the reward functions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from gspo.rewards.route import Rewards
from gspo.rewards.spec import RewardItem
from gspo.types import Outcome


class GivenRewards:
    """`Rewards` whose items may know some outcomes (`RewardItem.given`); those stand, whatever a function would say."""

    def __init__(self, others: Rewards) -> None:
        self._others = others
        self._ready: list[tuple[Hashable, tuple[Outcome, ...]]] = []
        self._given: dict[Hashable, Sequence[Outcome | None]] = {}

    def submit(self, key: Hashable, item: RewardItem) -> None:
        known = [outcome for outcome in item.given if outcome is not None]
        if item.completions and len(known) == len(item.completions):
            self._ready.append((key, tuple(known)))
            return
        if known:
            self._given[key] = item.given
        self._others.submit(key, replace(item, given=()))

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """As `RewardPool.completed`; what was given comes first."""
        while self._ready:
            yield self._ready.pop(0)
        for key, outcomes in self._others.completed(deadline_s):
            given = self._given.pop(key, (None,) * len(outcomes))
            yield key, tuple(own or other for own, other in zip(given, outcomes, strict=True))

    def close(self) -> None:
        self._others.close()
