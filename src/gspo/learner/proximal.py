"""Whether the sampler's log-probs can serve as π_old: its noise at equal weights against the clip range ε.

One rule for the run (`actor.prox_logp_method: rollout`, at the first step that measures) and for `gspo doctor --probe`:
p95 |log s| below ε/3 is silent, up to ε a warning, above it a refusal. docs/mismatch.md has the measurements behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Verdict = Literal["fine", "near", "above"]

FINE = 3.0  # the noise is this many times smaller than ε where nothing needs to be said


@dataclass(frozen=True)
class Noise:
    """log s = mean over tokens of log π − log μ, trainer against sampler at equal weights, over sequences."""

    count: int
    mean: float
    std: float
    p95: float  # of |log s|
    shift: float  # mean over all tokens of log μ − log π: what re-centring takes off
    centred_p95: float  # of |log s + shift|

    def floor(self, centred: bool) -> float:
        """What ε is held against."""
        return self.centred_p95 if centred else self.p95


def noise_of(log_s: Floats, lengths: NDArray[np.int64]) -> Noise | None:
    """The noise of some sequences, [n], with so many trained tokens each; NaN: not measured. None: nothing was.

    >>> noise_of(np.array([0.1, 0.3, np.nan]), np.array([1, 3, 5])).shift
    -0.25
    """
    seen = np.isfinite(log_s) & (lengths > 0)
    if not seen.any():
        return None
    log_s, lengths = log_s[seen], lengths[seen]
    shift = -float((log_s * lengths).sum() / lengths.sum())
    return Noise(
        count=len(log_s),
        mean=float(log_s.mean()),
        std=float(log_s.std()),
        p95=_p95(log_s),
        shift=shift,
        centred_p95=_p95(log_s + shift),
    )


def _p95(values: Floats) -> float:
    return float(np.quantile(np.abs(values), 0.95))


def judge(noise: float, eps: float | None) -> Verdict:
    """The rule. `eps` None: this objective has no clip range for noise to use up.

    >>> [judge(noise, 3e-3) for noise in (0.9e-3, 1e-3, 3e-3, 3.1e-3)]
    ['fine', 'near', 'near', 'above']
    """
    if eps is None or noise < eps / FINE:
        return "fine"
    return "near" if noise <= eps else "above"


def words(noise: Noise, eps: float, *, centred: bool = False) -> str:
    """What is measured and what to do about it, for a warning or a refusal."""
    floor = noise.floor(centred)
    what = f"p95 |log s| = {floor:.1e}{' after re-centring' if centred else ''}, mean {noise.mean:+.1e}"
    effect = (
        "before any update sequences lie outside it, by the sampler's rounding alone"
        if judge(floor, eps) == "above"
        else "the sampler's rounding has a say in who is clipped"
    )
    remedies = [f"actor.eps_clip above {FINE * floor:.1e}", "actor.eps_clip=auto"]
    if not centred and judge(noise.centred_p95, eps) != judge(noise.p95, eps):
        remedies.append(f"actor.prox_logp_recenter=true, which leaves {noise.centred_p95:.1e},")
    return (
        f"the sampler's log-probs are π_old, and differ from the trainer's at equal weights by {what}, "
        f"{floor / eps:.2g} times the clip range ε = {eps:.1e} ({noise.count} sequences): {effect}. "
        f"Set {', '.join(remedies)} or actor.prox_logp_method=recompute"
    )
