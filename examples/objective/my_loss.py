"""GSPO as an objective of your own: `gspo train quickstart algorithm=my_loss.py:objective`."""

from gspo.objectives import clip, clip_bounds, sequence_log_ratio, token_log_ratio


def objective(logp, proximal_logp, advantage, layout, eps_clip, eps_clip_higher):
    """One ratio per completion, the geometric mean of its token ratios, clipped on the side of its advantage."""
    # log s = (1/|y|) Σ_t log π_θ(y_t)/π_old(y_t), [B]
    log_s = sequence_log_ratio(token_log_ratio(logp, proximal_logp, layout), layout)
    # s itself, and whether it was outside [1 − ε_low, 1 + ε_high]; a clipped s has no gradient. [B] each
    s, clipped = clip(log_s, *clip_bounds(advantage, eps_clip, eps_clip_higher))
    return -s * advantage, clipped
