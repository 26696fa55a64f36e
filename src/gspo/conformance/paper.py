"""The objectives of the papers as loops over Python floats: no tensors, no autograd, nothing of `gspo.objectives`.

An objective gives one `Term` for each trained token of a sequence. The loss is −Σ weight · value over all tokens and
its derivative by log π_θ(y_it) is −weight · slope, with the weight of the aggregation. For a sequence ratio all tokens
of y_i have the value J_i, and the slope is |y_i| · ∂J_i/∂log π_θ(y_it), so that the mean over tokens gives J_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Term(NamedTuple):
    value: float
    slope: float  # derivative of the value by the token's log-prob (see above for sequence ratios)
    clipped: bool


@dataclass(frozen=True)
class Completion:
    """The trained tokens of one y_i."""

    logp: Sequence[float]  # log π_θ
    proximal_logp: Sequence[float]  # log π_θ_old
    advantage: Sequence[float]
    behavior_logp: Sequence[float] = ()  # of the sampler
    reference_logp: Sequence[float] = ()
    turn: Sequence[int] = ()

    @property
    def log_ratios(self) -> list[float]:
        return [new - old for new, old in zip(self.logp, self.proximal_logp, strict=True)]

    @property
    def log_s(self) -> float:
        """log s_i = (1/|y_i|) Σ_t log π_θ(y_it)/π_θ_old(y_it)   (arXiv 2507.18071, eq. 7)."""
        return sum(self.log_ratios) / len(self.logp)


def exp(x: float) -> float:
    """e^x, at most e^700, so that a dump with absurd ratios is no error."""
    return math.exp(min(x, 700.0))


Settings = Mapping[str, Any]
Objective = Callable[[Completion, Settings], list[Term]]


def clipped(ratio: float, advantage: float, settings: Settings) -> Term:
    """min( r A , clip(r, 1 − ε_low, 1 + ε_high) A ); the slope is by log r."""
    inside = min(max(ratio, 1 - settings["clip_low"]), 1 + settings["clip_high"])
    if inside * advantage < ratio * advantage:
        return Term(inside * advantage, 0.0, True)
    return Term(ratio * advantage, ratio * advantage, False)


def gspo(y: Completion, settings: Settings) -> list[Term]:
    """min( s_i A_i , clip(s_i, 1 − ε_low, 1 + ε_high) A_i )   (arXiv 2507.18071, eq. 5)."""
    return [clipped(exp(y.log_s), y.advantage[0], settings)] * len(y.logp)


def gspo_token(y: Completion, settings: Settings) -> list[Term]:
    """s_it = sg[s_i] · π_θ(y_it) / sg[π_θ(y_it)]: the value of s_i, the gradient of the token   (eq. 13–14)."""
    return [clipped(exp(y.log_s), advantage, settings) for advantage in y.advantage]


def gspo_turns(y: Completion, settings: Settings) -> list[Term]:
    """The objective of GSPO with each turn of an episode as a unit: s_ik over the tokens of turn k."""
    terms: list[Term] = []
    for turn in dict.fromkeys(y.turn):
        at = [t for t, number in enumerate(y.turn) if number == turn]
        logp, old, advantage = ([x[t] for t in at] for x in (y.logp, y.proximal_logp, y.advantage))
        terms += gspo(Completion(logp, old, advantage), settings)
    return terms


def token_clip(y: Completion, settings: Settings) -> list[Term]:
    """min( w_it A_it , clip(w_it, 1 − ε_low, 1 + ε_high) A_it )   (arXiv 1707.06347, eq. 7)."""
    return [clipped(exp(d), a, settings) for d, a in zip(y.log_ratios, y.advantage, strict=True)]


def decoupled(y: Completion, settings: Settings) -> list[Term]:
    """π_prox/π_behav · min( u A , clip(u) A ), u = π_θ/π_prox   (decoupled PPO, arXiv 2505.24298)."""
    weights = [exp(new - old) for new, old in zip(y.proximal_logp, y.behavior_logp, strict=True)]
    terms = zip(weights, token_clip(y, settings), strict=True)
    return [Term(w * term.value, w * term.slope, term.clipped) for w, term in terms]


def cispo(y: Completion, settings: Settings) -> list[Term]:
    """sg[min(w_it, w_max)] A_it log π_θ(y_it)   (arXiv 2506.13585, eq. 4, without the lower bound)."""
    terms = []
    for d, a, logp in zip(y.log_ratios, y.advantage, y.logp, strict=True):
        weight = min(exp(d), settings["weight_max"])
        terms.append(Term(weight * a * logp, weight * a, weight < exp(d)))
    return terms


def sapo(y: Completion, settings: Settings) -> list[Term]:
    """(4/τ) σ(τ (w_it − 1)) A_it, τ = τ_pos for A > 0, else τ_neg   (arXiv 2511.20347)."""
    terms = []
    for d, a in zip(y.log_ratios, y.advantage, strict=True):
        tau, w = settings["tau_pos" if a > 0 else "tau_neg"], exp(d)
        gate = 1 / (1 + exp(-tau * (w - 1)))
        terms.append(Term(4 / tau * gate * a, 4 * gate * (1 - gate) * w * a, False))
    return terms


def gmpo(y: Completion, settings: Settings) -> list[Term]:
    """A_i exp( (1/|y_i|) Σ_t log w_it ), each log w_it bounded on the side that the sign of A_i allows (2507.20673)."""
    a, bounded = y.advantage[0], []
    for d in y.log_ratios:
        bounded.append(
            min(d, settings["log_clip_high"]) if a > 0 else max(d, -settings["log_clip_low"]) if a < 0 else d
        )
    value = a * exp(sum(bounded) / len(bounded))
    moved = [b != d for b, d in zip(bounded, y.log_ratios, strict=True)]
    return [Term(value, 0.0 if was_bounded else value, was_bounded) for was_bounded in moved]


def importance(y: Completion, settings: Settings) -> list[Term]:
    """w_it A_it, not clipped."""
    return [Term(exp(d) * a, exp(d) * a, False) for d, a in zip(y.log_ratios, y.advantage, strict=True)]


def reinforce(y: Completion, settings: Settings) -> list[Term]:
    """A_it log π_θ(y_it), without a ratio."""
    return [Term(a * logp, a, False) for a, logp in zip(y.advantage, y.logp, strict=True)]


def product(y: Completion, settings: Settings) -> list[Term]:
    """The clip of GSPO on Π_t w_it, without the root |y_i| of eq. 7."""
    term = clipped(exp(sum(y.log_ratios)), y.advantage[0], settings)
    return [Term(term.value, term.slope * len(y.logp), term.clipped)] * len(y.logp)


# name: (terms, aggregation). `sequence_mean` (1/B) Σ_i (1/|y_i|) Σ_t, `sequence_sum` (1/B) Σ_i Σ_t,
# `token_mean` (1/Σ|y_i|) Σ_i Σ_t, `token_sum` (1/(B·L)) Σ_i Σ_t with L = max_new_tokens.
OBJECTIVES: Mapping[str, tuple[Objective, str]] = {
    "gspo": (gspo, "sequence_mean"),
    "gspo_token": (gspo_token, "sequence_mean"),
    "gspo_turns": (gspo_turns, "sequence_mean"),
    "ppo": (token_clip, "token_mean"),
    "grpo": (token_clip, "sequence_mean"),
    "dr_grpo": (token_clip, "token_sum"),
    "dapo": (token_clip, "token_mean"),
    "decoupled_ppo": (decoupled, "token_mean"),
    "luspo": (gspo, "sequence_sum"),
    "gmpo": (gmpo, "sequence_mean"),
    "cispo": (cispo, "token_mean"),
    "sapo": (sapo, "sequence_mean"),
}


def kl(logp: float, reference_logp: float, estimator: str) -> tuple[float, float]:
    """With d = log π_θ − log π_ref: k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d; value and derivative by log π_θ."""
    d = logp - reference_logp
    return {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (exp(-d) - 1 + d, 1 - exp(-d))}[estimator]


@dataclass
class Answer:
    loss: float
    gradient: list[list[float]]  # [B][T], 0 at masked tokens
    clipped: list[list[bool]]  # [B][T]
    scale: float  # Σ |weight · value|: what a rounding error of the loss is relative to
    log_s: list[float] = field(default_factory=list)  # [B], 0 without trained tokens


def evaluate(batch: Mapping[str, Any], terms: Objective, aggregation: str, settings: Settings) -> Answer:
    """Loss and gradient of a padded batch of nested lists; `advantage` is [B], or [B][T]."""
    kept = [[t for t, m in enumerate(row) if m] for row in batch["mask"]]  # places of the trained tokens
    zeros = [[0.0] * len(row) for row in batch["mask"]]
    answer = Answer(0.0, zeros, [[False] * len(row) for row in batch["mask"]], 0.0)
    for i, at in enumerate(kept):
        weight = _weight(aggregation, len(at), kept, settings)
        if not at:
            answer.log_s.append(0.0)
            continue
        y = _completion(batch, i, at)
        answer.log_s.append(y.log_s)
        for t, place, term in zip(range(len(at)), at, terms(y, settings), strict=True):
            value, slope = -term.value, -term.slope
            if settings.get("kl_coef"):
                k, k_slope = kl(y.logp[t], y.reference_logp[t], settings["kl_estimator"])
                # y_t is sampled from π_θ, so the gradient of E[k] has a second term, k ∇log π_θ   (arXiv 2506.09477).
                k_slope += k if settings.get("kl_sampled") else 0.0
                value, slope = value + settings["kl_coef"] * k, slope + settings["kl_coef"] * k_slope
            answer.loss += weight * value
            answer.scale += abs(weight * value)
            answer.gradient[i][place] = weight * slope
            answer.clipped[i][place] = term.clipped
    return answer


def _weight(aggregation: str, num_tokens: int, kept: Sequence[Sequence[int]], settings: Settings) -> float:
    """Of each token of a sequence in the sum; `settings["denominator"]` replaces the batch's own."""
    own = {
        "sequence_mean": len(kept),
        "sequence_sum": len(kept),
        "token_mean": sum(map(len, kept)),
        "token_sum": len(kept) * settings.get("max_new_tokens", 1),
    }[aggregation]
    share = max(num_tokens, 1) if aggregation == "sequence_mean" else 1
    return 1 / (share * settings.get("denominator", max(own, 1)))


def _completion(batch: Mapping[str, Any], i: int, at: Sequence[int]) -> Completion:
    row = batch["advantage"][i]
    fields = {"advantage": [row[t] for t in at] if isinstance(row, list) else [row] * len(at)}
    for name in ("logp", "proximal_logp", "behavior_logp", "reference_logp", "turn"):
        if name in batch:
            fields[name] = [batch[name][i][t] for t in at]
    return Completion(**fields)


def group_advantage(rewards: Sequence[float], groups: Sequence[int], ddof: int = 1) -> list[float]:
    """A_i = (r_i − mean_G r) / std_G r   (arXiv 2507.18071, eq. 6); 0 where the rewards of a group are equal."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        inside = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(inside) / len(inside)
        squares = math.fsum((r - mean) ** 2 for r in inside)
        is_equal = max(inside) - min(inside) <= 1e-6 * max(1, *map(abs, inside))
        found.append(0.0 if is_equal else (reward - mean) / math.sqrt(squares / (len(inside) - ddof)))
    return found


def token_logp(logits: Sequence[float], token: int, temperature: float) -> float:
    """log π of a token that was sampled at a temperature: log softmax(logits / T)."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    return scaled[token] - top - math.log(math.fsum(exp(x - top) for x in scaled))
