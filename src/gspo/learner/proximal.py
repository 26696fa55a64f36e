"""π_old, the proximal policy: where its log-probs come from, the sampler's noise in them, and the automatic ε.

π_old is the policy at the start of the batch. Mini-batch 1 is computed with exactly these weights, so its π_old is its
own detached forward pass. For mini-batches 2…K there are four sources (`ProximalSource`):

    recompute   one more forward pass, before the first update: exact
    sampler     log μ from the sampler, if its noise at equal weights was measured to be far below ε
    rollout     log μ for every mini-batch, the first one included (AReaL's `prox_logp_method: rollout`)
    loglinear   interpolated between log μ and log π_θ, by the weight version of each token (async rollout)

The source is decided at the start of a run, from the config (`first_proximal_source` in `train/build/learner.py`).
With `actor.prox_logp_method: auto`, `choose_proximal_source` decides again between the first two after every step
(called in `train/update.py`). docs/mismatch.md has measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Packed, by_sequence
from gspo.learner.routing import Routing
from gspo.types import Sample

Floats = NDArray[np.float64]
LogProbs = Mapping[int, NDArray[np.float32]]  # by sequence number, at its trained tokens
ProximalSource = Literal["recompute", "sampler", "rollout", "loglinear"]
Verdict = Literal["fine", "near", "above"]

# `auto` uses the sampler's log-probs as π_old while their noise is this many times smaller than ε.
NOISE_MARGIN = 10.0
# A noise this many times smaller than ε needs no warning.
FINE = 3.0
EPS_MIN = 1e-6  # of an automatic ε


def choose_proximal_source(noise: float | None, eps: float | None, current: ProximalSource) -> ProximalSource:
    """For `prox_logp_method: auto`: `sampler` if the measured noise is far below the clip range ε, else `recompute`."""
    if noise is None:
        return current
    # An objective without a clip range is compared with PPO's usual ε, 0.2.
    return "sampler" if noise * NOISE_MARGIN < (0.2 if eps is None else eps) else "recompute"


@torch.no_grad()
def recomputed(policy: PolicyModule, packs: Sequence[Packed], temperature: float, routing: Routing) -> LogProbs:
    """log π_old by one forward pass with the weights at the start of the batch, before any update."""
    stored: dict[int, NDArray[np.float32]] = {}
    for packed in packs:
        with routing.at_start(packed):
            logp = policy(packed, temperature=temperature, with_entropy=False).logp  # [M]
        stored |= by_sequence(packed, logp)
    return stored


def loglinear_weight(samples: Sequence[Sample], version: int, progress: float) -> torch.Tensor:
    """[N] α of log π_old ≈ log μ + α (log π_θ − log μ), at the trained tokens of some sequences, end to end.

    π_old has version v, a token's μ has version b, and π_θ after k of K updates counts as version v + k/K
    (`progress` is k/K):  α = (v − b) / (v + k/K − b). A token of the current version has α = 0: its μ is π_old.
    """
    # progress > 0: mini-batch 1 uses its own forward pass, so age 0 does not give 0/0.
    age = np.concatenate([version - sample.versions[sample.mask].astype(np.float64) for sample in samples])
    return torch.from_numpy(age / (age + progress))


@dataclass(frozen=True)
class Noise:
    """log s = token mean of log π − log μ, trainer against sampler at equal weights; statistics over sequences."""

    count: int
    mean: float
    std: float
    p95: float  # of |log s|; it is compared with ε


def noise_of(log_s: Floats, lengths: NDArray[np.int64]) -> Noise | None:
    """The noise of sequences [n] with `lengths` trained tokens each; NaN: not measured. None: no sequence measured.

    >>> noise_of(np.array([0.25, 0.75, np.nan]), np.array([1, 3, 5])).mean
    0.5
    """
    seen = np.isfinite(log_s) & (lengths > 0)
    if not seen.any():
        return None
    log_s = log_s[seen]
    p95 = float(np.quantile(np.abs(log_s), 0.95))
    return Noise(len(log_s), mean=float(log_s.mean()), std=float(log_s.std()), p95=p95)


def judge_noise(noise: float, eps: float | None) -> Verdict:
    """Whether p95 |log s| fits in the clip range. `eps` None: the objective has no clip range.

    One rule for the run (`prox_logp_method: rollout`, at the first step that measures) and for `gspo doctor --probe`:
    no message below ε/3, a warning up to ε, an error above ε.

    >>> [judge_noise(noise, 3e-3) for noise in (0.9e-3, 1e-3, 3e-3, 3.1e-3)]
    ['fine', 'near', 'near', 'above']
    """
    if eps is None or noise < eps / FINE:
        return "fine"
    return "near" if noise <= eps else "above"


def noise_message(noise: Noise, eps: float) -> str:
    """The measured noise and the remedies, for the warning or the error."""
    effect = (
        "sequences are outside the clip range before any update, because of the sampler's rounding alone"
        if judge_noise(noise.p95, eps) == "above"
        else "the sampler's rounding changes which sequences are clipped"
    )
    return (
        "the sampler's log-probs are used as π_old, and differ from the trainer's at equal weights by p95 |log s| = "
        f"{noise.p95:.1e}, mean {noise.mean:+.1e}, {noise.p95 / eps:.2g} times the clip range ε = {eps:.1e} "
        f"({noise.count} sequences): {effect}. Set actor.eps_clip above {FINE * noise.p95:.1e}, actor.eps_clip=auto or "
        "actor.prox_logp_method=recompute"
    )


@dataclass(frozen=True)
class AutoClip:
    """Settings of `eps_clip: auto`. Its state is one number, updated by `next_eps`."""

    target_fraction: float = 0.05
    high_over_low: float = 4 / 3
    gain: float = 2.0  # log ε_low moves by gain · (clipped fraction − target fraction) per step
    eps_max: float = 0.2


def next_eps(state: float | None, log_s: Floats, advantages: Floats, how: AutoClip) -> float | None:
    """The next ε_low before its bounds, from the moves of one step's sequences; None: no sequence has moved yet.

        first step:  ε = the (1 − target) quantile of the moves' sizes
        later:       ε ← ε · exp( gain · (fraction of moves above ε − target) )

    A sequence is clipped if log s moves too far in the direction of its advantage: above ε_high for A > 0, below −ε_low
    for A < 0. With ε_high = ρ ε_low, a rise divided by ρ and a fall have the same scale. The first step is not clipped,
    so the quantile describes free moves. Later moves are limited by ε itself: a clipped sequence stops near ε, and so
    does a quantile of such moves, however small ε is. Only the clipped fraction shows that ε is too small.
    Pass the sequences of mini-batches ≥ 2 only: in the first one every ratio is 1.
    """
    seen = np.isfinite(log_s) & (advantages != 0)
    if not seen.any():
        return state
    # Signed: a move against the advantage is never clipped, so it counts as a negative distance.
    moved = np.where(advantages > 0, log_s / how.high_over_low, -log_s)[seen]
    if state is None:
        # Sizes, because the first step may have few sequences, and all of them may move against their advantage. An ε
        # that is a little too large costs nothing.
        first = float(np.quantile(np.abs(moved), 1 - how.target_fraction))
        return first if first > EPS_MIN else None
    return max(state * float(np.exp(how.gain * (float((moved > state).mean()) - how.target_fraction))), EPS_MIN)


def clip_range(state: float | None, noise: float | None, how: AutoClip) -> tuple[float, float]:
    """(ε_low, ε_high) at their fixed ratio, at most eps_max and at least the noise of π_old.

    `state` is None before the first measurement: the range is then the widest one, in which GSPO clips nothing.
    `noise` is None if π_old comes from the trainer.
    """
    # The upper limit keeps the larger of ε_low, ε_high ≤ eps_max.
    widest = how.eps_max / max(1.0, how.high_over_low)
    low = widest if state is None else min(max(state, noise or 0.0, EPS_MIN), widest)
    return low, low * how.high_over_low
