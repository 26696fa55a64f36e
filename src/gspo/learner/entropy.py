"""The adaptive coefficient of the entropy term: it follows the policy's entropy towards a target."""

from __future__ import annotations

import math

GAIN = 0.1  # of log α per step, for an entropy that is 0 or twice its target
RANGE = 100.0  # α stays within this factor of its start


def next_coefficient(now: float, entropy: float | None, *, target: float, start: float) -> float:
    """The coefficient α of the next step: log α rises by GAIN · (target − H) / target, by at most GAIN either way.

    entropy: token mean of the step in nats; None: nothing was trained, α stays.

    >>> [round(next_coefficient(0.01, h, target=0.5, start=0.01), 5) for h in (0.0, 0.5, 1.0, 9.0)]
    [0.01105, 0.01, 0.00905, 0.00905]
    """
    if entropy is None or not math.isfinite(entropy):
        return now
    step = GAIN * min(max((target - entropy) / target, -1.0), 1.0)
    return min(max(now * math.exp(step), start / RANGE), start * RANGE)
