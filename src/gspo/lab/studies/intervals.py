"""t intervals of a few seeds, alone and paired by seed, and what they decide. Standard library alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

Verdict = Literal["shown", "opposite", "not shown", "too few seeds", "not run"]

# Student's t, 97.5 % quantile, for 1 … 30 degrees of freedom.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Interval(NamedTuple):
    """A mean and its 95 % interval; low and high are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int


def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by the expansion around the normal quantile.

    >>> quantile(4), round(quantile(40), 3)
    (2.7764, 2.021)
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float]) -> Interval | None:
    """mean ± t · s/√n; None of nothing.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None, 1)
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
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
