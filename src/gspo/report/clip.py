"""Clipping statistics from the samples: how far sequences moved, which were clipped, and a suggested ε.

Ratios of mini-batch 1 are 1 by construction, so in a run with several mini-batches only the later ones count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo.report.samples import Block, finite_number

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TARGET = 0.05  # share of clipped sequences that `eps_clip: auto` and a suggested ε aim at
HIGH_OVER_LOW = 4 / 3  # ε_high/ε_low of a suggested ε if the run has none
EPS_MAX = 0.2
RECENT = 10  # a suggested ε is from the last steps: sequences move differently at the beginning


def clip_story(block: Block, high_over_low: float = HIGH_OVER_LOW) -> dict[str, Any]:
    """One step: quantiles of log s, counts by mini-batch, and the ε_low that would have clipped the target share.

    `minibatch` has [entered the model, clipped with A ≤ 0, clipped with A > 0] for each mini-batch.
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
    # A rise divided by ε_high/ε_low and a fall are on one scale: both are compared with ε_low.
    moved = np.where(advantage > 0, log_s / high_over_low, -log_s)[seen]
    farthest = int(np.where(later, np.abs(log_s), -1.0).argmax()) if later.any() else None
    return {
        "step": block["step"],
        "quantiles": [finite_number(float(q)) for q in np.quantile(log_s[later], QUANTILES)] if later.any() else None,
        "minibatch": counts,
        "eps_low": finite_number(float(np.quantile(moved, 1 - TARGET))) if len(moved) else None,
        "farthest": None
        if farthest is None
        else {name: block[name][farthest] for name in ("sequence", "log_s", "advantage", "length", "clipped")},
    }


def suggest_eps(
    stories: Sequence[Mapping[str, Any]], noise: float | None, high_over_low: float
) -> tuple[float, float] | None:
    """(ε_low, ε_high) that would have clipped the target share of the last steps, not below the error of π_old.

    >>> suggest_eps([{"eps_low": 0.001}, {"eps_low": 0.003}], None, high_over_low=2.0)
    (0.002, 0.004)
    """
    seen = [s["eps_low"] for s in stories if s["eps_low"] is not None][-RECENT:]
    if not seen:
        return None
    # The median, because single steps can be extreme. At least the noise, at most the bound on ε_high.
    low = min(max(statistics.median(seen), noise or 0.0, 1e-6), EPS_MAX / max(1.0, high_over_low))
    return float(f"{low:.2g}"), float(f"{low * high_over_low:.2g}")
