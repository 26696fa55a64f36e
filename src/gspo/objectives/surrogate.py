"""The factors of the loss: the ratio, its gate (the clip), KL estimators, the critic's loss, and their metrics.

Every gate factors as  objective = A · g(log ratio, sign of A).  The functions here return g, so that
one advantage per sequence multiplies once per sequence, not once per token. `positive` is A > 0. Only the log-ratio
(and log π for CISPO) has a gradient.

The first functions are the formulas, from tensors to tensors. Those below them are the entries of `algorithms.GATES`:
from a `Ratio` and the gate's settings to g and what was clipped, each per token or per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.objectives.aggregate import TokenLayout, Values, at_tokens, compute_dtype, keep_trained, mean_tokens

# e^20 is far outside every clip range, and far inside the range of float32.
LOG_RATIO_BOUND = 20.0


def token_log_ratio(logp: Tensor, proximal_logp: Tensor, layout: TokenLayout) -> Tensor:
    """d_it = log π_θ(y_it) − log π_old(y_it), 0 at masked tokens.

    Differentiable in `logp` only. The inputs are upcast first: the difference of two bfloat16 values is rounding noise.
    """
    dtype = compute_dtype(logp.dtype)
    return keep_trained(logp.to(dtype) - proximal_logp.detach().to(dtype), layout)


def sequence_log_ratio(token_log_ratio: Tensor, layout: TokenLayout) -> Tensor:
    """log s_i = (1/|y_i|) Σ_t d_it   (arXiv 2507.18071, eq. 7): the log of the geometric mean. Returns [B]."""
    return mean_tokens(token_log_ratio, layout)


def sequence_token_log_ratio(logp: Tensor, log_s: Tensor, layout: TokenLayout) -> Tensor:
    """log s_it = (log π_θ(y_it) − sg[log π_θ(y_it)]) + sg[log s_i]   (eq. 14): value of s_i, gradient of the token.

    The difference is computed first: it is exactly 0, so the value is s_i. In the other order log s would be added to
    a number of the size of log π, and rounded away.
    """
    logp = keep_trained(logp.to(log_s.dtype), layout)
    # log s is detached: its own gradient would add that of the whole sequence to each token.
    return (logp - logp.detach()) + at_tokens(log_s.detach(), layout)


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio within ± LOG_RATIO_BOUND, so that exp cannot overflow; ±inf becomes NaN and not a plausible number."""
    # The clamp alone would map ±inf to a bound; 0 · inf = NaN keeps the error visible. Detached: no extra gradient.
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) + 0.0 * log_ratio.detach()


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


ESTIMATORS = ("k1", "k2", "k3")


def kl(logp: Tensor, reference_logp: Tensor, estimator: str) -> Tensor:
    """With d = log π_θ − log π_ref:  k1 = d,   k2 = d²/2,   k3 = e^(−d) − 1 + d.

    k1 and k3 are unbiased in value, k3 is never negative; only k2 has the KL's own gradient in expectation.
    """
    d = logp - reference_logp.detach()  # token-shaped
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # expm1 keeps the second-order value where d is tiny and exp(−d) − 1 + d would cancel.
        return bounded(-d).expm1() + d
    raise ValueError(f"kl_estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")


def value_loss(values: Tensor, start_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """ℓ = ½ max( (V − R)², (V_old + clip(V − V_old, ±ε) − R)² ), per token   (PPO's clipped value loss).

    V is the only differentiated input; V_old (`start_values`) is the critic at the start of the batch, R = A + V_old
    the return of GAE. With the larger of the two, a value that has moved more than ε towards its return no longer
    has a gradient, and one that moved away keeps it. Returns ℓ and a mask of values without a
    gradient, both in the shape of `values`.
    """
    start_values, returns = start_values.detach().to(values.dtype), returns.detach().to(values.dtype)
    # V, moved by at most ε from V_old; the clamp has gradient 0 where it is active.
    near = start_values + (values - start_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    # clipped > plain only where the clamp is active (else both are equal), so these values have no gradient.
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()


QUANTILES = {"p05": 0.05, "p50": 0.50, "p95": 0.95}


def log_s_summary(log_s: Tensor) -> dict[str, Tensor]:
    """Mean, std, quantiles and largest |log s| over sequences [B]; NaN if there are none."""
    if log_s.numel() == 0:
        return {name: log_s.new_tensor(torch.nan) for name in ("mean", "std", *QUANTILES, "max_abs")}
    log_s = log_s.detach()
    quantiles = torch.quantile(log_s, torch.tensor(list(QUANTILES.values()), dtype=log_s.dtype, device=log_s.device))
    return {
        "mean": log_s.mean(),
        # Biased, so that a single sequence gives 0 and not NaN.
        "std": log_s.std(correction=0),
        **dict(zip(QUANTILES, quantiles.unbind(), strict=True)),
        "max_abs": log_s.abs().max(),
    }


def clip_fractions(stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clipped fractions of sequences (any token clipped) and of tokens, by side.

    `stats` are the [B] tensors of `Objective.stats`, possibly concatenated over micro-batches: sums of counts are
    divided once, so a split does not change a fraction. Sequences without trained tokens do not count.
    """
    trained = stats["num_tokens"] > 0  # [B]
    # clamp: 0 clipped of 0 is the fraction 0.
    num_sequences = trained.sum().clamp(min=1)
    num_tokens = stats["num_tokens"].sum().clamp(min=1)
    low, high = stats["clipped_low"], stats["clipped_high"]
    return {
        "sequences_low": ((low > 0) & trained).sum() / num_sequences,
        "sequences_high": ((high > 0) & trained).sum() / num_sequences,
        "sequences": (((low > 0) | (high > 0)) & trained).sum() / num_sequences,
        "tokens_low": low.sum() / num_tokens,
        "tokens_high": high.sum() / num_tokens,
        "tokens": (low.sum() + high.sum()) / num_tokens,
    }


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """(Σ w)² / (n Σ w²) of importance weights given by their logs: 1 if all are equal, 1/n if all but one are 0."""
    if log_weight.numel() == 0:
        return log_weight.new_tensor(torch.nan)
    # Divided by the largest weight, so that exp cannot overflow; the ratio does not change.
    w = (log_weight.detach() - log_weight.detach().max()).exp()
    return w.sum().square() / (w.square().sum() * w.numel())


def entropy(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of softmax(logits), over the last dimension, in float32 at least."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    # 0 · log 0 = 0 for a token with logit −inf.
    return -(logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1)
