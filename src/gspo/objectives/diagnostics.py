"""Statistics of an update: log s, clipped fractions, effective sample size, entropy. Not differentiated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
