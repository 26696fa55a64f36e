"""Gates: how an importance ratio enters the objective.

Every gate factors as  objective = A · g(log ratio, sign of A).  The functions here return g, so that
one advantage per sequence multiplies once per sequence, not once per token. `positive` is A > 0. Only the log-ratio
(and log π for CISPO) has a gradient. The gate `log` of supervised fine-tuning has no ratio: g = log π_θ, so that the
loss is the negative log-likelihood.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo.objectives.ratio import LOG_RATIO_BOUND, bounded


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
