"""Gates: how an importance ratio enters the objective.

Every gate factors as  objective = A · g(log ratio, sign of A).  The functions here return g, so that
one advantage per sequence multiplies once per sequence, not once per token. `positive` is A > 0. Only the log-ratio
(and log π for CISPO) has a gradient.

The first functions are the formulas, from tensors to tensors. Those below them are the entries of `algorithms.GATES`:
from a `Ratio` and the gate's settings to g and what was clipped, each per token or per sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.objectives.layout import TokenLayout, Values, at_tokens, keep_trained
from gspo.objectives.ratio import LOG_RATIO_BOUND, bounded, sequence_log_ratio


def clip_bounds(
    advantage: Tensor,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Log bounds of the ratio.  A > 0: (−∞, log(1 + ε_high)];  A < 0: [log(1 − ε_low), log c].

    min( s A , clip(s, 1 − ε_low, 1 + ε_high) A )   (arXiv 2507.18071, eq. 5; 1707.06347, eq. 7) bounds s from above for
    A > 0 and from below for A < 0, and not on the other side. c is the dual clip for A < 0   (arXiv 1912.09729, eq. 5).
    Infinity is LOG_RATIO_BOUND: exp stays finite. None switches a bound off.
    """
    high = LOG_RATIO_BOUND if clip_high is None else math.log1p(clip_high)
    # ε_low = 1 allows every ratio above 0; log(1 − 1) would be −∞.
    low = -LOG_RATIO_BOUND if clip_low is None or clip_low >= 1 else math.log1p(-clip_low)
    dual = LOG_RATIO_BOUND if dual_clip is None else math.log(dual_clip)
    # A = 0 is never clipped: a group of equal rewards must not count in the clip fraction.
    below = by_sign(advantage < 0, low, -LOG_RATIO_BOUND, dtype)
    above = torch.where(advantage < 0, dual, by_sign(advantage > 0, high, LOG_RATIO_BOUND, dtype))
    return below, above


def by_sign(positive: Tensor, a: float, b: float, dtype: torch.dtype) -> Tensor:
    """a where A > 0, b elsewhere, in `dtype` (torch.where of two Python numbers would round them to float32)."""
    full = (torch.full((), x, dtype=dtype, device=positive.device) for x in (a, b))
    return torch.where(positive, *full)


def clip(log_ratio: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """g = exp( clamp(log s, low, high) ) with the bounds of `clip_bounds`, and a mask of clamped ones (gradient 0)."""
    # log is monotonic, so this clamp clips the ratio itself. Its gradient outside the bounds is 0.
    clamped = torch.clamp(log_ratio, low, high)
    return clamped.exp(), clamped.detach() != log_ratio.detach()


def cispo(log_ratio: Tensor, logp: Tensor, weight_max: float) -> Tensor:
    """g = sg[ min(w, w_max) ] · log π_θ   (arXiv 2506.13585, eq. 4): bounded weight, every token keeps its gradient."""
    return log_ratio.detach().clamp(-LOG_RATIO_BOUND, math.log(weight_max)).exp() * logp


def sapo(log_ratio: Tensor, tau: Tensor) -> Tensor:
    """g = (4/τ) · σ( τ (w − 1) ), τ = τ_pos for A > 0 and τ_neg otherwise   (arXiv 2511.20347).

    At w = 1 the slope in w is exactly 1 for every τ. Nothing is clipped.
    """
    return 4 / tau * torch.sigmoid(tau * (bounded(log_ratio).exp() - 1))


@dataclass(frozen=True)
class Ratio:
    """What a gate sees: the log-ratio of the chosen level, and what it is made of."""

    log: Tensor  # [B], or token-shaped
    per_token: bool
    advantage: Values
    logp: Tensor  # token-shaped
    token_log_ratio: Tensor  # token-shaped, 0 at masked tokens
    layout: TokenLayout

    def match(self, x: Tensor) -> Tensor:
        """A value that was computed from the advantage, in the shape of the log-ratio."""
        return Values(x, self.advantage.per_token).at_tokens(self.layout) if self.per_token else x

    def gated(self, value: Tensor, clipped: Tensor | None = None) -> tuple[Values, Values]:
        clipped = torch.zeros_like(value, dtype=torch.bool) if clipped is None else clipped
        return Values(value, self.per_token), Values(clipped, self.per_token)


def clip_gate(
    ratio: Ratio, clip_low: float | None, clip_high: float | None, dual_clip: float | None
) -> tuple[Values, Values]:
    # Bounds are computed in the shape of A, then brought to the shape of the ratio.
    low, high = clip_bounds(ratio.advantage.x, clip_low, clip_high, dual_clip, ratio.log.dtype)
    return ratio.gated(*clip(ratio.log, ratio.match(low), ratio.match(high)))


def cispo_gate(ratio: Ratio, weight_max: float) -> tuple[Values, Values]:
    value = cispo(ratio.log, keep_trained(ratio.logp, ratio.layout), weight_max)
    return ratio.gated(value, ratio.log.detach() > math.log(weight_max))


def sapo_gate(ratio: Ratio, tau_pos: float, tau_neg: float) -> tuple[Values, Values]:
    tau = by_sign(ratio.advantage.x > 0, tau_pos, tau_neg, ratio.log.dtype)
    return ratio.gated(sapo(ratio.log, ratio.match(tau)))


def gmpo_gate(ratio: Ratio, log_clip_low: float, log_clip_high: float) -> tuple[Values, Values]:
    """GMPO clamps each token's log-ratio, then takes their mean   (arXiv 2507.20673, eq. 3, in logs)."""
    d, advantage = ratio.token_log_ratio, ratio.advantage.x  # token-shaped, [B]
    low = by_sign(advantage < 0, -log_clip_low, -LOG_RATIO_BOUND, d.dtype)  # [B]
    high = by_sign(advantage > 0, log_clip_high, LOG_RATIO_BOUND, d.dtype)  # [B]
    clamped = torch.clamp(d, at_tokens(low, ratio.layout), at_tokens(high, ratio.layout))  # token-shaped
    value = sequence_log_ratio(clamped, ratio.layout).exp()  # [B]
    return Values(value, per_token=False), Values(clamped.detach() != d.detach(), per_token=True)


def plain(ratio: Ratio) -> tuple[Values, Values]:
    """The ratio itself."""
    return ratio.gated(bounded(ratio.log).exp())


def log_likelihood(ratio: Ratio) -> tuple[Values, Values]:
    """g = log π_θ, without a ratio: the loss of supervised fine-tuning is the negative log-likelihood."""
    return ratio.gated(keep_trained(ratio.logp, ratio.layout))
