"""Log importance ratios. All are logs: clipping compares log s with log(1 ± ε)."""

from __future__ import annotations

from torch import Tensor

from gspo.objectives.layout import TokenLayout, at_tokens, compute_dtype, keep_trained, mean_tokens

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
