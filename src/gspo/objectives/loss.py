"""The one public call: an objective by name, on anybody's tensors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.algorithms import AGGREGATIONS, ALGORITHMS, COMMON_SETTINGS, LEVELS, Algorithm
from gspo.objectives import aggregate, correction, gate
from gspo.objectives.advantage import sequence_advantage
from gspo.objectives.kl import ESTIMATORS, kl
from gspo.objectives.ratio import (
    LOG_RATIO_BOUND,
    bounded,
    sequence_log_ratio,
    sequence_token_log_ratio,
    token_log_ratio,
)
from gspo.objectives.rows import Rows, compute_dtype, keep_trained, mean_tokens, rows, spread, sum_tokens


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
    name: str,
    logp: Tensor,
    proximal_logp: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    *,
    behavior_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **settings: Any,
) -> Objective:
    """The loss of preset `name` (see `gspo objectives`), −J of its formula.

    logp            log π_θ(y_it), [B, T], or packed [N] with cu_seqlens [B + 1]; the only differentiated input
    proximal_logp   log π_old, same shape
    advantage       [B], or per token in the shape of logp (sequence ratios take its mean over the sequence)
    mask            1 at trained tokens; None: all
    behavior_logp   log μ, needed by `correction`
    reference_logp  log π_ref, needed by `kl_coef` > 0
    weight          [B], a factor of each sequence's share of the loss: |y_ij| / |y_i| of sequence (or turn) j of
                    trajectory i, where a mean over tokens is taken; None: 1
    denominator     one value per optimizer update, from `objectives.denominator`; None: this batch's own counts
    settings        the preset's own: clip_low, clip_high, dual_clip / weight_max / tau_pos, tau_neg / log_clip_low,
                    log_clip_high; and for all: level, aggregation, max_new_tokens, kl_coef, kl_estimator, correction

    >>> logp = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], requires_grad=True)
    >>> out = loss("gspo", logp, logp.detach(), torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    >>> out.clipped.tolist(), out.per_sequence.tolist()
    ([False, False], [-1.0, 1.0])
    """
    algorithm = _preset(name)
    chosen = _settings(algorithm, settings)
    layout = rows(logp, mask, cu_seqlens)
    dtype = compute_dtype(logp.dtype)
    logp = logp.to(dtype)
    for other, what in (
        (proximal_logp, "proximal_logp"),
        (behavior_logp, "behavior_logp"),
        (reference_logp, "reference_logp"),
    ):
        if other is not None and other.shape != logp.shape:
            raise ValueError(f"{what} has shape {tuple(other.shape)}, logp {tuple(logp.shape)}; they must be equal")
    advantage, per_token = _advantage(advantage, layout, dtype)
    if per_token and (chosen["level"] == "sequence" and algorithm.gate != "cispo"):
        advantage, per_token = sequence_advantage(advantage, layout), False

    d = token_log_ratio(logp, proximal_logp, layout)  # token-shaped
    log_s = sequence_log_ratio(d, layout)  # [B]
    g = _gate(algorithm, chosen, logp, d, log_s, advantage, per_token, layout)

    value, stats = g.value, {}  # objective / A, [B] or token-shaped
    if chosen["correction"] is not None:
        if behavior_logp is None:
            raise ValueError(f"{name}: correction needs behavior_logp, the sampler's log-probs")
        behavior = _correction(
            chosen["correction"], proximal_logp, behavior_logp, advantage, per_token, layout, g.by_sequence
        )
        value = value * behavior.weight
        stats["correction"], stats["correction_raw"] = (
            w if g.by_sequence else mean_tokens(keep_trained(w, layout), layout)
            for w in (behavior.weight, behavior.raw)
        )
        beyond = behavior.outside.to(dtype)
        stats["correction_outside"] = (
            beyond * layout.num_tokens if g.by_sequence else sum_tokens(keep_trained(beyond, layout), layout)
        )
    if g.by_sequence:
        per_sequence = -advantage * aggregate.sequences(value, layout, chosen["aggregation"])
    elif per_token:
        per_sequence = -aggregate.tokens(keep_trained(advantage * value, layout), layout, chosen["aggregation"])
    else:
        per_sequence = -advantage * aggregate.tokens(keep_trained(value, layout), layout, chosen["aggregation"])
    # 0 unless a log-ratio is NaN or infinite: a clamp must not turn infinity into a plausible loss.
    per_sequence = per_sequence + 0.0 * log_s.detach()
    if chosen["kl_coef"]:
        if reference_logp is None:
            raise ValueError(f"{name}: kl_coef {chosen['kl_coef']} needs reference_logp")
        # Masked on entry: garbage would come back through the gradient of the estimator. kl(0, 0) = 0.
        trained, reference = keep_trained(logp, layout), keep_trained(reference_logp.to(dtype), layout)
        token_kl = kl(trained, reference, chosen["kl_estimator"])
        per_sequence = per_sequence + chosen["kl_coef"] * aggregate.tokens(token_kl, layout, chosen["aggregation"])
        stats["kl"] = mean_tokens(token_kl.detach(), layout)

    if weight is not None:
        if weight.shape != per_sequence.shape:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be ({layout.num_sequences},)")
        per_sequence = per_sequence * weight.detach().to(dtype)
    if denominator is None:
        denominator = aggregate.denominator(
            name,
            num_sequences=layout.num_tokens.new_tensor(max(layout.num_sequences, 1)),
            num_tokens=layout.num_tokens.sum().clamp(min=1),
            max_new_tokens=chosen["max_new_tokens"],
            aggregation=chosen["aggregation"],
        )
    stats |= {
        "log_s": log_s.detach(),
        "num_tokens": layout.num_tokens,
        "nonfinite": ~log_s.detach().isfinite(),
        **_clipped_by_sign(g.clipped, advantage, per_token, layout, g.clipped_by_sequence),
    }
    return Objective(per_sequence.sum() / denominator, per_sequence, g.clipped, stats)


class _Gated(NamedTuple):
    value: Tensor  # g of `gate`: the objective without its factor A
    by_sequence: bool  # value is [B], not token-shaped
    clipped: Tensor  # bool
    clipped_by_sequence: bool  # clipped is [B], not token-shaped


def _gate(
    algorithm: Algorithm,
    chosen: Mapping[str, Any],
    logp: Tensor,
    d: Tensor,
    log_s: Tensor,
    advantage: Tensor,
    per_token: bool,
    layout: Rows,
) -> _Gated:
    """Choose the ratio by level, and what the gate makes of it."""

    def at_tokens(x: Tensor) -> Tensor:
        return x if per_token else spread(x, layout)

    positive = advantage > 0
    if algorithm.gate == "gmpo":
        # Each token's log-ratio is bounded, then their mean is taken   (arXiv 2507.20673, eq. 3, in logs).
        low = gate.by_sign(advantage < 0, -chosen["log_clip_low"], -LOG_RATIO_BOUND, d.dtype)
        high = gate.by_sign(positive, chosen["log_clip_high"], LOG_RATIO_BOUND, d.dtype)
        bounded_d = torch.clamp(d, spread(low, layout), spread(high, layout))
        return _Gated(sequence_log_ratio(bounded_d, layout).exp(), True, bounded_d.detach() != d.detach(), False)
    by_sequence = chosen["level"] == "sequence" and algorithm.gate != "cispo"
    if chosen["level"] == "sequence_token":
        log_ratio = sequence_token_log_ratio(logp, log_s, layout)
    elif chosen["level"] == "sequence":
        log_ratio = log_s if by_sequence else spread(log_s, layout)
    else:
        log_ratio = d
    if algorithm.gate == "clip":
        low, high = gate.clip_bounds(
            advantage, chosen["clip_low"], chosen["clip_high"], chosen["dual_clip"], log_ratio.dtype
        )
        if not by_sequence:
            low, high = at_tokens(low), at_tokens(high)
        value, clipped = gate.clip(log_ratio, low, high)
    elif algorithm.gate == "cispo":
        value = gate.cispo(log_ratio, keep_trained(logp, layout), chosen["weight_max"])
        clipped = log_ratio.detach() > math.log(chosen["weight_max"])
    elif algorithm.gate == "sapo":
        tau = gate.by_sign(positive, chosen["tau_pos"], chosen["tau_neg"], log_ratio.dtype)
        value = gate.sapo(log_ratio, tau if by_sequence else at_tokens(tau))
        clipped = torch.zeros_like(value, dtype=torch.bool)
    else:
        value = bounded(log_ratio).exp()
        clipped = torch.zeros_like(value, dtype=torch.bool)
    return _Gated(value, by_sequence, clipped, by_sequence)


def _correction(
    given: str | Mapping[str, Any],
    proximal: Tensor,
    behavior: Tensor,
    advantage: Tensor,
    per_token: bool,
    layout: Rows,
    by_sequence: bool,
) -> correction.Weights:
    """Behavior weights in the shape of the gated values, judged at the correction's own level."""
    form = correction.canonical(given)
    # The advantage only matters to `only_negative`.
    if form["level"] == "sequence":
        judged = sequence_advantage(advantage, layout) if per_token else advantage
    else:
        judged = advantage if per_token else spread(advantage, layout)
    dtype = compute_dtype(proximal.dtype)
    weight = correction.weights(proximal.to(dtype), behavior.to(dtype), judged, layout, form)
    if form["level"] == "sequence" and not by_sequence:
        return correction.to_tokens(weight, layout)
    if form["level"] == "token" and by_sequence:
        return correction.to_sequences(weight, layout)
    return weight


def _advantage(advantage: Tensor, layout: Rows, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The advantage as a constant, and whether it is per token. Shapes are matched exactly: (B, 1) would broadcast."""
    advantage = advantage.detach().to(dtype)
    per_sequence, per_token = advantage.shape == (layout.num_sequences,), advantage.shape == layout.shape
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
    return (keep_trained(advantage, layout), True) if not per_sequence else (advantage, False)


def _clipped_by_sign(
    clipped: Tensor, advantage: Tensor, per_token: bool, layout: Rows, by_sequence: bool
) -> dict[str, Tensor]:
    """Clipped tokens of each sequence, [B], by the sign of A: only a rise is clipped for A > 0, only a fall for A < 0.

    A clipped sequence ratio clips all of its tokens.
    """
    dtype = layout.num_tokens.dtype
    if per_token:
        high = sum_tokens(keep_trained((clipped & (advantage > 0)).to(dtype), layout), layout)
        low = sum_tokens(keep_trained((clipped & (advantage <= 0)).to(dtype), layout), layout)
        return {"clipped_low": low, "clipped_high": high}
    if by_sequence:
        count = clipped.to(dtype) * layout.num_tokens
    else:
        count = sum_tokens(keep_trained(clipped.to(dtype), layout), layout)
    zero = torch.zeros_like(count)
    return {
        "clipped_low": torch.where(advantage > 0, zero, count),
        "clipped_high": torch.where(advantage > 0, count, zero),
    }


def _preset(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        raise ValueError(
            f"unknown objective {name!r}{f'; did you mean {near[0]!r}?' if near else ''} Known: {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[name]


def _settings(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's settings with the caller's on top; a foreign one is an error that names it."""
    known = {
        **algorithm.settings,
        **COMMON_SETTINGS,
        "level": algorithm.level,
        "aggregation": algorithm.aggregation,
        "max_new_tokens": None,
    }
    foreign = [key for key in given if key not in known]
    if foreign:
        raise TypeError(f"{algorithm.name} has no setting {', '.join(foreign)}; it has {', '.join(known)}")
    chosen = {**known, **given}
    for key, choices in (("level", LEVELS), ("aggregation", AGGREGATIONS), ("kl_estimator", ESTIMATORS)):
        if chosen[key] not in choices:
            raise ValueError(f"{algorithm.name}: {key} must be one of {', '.join(choices)}, got {chosen[key]!r}")
    if algorithm.gate == "gmpo" and chosen["level"] != "sequence":
        raise ValueError("gmpo is the geometric mean over a sequence; its level is sequence")
    for key in ("clip_low", "clip_high", "weight_max", "tau_pos", "tau_neg", "log_clip_low", "log_clip_high"):
        if chosen.get(key) is not None and not chosen[key] > 0:
            raise ValueError(f"{algorithm.name}: {key} must be above 0, got {chosen[key]}")
    if chosen.get("clip_low") is not None and chosen["clip_low"] > 1:
        raise ValueError(
            f"{algorithm.name}: clip_low must be at most 1 (ratios are positive), got {chosen['clip_low']}"
        )
    if chosen.get("dual_clip") is not None and not chosen["dual_clip"] > 1:
        raise ValueError(f"{algorithm.name}: dual_clip must be above 1, got {chosen['dual_clip']}")
    return chosen
