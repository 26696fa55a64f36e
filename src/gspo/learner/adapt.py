"""What a step's measurements decide for the next: the clip range of `eps_clip: auto`, and where π_old comes from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo.learner.step import ProximalSource

# The sampler's log-probs serve as π_old while their noise is this many times smaller than the clip range.
NOISE_MARGIN = 10.0


@dataclass(frozen=True)
class AutoClip:
    """Settings of `eps_clip: auto`; its state is one number (see `follow`)."""

    target_fraction: float = 0.15
    high_over_low: float = 4 / 3
    decay: float = 0.8
    eps_max: float = 0.2


def follow(
    state: float | None, log_s: NDArray[np.float64], advantages: NDArray[np.float64], how: AutoClip
) -> float | None:
    """The next ε_low before bounds: an exponential average of past steps' quantiles.

    A sequence is clipped where log s moves the way its advantage points, beyond ε_high for A > 0 and beyond ε_low for
    A < 0. With ε_high = ρ ε_low, a rise divided by ρ and a fall are on one scale, and their (1 − target) quantile is
    the ε_low that would have clipped the target share. Give the sequences of mini-batches ≥ 2 only.
    """
    seen = np.isfinite(log_s) & (advantages != 0)
    if not seen.any():
        return state
    moved = np.where(advantages > 0, log_s / how.high_over_low, -log_s)[seen]
    quantile = float(np.quantile(moved, 1 - how.target_fraction))
    return quantile if state is None else how.decay * state + (1 - how.decay) * quantile


def bounds(
    state: float | None, noise: float | None, default: tuple[float, float], how: AutoClip
) -> tuple[float, float]:
    """(ε_low, ε_high) at their fixed ratio, neither above eps_max, nor below the noise of π_old.

    `noise` is None where π_old is the trainer's own; `default` is the preset's range, for before anything was seen.
    """
    if state is None:
        return default
    low = min(max(state, noise or 0.0, 1e-6), how.eps_max / max(1.0, how.high_over_low))
    return low, low * how.high_over_low


def proximal_source(noise: float | None, eps: float | None, current: ProximalSource) -> ProximalSource:
    """For `prox_logp_method: auto`: the sampler's values while their measured noise is far below the clip range."""
    if noise is None:
        return current
    return "sampler" if noise * NOISE_MARGIN < (0.2 if eps is None else eps) else "recompute"
