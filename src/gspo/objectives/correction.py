"""Behavior correction: the importance weight π_old/μ of sampled tokens, separate from the policy ratio π_θ/π_old.

The canonical form is {level, action, metric, agg, upper, lower, only_negative}; TIS, MIS, IcePop, sequence mask and
geometric rejection are entries of `algorithms.CORRECTIONS`. The meaning is AReaL's:

- level sequence, metric ratio: exp(Σ log-ratios) goes to 0 or infinity with length, so the weight of a sequence is the
  geometric mean. Only `agg: product` (`seq_tis`) weights by the product: the importance weight of the whole sequence,
  which needs an upper bound. It is not AReaL's.
- level sequence, a kl metric: it decides for whole sequences, and each token keeps its own weight.
- level token, action mask, with one ratio per sequence: masked tokens are not in the ratio s_i, nor in the mean of
  advantages. They count in every denominator, as they do with token ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.algorithms import CORRECTIONS
from gspo.objectives.aggregate import TokenLayout, at_tokens, keep_trained, mean_tokens, sum_tokens, token_layout
from gspo.objectives.surrogate import bounded, kl

DEFAULTS: Mapping[str, Any] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
    "only_negative": False,
}
CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
    "agg": ("mean", "sum", "max", "product"),
}


class Weights(NamedTuple):
    weight: Tensor  # factor of each token, or of each sequence, [B], at level sequence with metric ratio
    raw: Tensor  # the same before truncation or masking
    outside: Tensor  # bool: outside the bounds, so clamped or masked


def canonical(correction: str | Mapping[str, Any]) -> dict[str, Any]:
    """The full form of a preset name, or of a partial mapping (which may name a `preset` to start from)."""
    given = {"preset": correction} if isinstance(correction, str) else dict(correction)
    preset = given.pop("preset", None)
    if preset is not None and preset not in CORRECTIONS:
        raise ValueError(f"unknown correction {preset!r}; known: {', '.join(CORRECTIONS)}")
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        raise TypeError(f"correction has no setting {', '.join(sorted(unknown))}; it has {', '.join(DEFAULTS)}")
    # Later entries override earlier ones: defaults, preset, the caller's own settings.
    form = {**DEFAULTS, **(CORRECTIONS[preset] if preset else {}), **given}
    # Checks: choices, then combinations that have no meaning.
    for name, choices in CHOICES.items():
        if form[name] not in choices:
            raise ValueError(f"correction {name} must be one of {', '.join(choices)}, got {form[name]!r}")
    if form["action"] == "clamp" and form["metric"] != "ratio":
        raise ValueError("correction: action clamp truncates the ratio; with a kl metric use action mask")
    if form["agg"] == "product" and (form["level"], form["metric"]) != ("sequence", "ratio"):
        raise ValueError("correction: agg product is the product of ratios over a sequence; set level sequence")
    if form["lower"] is not None and form["upper"] is not None and form["lower"] > form["upper"]:
        raise ValueError(f"correction: lower {form['lower']} is above upper {form['upper']}")
    return form


def weights(
    proximal_logp: Tensor, behavior_logp: Tensor, advantage: Tensor, layout: TokenLayout, form: Mapping[str, Any]
) -> Weights:
    """w = π_old(y_it)/μ(y_it), or its geometric mean or product over the sequence, kept within [lower, upper].

    `form` is canonical; `advantage` is per token or per sequence, as its level. Nothing is differentiated.
    action mask: weight 0 outside the bounds. action clamp: weight truncated to the bounds.
    """
    # The weight is a constant factor: the gradient goes through π_θ/π_old only.
    proximal, behavior = proximal_logp.detach(), behavior_logp.detach()
    r = keep_trained(proximal - behavior, layout)  # token-shaped
    if form["metric"] == "ratio":
        measured = r  # the value that is compared with the bounds
    else:
        # KL metrics stay in their own unit; ratio is compared in log space.
        measured = keep_trained(kl(proximal, behavior, form["metric"].removeprefix("kl_")), layout)
    if form["level"] == "sequence":
        measured = _over_sequence(measured, layout, form["agg"])  # [B]
    if not by_token(form):
        # The weight is the geometric mean, except for `product`; only the statistic for the bounds depends on `agg`.
        r = sum_tokens(r, layout) if form["agg"] == "product" else mean_tokens(r, layout)  # [B]
    statistic = bounded(measured).exp() if form["metric"] == "ratio" else measured
    inside = torch.ones_like(statistic, dtype=torch.bool)
    if form["upper"] is not None:
        inside &= statistic <= form["upper"]
    if form["lower"] is not None:
        inside &= statistic >= form["lower"]
    if form["only_negative"]:
        # Samples with A ≥ 0 keep their weight, whatever the statistic is.
        inside |= advantage >= 0
    if form["level"] == "sequence" and by_token(form):
        inside = at_tokens(inside, layout)
    # From here on every tensor is token-shaped if `by_token`, else [B].
    raw = bounded(r).exp()
    if form["action"] == "clamp":
        # torch raises an error for a clamp without bounds.
        weight = raw.clamp(min=form["lower"], max=form["upper"]) if _has_bound(form) else raw
        # `inside` can hold where raw is out of bounds: with only_negative, or if agg makes the statistic differ from
        # raw.
        weight = torch.where(inside, raw, weight)
    else:
        weight = torch.where(inside, raw, torch.zeros_like(raw))
    # Adds 0, or NaN where a log-ratio is NaN or infinite: a mask must not hide it.
    return Weights(weight + 0.0 * r, raw, ~inside)


def by_token(form: Mapping[str, Any]) -> bool:
    """Whether each token has a weight of its own; else each sequence."""
    return form["level"] == "token" or form["metric"] != "ratio"


def kept(weights: Weights, layout: TokenLayout, form: Mapping[str, Any]) -> TokenLayout:
    """The layout without the tokens that a mask of tokens takes out of the ratio of their sequence."""
    if form["level"] != "token" or form["action"] != "mask":
        return layout
    inside = ~weights.outside if layout.mask is None else layout.mask & ~weights.outside
    return token_layout(weights.weight, inside, layout.cu_seqlens)


def to_sequences(token_weights: Weights, layout: TokenLayout) -> Weights:
    """One weight for a sequence ratio: the mean of its tokens' weights, masked ones counting as 0."""
    weight, raw, outside = token_weights
    # A sequence counts as outside if any of its trained tokens is.
    outside_any = sum_tokens(keep_trained(outside.to(weight.dtype), layout), layout) > 0  # [B]
    return Weights(
        mean_tokens(keep_trained(weight, layout), layout), mean_tokens(keep_trained(raw, layout), layout), outside_any
    )


