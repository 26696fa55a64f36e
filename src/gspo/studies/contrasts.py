"""Means over seeds, differences of two arms paired by seed, and the verdict that an interval allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from gspo.stats import t_half

Verdict = Literal["shown", "opposite", "not shown", "too few seeds", "not run"]


class Interval(NamedTuple):
    """A mean and its 95 % interval; low and high are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Interval | None:
    """The mean with its 95 % t interval; None for no values.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None, 1)
    half = float(t_half(values))
    return Interval(mean, mean - half, mean + half, len(values))


def contrast(ours: Mapping[int, float], theirs: Mapping[int, float] | float, factor: float = 1.0) -> Interval | None:
    """The interval of ours − factor · theirs, paired by seed; a plain number pairs with every seed.

    >>> contrast({1: 3.0, 2: 5.0, 9: 7.0}, {1: 1.0, 2: 2.0}, factor=2.0).mean
    1.0
    """
    if isinstance(theirs, (int, float)):
        return interval([value - factor * theirs for value in ours.values()])
    return interval([ours[seed] - factor * theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def verdict(found: Interval | None, side: Literal["above", "below"], margin: float) -> Verdict:
    """Whether the interval lies wholly on the claimed side of the margin, wholly on the other, or neither.

    >>> verdict(Interval(2.0, 1.0, 3.0, 5), "above", 0.0), verdict(Interval(2.0, -1.0, 5.0, 5), "above", 0.0)
    ('shown', 'not shown')
    """
    if found is None:
        return "not run"
    if found.low is None or found.high is None:
        return "too few seeds"
    above, below = found.low > margin, found.high < margin
    if side == "below":
        above, below = below, above
    return "shown" if above else "opposite" if below else "not shown"
