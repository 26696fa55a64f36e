"""Means over runs with their 95 % intervals: Student's t for one arm, Welch's for the difference of two."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Student's t, 97.5 %, by degrees of freedom 1 … 30; beyond, the series in 1/df is right to four digits.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def spread(values: Floats, form: Callable[[float], str]) -> str:
    """Mean ± half of the 95 % t-interval.

    >>> spread(np.array([0.5, 0.7]), percent), spread(np.array([0.5]), percent), spread(np.array([]), percent)
    ('60.0% ± 127.1', '50.0%', '—')
    """
    if not len(values):
        return "—"
    half = f" ± {form(float(t_half(values[:, None])[0])).removesuffix('%')}" if len(values) > 1 else ""
    return form(float(values.mean())) + half


def t_half(values: Floats) -> Floats:
    """Half of the 95 % t-interval of the mean over the first axis; 0 for one run, which has none.

    >>> t_half(np.array([[1.0], [2.0], [3.0]])).round(3).tolist()
    [2.484]
    """
    n = len(values)
    return np.zeros(values.shape[1:]) if n < 2 else t_quantile(n - 1) * values.std(0, ddof=1) / math.sqrt(n)


def t_quantile(freedom: float) -> float:
    """97.5 % quantile of Student's t; a fraction of a degree of freedom is not counted."""
    df = max(int(freedom), 1)
    return _T[df - 1] if df <= len(_T) else 1.95996 + 2.3723 / df + 2.8225 / df**2


def welch_half(a: Floats, b: Floats) -> float:
    """Half of Welch's 95 % interval of the difference of two means, of two values or more each.

    >>> round(welch_half(np.array([0.9, 0.8]), np.array([0.5, 0.7])), 4)  # s²/n: 0.0025, 0.01; df 1.47 counts as 1
    1.4206
    """
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True))
    return t_quantile(freedom) * math.sqrt(total)