def to_tokens(sequence_weights: Weights, layout: TokenLayout) -> Weights:
    """The weight of a sequence at each of its tokens, token-shaped."""
    weight, raw, outside = sequence_weights
    return Weights(at_tokens(weight, layout), at_tokens(raw, layout), at_tokens(outside, layout))


def _has_bound(form: Mapping[str, Any]) -> bool:
    return form["lower"] is not None or form["upper"] is not None


def _over_sequence(x: Tensor, layout: TokenLayout, agg: str) -> Tensor:
    """[B] mean, sum or maximum over each sequence's trained tokens. The log of a product is a sum."""
    if agg == "mean":
        return mean_tokens(x, layout)
    if agg in ("sum", "product"):
        return sum_tokens(x, layout)
    # −inf and not 0 at masked tokens: the values of all trained tokens can be negative.
    lowest = x if layout.mask is None else torch.where(layout.mask, x, torch.full_like(x, -torch.inf))
    if layout.cu_seqlens is None:
        # amax raises an error if T = 0.
        top = lowest.amax(-1) if layout.shape[1] else torch.full_like(layout.num_tokens, -torch.inf)
    else:
        top = torch.segment_reduce(lowest, "max", offsets=layout.cu_seqlens, unsafe=True, initial=-torch.inf)
    # 0 for a sequence without trained tokens.
    return torch.where(layout.num_tokens > 0, top, torch.zeros_like(top))
