"""Clipping statistics from the samples: how far sequences moved, which were clipped, and whether another ε is advised.

Ratios of mini-batch 1 are 1 by construction, so in a run with several mini-batches only the later ones count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo.report.samples import Block, finite_number

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TARGET = 0.05  # share of clipped sequences that `eps_clip: auto` and a suggested ε aim at
ACCEPTED = (0.03, 0.15)  # with a share between these no other ε is suggested
ENOUGH = 200  # with fewer sequences no ε is judged
HIGH_OVER_LOW = 4 / 3  # ε_high/ε_low if the run has none
EPS_MAX = 0.2


def clip_story(block: Block, high_over_low: float = HIGH_OVER_LOW) -> dict[str, Any]:
    """One step: quantiles of log s, counts by mini-batch, and how far each sequence moved.

    `minibatch` has [entered the model, clipped with A ≤ 0, clipped with A > 0] for each mini-batch.
    A sequence is clipped by every ε_low below its entry of `moved`; those with A = 0 cannot be clipped and have none.
    """
    # All arrays: [n], one entry per sequence; NaN where a value is missing.
    log_s = np.array([np.nan if v is None else v for v in block["log_s"]], dtype=np.float64)
    advantage = np.array([np.nan if v is None else v for v in block["advantage"]], dtype=np.float64)
    part = np.array([0 if v is None or not 0 <= v < 4096 else v for v in block["minibatch"]], dtype=np.int64)
    clipped = np.array([v is True for v in block["clipped"]], dtype=bool)
    entered = np.isfinite(log_s)
    high = clipped & (advantage > 0)
    kinds = (entered, clipped & ~high, high)
    counts = [[int((kind & (part == k)).sum()) for kind in kinds] for k in range(int(part.max(initial=-1)) + 1)]
    # Mini-batch 1 is left out: its ratios are 1 before the first update.
    later = entered & ((part > 0) if len(counts) > 1 else True)
    seen = later & (advantage != 0) & np.isfinite(advantage)
    # s − 1 of a rise, divided by ε_high/ε_low, and 1 − s of a fall are on one scale: both are compared with ε_low.
    change = np.expm1(log_s[seen])
    moved = np.where(advantage[seen] > 0, change / high_over_low, -change)
    farthest = int(np.where(later, np.abs(log_s), -1.0).argmax()) if later.any() else None
    return {
        "step": block["step"],
        "quantiles": [finite_number(float(q)) for q in np.quantile(log_s[later], QUANTILES)] if later.any() else None,
        "minibatch": counts,
        "moved": moved.tolist(),
        "farthest": None
        if farthest is None
        else {name: block[name][farthest] for name in ("sequence", "log_s", "advantage", "length", "clipped")},
    }


def suggest_eps(
    stories: Sequence[Mapping[str, Any]], eps: tuple[float, float], share: float, noise: float | None
) -> tuple[float, float, int, int] | None:
    """(ε_low, ε_high, sequences that it would have clipped, of how many); None where no advice is certain.

    eps: the run's; share: the clipped share of its sequences; noise: the error of π_old, the least ε.

    >>> suggest_eps([{"moved": [1e-4 * i for i in range(200)]}], (0.002, 0.004), share=0.9, noise=None)
    (0.019, 0.038, 9, 200)
    """
    moved = np.array([distance for story in stories for distance in story["moved"]])
    if len(moved) < ENOUGH or ACCEPTED[0] <= share <= ACCEPTED[1] or min(eps) <= 0:
        return None
    ratio = eps[1] / eps[0]
    low = min(max(float(np.quantile(moved, 1 - TARGET)), noise or 0.0), EPS_MAX / max(1.0, ratio))
    low, high = float(f"{low:.2g}"), float(f"{low * ratio:.2g}")
    # To clip fewer sequences ε must grow. Bounds, rounding, or samples that were not kept can lead to the contrary.
    is_wider, is_narrower = low > eps[0] and high > eps[1], 0 < low < eps[0] and high < eps[1]
    if not (is_wider if share > TARGET else is_narrower):
        return None
    return low, high, int((moved > low).sum()), len(moved)
