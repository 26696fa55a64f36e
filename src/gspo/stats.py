"""95 % intervals (Wilson, Student's t, Welch) and pass@k: the statistics of evaluations, comparisons and studies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COLLAPSE = 0.5  # a reward below this fraction of its best has collapsed; chosen before the first study

Z = 1.96  # 97.5 % quantile of the normal distribution, as shares have always been reported

# 97.5 % quantile of Student's t for 1 … 30 degrees of freedom.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n independent trials.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± z √(p(1−p)/n) it has a width at 0 % and 100 %.

    >>> [round(end, 4) for end in wilson(0.5, 100)], [round(end, 4) for end in wilson(1.0, 512)]
    ([0.4038, 0.5962], [0.9926, 1.0])
    """
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    # Rounding must not leave the share outside its own interval.
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def share_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent problems' scores in 0…1, and the ends of its 95 % interval.

    Wilson's interval where every score is 0 or 1, else mean ± z s/√n.

    >>> [round(x, 4) for x in share_interval([1.0] * 512)], [round(x, 3) for x in share_interval([0.25, 0.5, 0.75])]
    ([1.0, 0.9926, 1.0], [0.5, 0.217, 0.783])
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean = sum(values) / n
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson(mean, n)
    half = Z * math.sqrt(sum((v - mean) ** 2 for v in values) / max(n - 1, 1) / n)
    return mean, max(mean - half, 0.0), min(mean + half, 1.0)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent problems' rewards, and the ends of its 95 % interval; rewards need not be in 0…1.

    Wilson's interval where every reward is 0 or 1, else mean ± t s/√n.

    >>> [round(x, 3) for x in mean_interval([-1.0, 0.0, 4.0])], mean_interval([0.0, 1.0]) == share_interval([0.0, 1.0])
    ([1.0, -5.572, 7.572], True)
    """
    if set(values) <= {0.0, 1.0}:
        return share_interval(values)
    mean, half = sum(values) / len(values), float(t_half(values))
    return mean, mean - half, mean + half


def pass_at_k(total: int, right: int, k: int) -> float:
    """Chance that k of `total` samples, `right` of them correct, hold a correct one: 1 − C(n−c, k)/C(n, k).

    Unbiased for the chance of k fresh samples (Chen et al. 2021, arXiv 2107.03374, eq. 1), unlike 1 − (1 − c/n)^k.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def t_quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t; degrees of freedom are rounded down.

    Beyond the table: z + (z³ + z)/4ν + (5z⁵ + 16z³ + 3z)/96ν², the expansion around the normal quantile z.

    >>> t_quantile(4), t_quantile(1.47), round(t_quantile(40), 3)
    (2.7764, 12.7062, 2.021)
    """
    df = max(int(freedom), 1)
    if df <= len(_T):
        return _T[df - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def t_half(values: Floats | Sequence[float]) -> Floats:
    """Half of the 95 % t interval of the mean over the first axis, t s/√n; 0 for a single value, which has none.

    >>> t_half(np.array([[1.0], [2.0], [3.0]])).round(3).tolist()
    [2.484]
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    return np.zeros(values.shape[1:]) if n < 2 else t_quantile(n - 1) * values.std(0, ddof=1) / math.sqrt(n)


def welch_half(a: Floats, b: Floats) -> float:
    """Half of Welch's 95 % interval of the difference of two means: t √(s²ₐ/nₐ + s²ᵦ/nᵦ), two values or more each.

    Degrees of freedom: (s²ₐ/nₐ + s²ᵦ/nᵦ)² / ((s²ₐ/nₐ)²/(nₐ−1) + (s²ᵦ/nᵦ)²/(nᵦ−1)).

    >>> round(welch_half(np.array([0.9, 0.8]), np.array([0.5, 0.7])), 4)  # s²/n: 0.0025, 0.01; df 1.47 counts as 1
    1.4206
    """
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True))
    return t_quantile(freedom) * math.sqrt(total)


def has_collapsed(rewards: Sequence[float]) -> bool:
    """Whether the mean reward of the last quarter of a run is below `COLLAPSE` times that of its best quarter.

    Never true if the best is not above 0: a fraction of a negative reward is not a worse one.

    >>> has_collapsed([0.2, 0.8, 0.8, 0.1]), has_collapsed([0.2, 0.4, 0.8, 0.7]), has_collapsed([-1.0, -4.0])
    (True, False, False)
    """
    width = max(len(rewards) // 4, 1)
    means = [fmean(rewards[i : i + width]) for i in range(len(rewards) - width + 1)]
    return max(means, default=0.0) > 0 and means[-1] < COLLAPSE * max(means)
