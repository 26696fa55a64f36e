"""Rewards by source: each group goes to the pool of the data set it came from, and its parts carry that name.

For mixtures. Sources with the same rewards share a pool, so they share its workers and its models. Parts are named
`reward@source`, which gives every source its own line in the metrics.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol

from gspo.errors import RewardError
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import RewardItem, RewardSpec
from gspo.types import Outcome, Score


class Rewards(Protocol):
    """What the trainer asks of rewards; a `RewardPool` or a `RewardRouter`."""

    def submit(self, key: Hashable, item: RewardItem) -> None: ...
    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]: ...
    def close(self) -> None: ...


class RewardRouter:
    """Pools by source name; `settings` are those of every pool."""

    def __init__(self, specs: Mapping[str, RewardSpec], **settings: Any) -> None:
        self._pools: list[tuple[RewardSpec, RewardPool]] = []
        self._pool_of: dict[str, RewardPool] = {}
        self._sources: dict[Hashable, str] = {}
        try:
            for source, spec in specs.items():
                pool = next((pool for known, pool in self._pools if known == spec), None)
                if pool is None:
                    pool = RewardPool(spec, **settings)
                    self._pools.append((spec, pool))
                self._pool_of[source] = pool
        except BaseException:
            self.close()
            raise

    def submit(self, key: Hashable, item: RewardItem) -> None:
        if item.source not in self._pool_of:
            raise RewardError(
                f"a prompt of {item.source!r} has no reward; the mixture's sources are {', '.join(self._pool_of)}. "
                "Set reward.functions for all"
            )
        self._sources[key] = item.source
        self._pool_of[item.source].submit(key, item)

    def completed(self, deadline_s: float | None = None) -> Iterator[tuple[Hashable, tuple[Outcome, ...]]]:
        """As `RewardPool.completed`; all pools score meanwhile, whichever is asked first."""
        for _, pool in self._pools:
            for key, outcomes in pool.completed(deadline_s):
                yield key, tuple(_named(outcome, self._sources[key]) for outcome in outcomes)
                del self._sources[key]

    def close(self) -> None:
        for _, pool in self._pools:
            pool.close()
        self._sources.clear()


def _named(outcome: Outcome, source: str) -> Outcome:
    if not isinstance(outcome, Score):
        return outcome
    return Score(outcome.value, {f"{part}@{source}": value for part, value in outcome.parts.items()})
