"""Rewards from several places behind one interface: by source of the prompt, and from environments.

`RewardRouter` is for mixtures: it sends each group to the pool of its data set. `GivenRewards` is for episodes: it asks
the reward functions only for outcomes that the environment has not given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gspo.errors import RewardError
from gspo.rewards.call import RewardItem
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import RewardSpec
from gspo.types import Outcome, Score


class Rewards(Protocol):
    """The interface that the trainer uses; a `RewardPool`, a `RewardRouter` or `GivenRewards`."""

    def submit(self, key: Hashable, item: RewardItem) -> None: ...
    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]: ...
    def close(self) -> None: ...


class RewardRouter:
    """One pool per distinct spec; `settings` are passed to every pool.

    Sources with the same spec share a pool, and so its workers and models. Parts are named `reward@source`, so that
    each source has its own metrics.
    """

    def __init__(self, specs: Mapping[str, RewardSpec], **settings: Any) -> None:
        self._pools: list[tuple[RewardSpec, RewardPool]] = []
        self._pool_of: dict[str, RewardPool] = {}
        try:
            for source, spec in specs.items():
                # A linear search, because a spec may hold values that are not hashable.
                pool = next((pool for known, pool in self._pools if known == spec), None)
                if pool is None:
                    pool = RewardPool(spec, **settings)
                    self._pools.append((spec, pool))
                self._pool_of[source] = pool
        # Pools that have started already own processes.
        except BaseException:
            self.close()
            raise

    def check_functions(self) -> None:
        """As `RewardPool.check_functions`; all workers have started, so the imports run at the same time."""
        for _, pool in self._pools:
            pool.check_functions()

    def submit(self, key: Hashable, item: RewardItem) -> None:
        if item.source not in self._pool_of:
            raise RewardError(
                f"no reward is configured for prompts of {item.source!r}; the mixture's sources are "
                f"{', '.join(self._pool_of)}. Set reward.functions, which applies to all sources"
            )
        self._pool_of[item.source].submit((item.source, key), item)

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """As `RewardPool.completed`, pool after pool. All pools score at the same time."""
        for _, pool in self._pools:
            for pool_key, outcomes in pool.completed(deadline_s):
                source, key = pool_key  # pyright: ignore[reportGeneralTypeIssues]  # as submitted above
                yield key, tuple(_with_source(outcome, source) for outcome in outcomes)

    def close(self) -> None:
        for _, pool in self._pools:
            pool.close()


class GivenRewards:
    """Keeps the outcomes that an environment has given (`RewardItem.given`); other rewards score the rest."""

    def __init__(self, others: Rewards) -> None:
        self._others = others
        self._complete: list[tuple[Hashable, tuple[Outcome, ...]]] = []
        self._given: dict[Hashable, Sequence[Outcome | None]] = {}

    def submit(self, key: Hashable, item: RewardItem) -> None:
        known = [outcome for outcome in item.given if outcome is not None]
        if item.completions and len(known) == len(item.completions):
            self._complete.append((key, tuple(known)))
            return
        # Some samples have an outcome: score the whole group and replace those results in `completed`.
        if known:
            self._given[key] = item.given
        self._others.submit(key, replace(item, given=()))

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """As `RewardPool.completed`; groups whose outcomes were all given come first."""
        while self._complete:
            yield self._complete.pop(0)
        for key, outcomes in self._others.completed(deadline_s):
            given = self._given.pop(key, (None,) * len(outcomes))
            yield key, tuple(own or other for own, other in zip(given, outcomes, strict=True))

    def close(self) -> None:
        self._others.close()


class NoRewards:
    """Every sample scores 0: distillation needs no reward."""

    def __init__(self) -> None:
        self._complete: list[tuple[Hashable, tuple[Outcome, ...]]] = []

    def submit(self, key: Hashable, item: RewardItem) -> None:
        self._complete.append((key, tuple(Score(0.0) for _ in item.completions)))

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        while self._complete:
            yield self._complete.pop(0)

    def close(self) -> None: ...


def _with_source(outcome: Outcome, source: str) -> Outcome:
    if not isinstance(outcome, Score):
        return outcome
    parts, weights = ({f"{name}@{source}": x for name, x in of.items()} for of in (outcome.parts, outcome.weights))
    return Score(outcome.value, parts, weights)
