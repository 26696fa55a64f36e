"""`loss`, the public call: an objective by name or a function, on padded or packed tensors of any trainer.

loss = −(1/denominator) Σ_i agg_t( A · g(log ratio, sign of A) · w ) + kl_coef · KL(π_θ ‖ π_ref) − entropy_coef · H(π_θ)

A          advantage, per sequence or per token        advantage.py (computed before, by `learner/credit.py`)
ratio, g   π_θ/π_old of a token or a sequence, its clip or another gate                              surrogate.py
w          behavior weight π_old/μ, if corrected       correction.py
agg        over the tokens of a sequence               aggregate.py (also the denominator)
KL         to the reference, if kl_coef > 0            surrogate.py, aggregated in the same way
own.py     a function of the user in place of −A · g
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algorithms import AGGREGATIONS, ALGORITHMS, COMMON_SETTINGS, GATES, LEVELS, Algorithm
from gspo.objectives import aggregate, correction
from gspo.objectives.aggregate import (
    TokenLayout,
    Values,
    at_tokens,
    compute_dtype,
    keep_trained,
    mean_tokens,
    token_layout,
)
from gspo.objectives.surrogate import (
    ESTIMATORS,
    Ratio,
    kl,
    sequence_log_ratio,
    sequence_token_log_ratio,
    token_log_ratio,
)
from gspo.system import by_name


@dataclass(frozen=True)
class Objective:
    """What `loss` returns; `loss == per_sequence.sum() / denominator`.

    stats, all [B] and detached: log_s (log of the sequence ratio, at every level), num_tokens, clipped_low and
    clipped_high (numbers of tokens clipped with A ≤ 0 and with A > 0), nonfinite (a trained token's log-ratio is NaN
    or infinite), kl (to the reference, token mean), correction and correction_raw (behavior weight after and before
    truncation), correction_outside (number of tokens beyond its bounds).
    """

    loss: Tensor  # scalar, to be minimised
    per_sequence: Tensor  # [B], each sequence's share before the division
    clipped: Tensor  # bool, [B] for sequence ratios, token-shaped for token ratios
    stats: Mapping[str, Tensor]


def loss(
    objective: str | Callable[..., Any],
    logp: Tensor,
    proximal_logp: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    *,
    behavior_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **settings: Any,
) -> Objective:
    """The loss of a preset (see `gspo objectives`), −J of its formula, or of a function (`own.py`).

    logp            log π_θ(y_it), [B, T], or packed [N] with cu_seqlens [B + 1]; differentiated, as is `entropy`
    proximal_logp   log π_old, same shape (`sft` has no ratio and uses it in stats only)
    advantage       [B], or per token in the shape of logp (sequence ratios take its mean over the sequence)
    mask            1 at trained tokens; None: all
    behavior_logp   log μ, needed by `correction`
    reference_logp  log π_ref, needed by `kl_coef` > 0
    entropy         of π_θ at each token, same shape, needed by `entropy_coef` > 0
    weight          [B], a factor of each sequence's share of the loss: |y_ij| / |y_i| of sequence (or turn) j of
                    trajectory i, if the aggregation is a mean over tokens; None: 1
    denominator     one value per optimizer update, from `objectives.denominator`; None: this batch's own counts
    settings        the preset's own: clip_low, clip_high, dual_clip / weight_max / tau_pos, tau_neg / log_clip_low,
                    log_clip_high; those of a function are its parameters; and for all: level, aggregation,
                    max_new_tokens, kl_coef, kl_estimator, entropy_coef, correction

    >>> logp = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], requires_grad=True)
    >>> out = loss("gspo", logp, logp.detach(), torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    >>> out.clipped.tolist(), out.per_sequence.tolist()
    ([False, False], [-1.0, 1.0])
    """
    # Inputs: settings, layout, at least float32. Shapes are compared first, because unequal ones could broadcast.
    own = by_name("gspo.objectives.own") if callable(objective) else None
    name = str(objective) if own is None else own.name_of(objective)
    algorithm = _preset(name if own is None else "gspo")
    chosen = _settings(algorithm, settings) if own is None else own.merged(objective, settings)
    layout = token_layout(logp, mask, cu_seqlens)
    dtype = compute_dtype(logp.dtype)
    logp = logp.to(dtype)
    others = {"proximal_logp": proximal_logp, "behavior_logp": behavior_logp, "reference_logp": reference_logp}
    for what, other in {**others, "entropy": entropy}.items():
        if other is not None and other.shape != logp.shape:
            raise ValueError(f"{what} has shape {tuple(other.shape)}, logp {tuple(logp.shape)}; they must be equal")
    adv = _advantage(advantage, layout, dtype)
    # The behavior weight comes first: a sequence ratio is over the tokens that it keeps.
    kept, weights, form = layout, None, {}
    if chosen["correction"] is not None:
        if behavior_logp is None:
            raise ValueError(f"{name}: correction needs behavior_logp, the sampler's log-probs")
        form = correction.canonical(chosen["correction"])
        weights = _weights(form, proximal_logp, behavior_logp, adv, layout)
        kept = layout if own is not None else correction.kept(weights, layout, form)
    if own is None and _ratio_per_sequence(algorithm, chosen):
        # The mean over the sequence's tokens; a sum would multiply the gradient by |y_i|.
        adv = Values(adv.mean(kept), per_token=False)

    d = token_log_ratio(logp, proximal_logp, layout)  # token-shaped
    whole = log_s = sequence_log_ratio(d, layout)  # [B]
    if kept is not layout:
        d = keep_trained(d, kept)
        log_s = sequence_log_ratio(d, kept)
    if own is None:
        value, clipped = _gate(algorithm, chosen, logp, d, log_s, adv, kept)
    else:
        value, clipped = own.call(objective, logp, proximal_logp, behavior_logp, adv, layout, chosen)
    stats: dict[str, Tensor] = {}
    # The behavior weight multiplies after the gate, so it does not change which ratios are clipped.
    if weights is not None:
        value, stats = _corrected(value, weights, correction.by_token(form), layout)
    if own is None:
        per_sequence = _policy_loss(value, adv, layout, chosen["aggregation"])  # [B]
    else:
        # One value per sequence is its share of the sum already.
        per_sequence = _summed(value, layout, chosen["aggregation"]) if value.per_token else value.x
    # Adds 0, or NaN where a log-ratio is NaN or infinite: a clamp must not turn infinity into a plausible loss.
    per_sequence = per_sequence + 0.0 * whole.detach()
    # The KL is added outside the gate: clipped tokens keep the gradient of their KL.
    if chosen["kl_coef"]:
        term, stats["kl"] = _kl_term(name, chosen, logp, reference_logp, layout)  # [B] each
        per_sequence = per_sequence + term
    if chosen["entropy_coef"]:
        per_sequence = per_sequence - _entropy_term(name, chosen, entropy, layout, dtype)
    if weight is not None:
        if weight.shape != per_sequence.shape:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be ({layout.num_sequences},)")
        # After the KL, so that policy loss and KL of a sequence have the same share of its trajectory.
        per_sequence = per_sequence * weight.detach().to(dtype)
    if denominator is None:
        denominator = _own_denominator(name, chosen, layout)
    stats |= {
        "log_s": log_s.detach(),
        "num_tokens": layout.num_tokens,
        "nonfinite": ~whole.detach().isfinite(),
        **({} if clipped is None else _clipped_by_sign(clipped, adv, layout)),
    }
    mask_of = torch.zeros_like(log_s, dtype=torch.bool) if clipped is None else clipped.x
    return Objective(per_sequence.sum() / denominator, per_sequence, mask_of, stats)


def _ratio_per_sequence(algorithm: Algorithm, chosen: Mapping[str, Any]) -> bool:
    """Whether a sequence has one ratio. Gates that use log π of each token are per token at every level."""
    return chosen["level"] == "sequence" and not GATES[algorithm.gate].by_token


def _advantage(advantage: Tensor, layout: TokenLayout, dtype: torch.dtype) -> Values:
    """The advantage, detached: one value per sequence or per token. Shapes must match: (B, 1) would broadcast."""
    advantage = advantage.detach().to(dtype)
    per_sequence, per_token = advantage.shape == (layout.num_sequences,), advantage.shape == layout.shape
    # B = N in a packed batch. If every sequence has exactly one token, both meanings give the same loss.
    if per_sequence and per_token and not bool((layout.num_tokens == 1).all()):
        raise ValueError(
            f"advantage of shape {tuple(advantage.shape)} could be per sequence or per token in this packed batch; "
            "drop the empty sequences or use the padded form"
        )
    if not (per_sequence or per_token):
        raise ValueError(
            f"advantage has shape {tuple(advantage.shape)}; it must be ({layout.num_sequences},), one per sequence, "
            f"or {tuple(layout.shape)}, one per token"
        )
    return Values(advantage, False) if per_sequence else Values(keep_trained(advantage, layout), True)


def _gate(
    algorithm: Algorithm,
    chosen: Mapping[str, Any],
    logp: Tensor,
    d: Tensor,
    log_s: Tensor,
    adv: Values,
    layout: TokenLayout,
) -> tuple[Values, Values]:
    """(g: the objective without its factor A, whether it was clipped), each per token or per sequence."""
    gate, per_token = GATES[algorithm.gate], not _ratio_per_sequence(algorithm, chosen)
    log_ratio = _log_ratio(chosen["level"], per_token, logp, d, log_s, layout)
    ratio = Ratio(log_ratio, per_token, adv, logp, d, layout)
    return by_name(gate.function)(ratio, **{name: chosen[name] for name in gate.settings})


def _log_ratio(level: str, per_token: bool, logp: Tensor, d: Tensor, log_s: Tensor, layout: TokenLayout) -> Tensor:
    """The log-ratio of the chosen level: [B], or token-shaped if `per_token`."""
    if level == "sequence_token":
        return sequence_token_log_ratio(logp, log_s, layout)
    if level == "sequence":
        return at_tokens(log_s, layout) if per_token else log_s
    return d


def _weights(
    form: Mapping[str, Any], proximal: Tensor, behavior: Tensor, adv: Values, layout: TokenLayout
) -> correction.Weights:
    """The behavior weights π_old/μ, at the level of the correction."""
    # The advantage matters to `only_negative` alone.
    advantage = adv.mean(layout) if form["level"] == "sequence" else adv.at_tokens(layout)
    dtype = compute_dtype(proximal.dtype)
    return correction.weights(proximal.to(dtype), behavior.to(dtype), advantage, layout, form)


def _corrected(
    value: Values, weights: correction.Weights, by_token: bool, layout: TokenLayout
) -> tuple[Values, dict[str, Tensor]]:
    """`value` times the behavior weight in the shape of `value`, and the weight's statistics, [B]."""
    if value.per_token and not by_token:
        weights = correction.to_tokens(weights, layout)
    elif by_token and not value.per_token:
        weights = correction.to_sequences(weights, layout)
    stats = {
        "correction": Values(weights.weight, value.per_token).mean(layout),
        "correction_raw": Values(weights.raw, value.per_token).mean(layout),
        "correction_outside": Values(weights.outside.to(value.x.dtype), value.per_token).sum(layout),
    }
    return Values(value.x * weights.weight, value.per_token), stats


def _policy_loss(value: Values, adv: Values, layout: TokenLayout, aggregation: str) -> Tensor:
    """−A · g, aggregated to [B]. One advantage per sequence multiplies after the sum over tokens, not at each token."""
    if not value.per_token:
        # A is [B] here: `loss` has taken its mean over the sequence.
        return -adv.x * aggregate.sequences(value.x, layout, aggregation)
    if adv.per_token:
        return -_summed(Values(adv.x * value.x, True), layout, aggregation)
    return -adv.x * _summed(value, layout, aggregation)


def _summed(value: Values, layout: TokenLayout, aggregation: str) -> Tensor:
    """Token values of each sequence as its share of the loss, [B]."""
    return aggregate.tokens(keep_trained(value.x, layout), layout, aggregation)


def _kl_term(
    name: str, chosen: Mapping[str, Any], logp: Tensor, reference_logp: Tensor | None, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """(what the KL to the reference adds to the loss, its token mean), [B] each."""
    if reference_logp is None:
        raise ValueError(f"{name}: kl_coef {chosen['kl_coef']} needs reference_logp")
    # Masked before the estimator: NaN at a masked token would come back through its gradient. kl(0, 0) = 0.
    trained, reference = keep_trained(logp, layout), keep_trained(reference_logp.to(logp.dtype), layout)
    token_kl = kl(trained, reference, chosen["kl_estimator"])  # token-shaped
    term = chosen["kl_coef"] * aggregate.tokens(token_kl, layout, chosen["aggregation"])
    return term, mean_tokens(token_kl.detach(), layout)


def _entropy_term(
    name: str, chosen: Mapping[str, Any], entropy: Tensor | None, layout: TokenLayout, dtype: torch.dtype
) -> Tensor:
    """What the entropy takes from the loss, [B]."""
    if entropy is None:
        raise ValueError(f"{name}: entropy_coef {chosen['entropy_coef']} needs entropy")
    token_entropy = keep_trained(entropy.to(dtype), layout)  # token-shaped
    return chosen["entropy_coef"] * aggregate.tokens(token_entropy, layout, chosen["aggregation"])


def _own_denominator(name: str, chosen: Mapping[str, Any], layout: TokenLayout) -> float | Tensor:
    # Counts are tensors, so nothing waits for the device. Sequences without trained tokens count, too.
    return aggregate.denominator(
        name,
        num_sequences=layout.num_tokens.new_tensor(max(layout.num_sequences, 1)),
        num_tokens=layout.num_tokens.sum().clamp(min=1),
        max_new_tokens=chosen["max_new_tokens"],
        aggregation=chosen["aggregation"],
    )


def _clipped_by_sign(clipped: Values, adv: Values, layout: TokenLayout) -> dict[str, Tensor]:
    """Clipped tokens of each sequence, [B], by the sign of A: A > 0 is clipped above only, A < 0 below only.

    A clipped sequence ratio clips all of its tokens.
    """
    dtype = layout.num_tokens.dtype
    if not clipped.per_token:
        adv = Values(adv.mean(layout), per_token=False)
    positive = adv.x > 0
    if adv.per_token:
        high = Values((clipped.x & positive).to(dtype), True).sum(layout)
        low = Values((clipped.x & (adv.x <= 0)).to(dtype), True).sum(layout)
        return {"clipped_low": low, "clipped_high": high}
    count = Values(clipped.x.to(dtype), clipped.per_token).sum(layout)  # [B]
    zero = torch.zeros_like(count)
    return {"clipped_low": torch.where(positive, zero, count), "clipped_high": torch.where(positive, count, zero)}


def _preset(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        raise ValueError(
            f"unknown objective {name!r}{f'; did you mean {near[0]!r}?' if near else ''} Known: {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[name]


def _settings(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's settings overridden by the caller's, within their bounds."""
    known = {
        **algorithm.settings,
        **COMMON_SETTINGS,
        "level": algorithm.level,
        "aggregation": algorithm.aggregation,
        "max_new_tokens": None,
    }
    chosen = with_defaults(algorithm.name, known, given)
    gate = GATES[algorithm.gate]
    if gate.level not in (None, chosen["level"]):
        raise ValueError(f"{algorithm.name}: level must be {gate.level}, got {chosen['level']!r}")
    for key, setting in gate.settings.items():
        if chosen[key] is not None and not setting.above < chosen[key] <= setting.at_most:
            limit = f" and at most {setting.at_most:g}" if setting.at_most < math.inf else ""
            raise ValueError(f"{algorithm.name}: {key} must be above {setting.above:g}{limit}, got {chosen[key]}")
    return chosen


def with_defaults(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are given, and the others with their defaults; an unknown one is an error that names it."""
    unknown = [key for key in given if key not in known]
    if unknown:
        raise TypeError(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    chosen = {**known, **given}
    for key, choices in (("level", LEVELS), ("aggregation", AGGREGATIONS), ("kl_estimator", ESTIMATORS)):
        if chosen[key] not in choices:
            raise ValueError(f"{name}: {key} must be one of {', '.join(choices)}, got {chosen[key]!r}")
    return chosen
