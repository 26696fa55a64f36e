"""The objective of a config: its formula as it will run, its parts in words, and which keys decided them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gspo.algorithms import CLIP_RANGE, GATES
from gspo.config.objective import ObjectiveSettings, algorithm_in, default_algorithm_note, is_supervised, same_as
from gspo.config.schema import CriticSection, Norm, RewardNorm
from gspo.lint.facts import Facts
from gspo.system.imports import source_file
from gspo.system.text import number

RATIO = {"token": "wᵢₜ", "sequence": "sᵢ", "sequence_token": "sᵢₜ"}
RATIO_DEFINITION = {
    "token": "wᵢₜ = π_θ(yᵢₜ)/π_old(yᵢₜ)",
    "sequence": "sᵢ = exp( (1/|yᵢ|) Σₜ log π_θ(yᵢₜ)/π_old(yᵢₜ) )",
    "sequence_token": "sᵢₜ = sg[sᵢ] · π_θ(yᵢₜ)/sg[π_θ(yᵢₜ)]",
}
RATIO_WORDS = {
    "token": "one ratio per token",
    "sequence": "one ratio per completion, the geometric mean of its token ratios",
    "sequence_token": "the completion's ratio as value, with the gradient of each token's own ratio",
}
ADVANTAGE_WORDS = {
    "group_std": "reward minus its group's mean, divided by its group's std",
    "group_mean": "reward minus its group's mean",
    "leave_one_out": "reward minus the mean of the group's other samples",
    "batch": "reward normalised by mean and std over the whole batch",
    "teacher": "log-prob of the teacher minus that of the sampler, per token",
    "one": "1 for every completion of the data set",
    "gae": "generalised advantage estimation (GAE) with the critic, per token",
}
AGGREGATION_WORDS = {
    "sequence_mean": "the mean over completions; every completion has the same weight, whatever its length",
    "sequence_sum": "the mean over completions, each weighted by its number of tokens",
    "token_mean": "the mean over all tokens of the update",
    "token_sum": "the sum over all tokens, divided by completions × max_new_tokens",
}
_OUTER = {
    "sequence_mean": "(1/G) Σᵢ",
    "sequence_sum": "(1/G) Σᵢ",
    "token_mean": "(1/Σᵢ|yᵢ|) Σᵢ",
    "token_sum": "(1/(G·L)) Σᵢ",
}


def formula(objective: ObjectiveSettings, numbers: bool = True, penalised: bool = False) -> str:
    """The objective as it will run, composed from its parts: a changed level or aggregation is visible.

    `penalised`: KL in the reward makes advantages differ from token to token.
    """
    gate, level = GATES[objective["gate"]], objective["level"]
    by_token = penalised or objective["advantage"] in ("gae", "teacher")
    per_token = level == "sequence_token" or (by_token and level == "token")
    parts = {name: setting.symbol for name, setting in gate.settings.items()}
    parts |= _numbers(objective) if numbers else {}
    parts |= {"ratio": RATIO[level], "A": "Aᵢₜ" if per_token else "Aᵢ"}
    term = "".join([gate.formula, *_extra(objective, "formula")]).format(**parts)
    # A gate whose formula has no ratio defines what it has instead.
    return f"{_sum_over(objective)} {term}" + (f",   {RATIO_DEFINITION[level]}" if "{ratio}" in gate.formula else "")


def _numbers(objective: ObjectiveSettings) -> dict[str, str]:
    """The settings of the gate that are on, in their short form; with eps_clip: auto the range stays a symbol."""
    found = {}
    for name, setting in GATES[objective["gate"]].settings.items():
        value = objective["settings"][name]
        if value is not None:
            found[name] = setting.symbol if objective["eps_auto"] and name in CLIP_RANGE else number(value)
    return found


def _extra(objective: ObjectiveSettings, text: Literal["formula", "words"]) -> list[str]:
    """What the settings that are on add to the gate's formula or words."""
    settings = GATES[objective["gate"]].settings
    return [getattr(settings[name], text) for name in _numbers(objective)]


def _sum_over(objective: ObjectiveSettings) -> str:
    aggregation, outer = objective["aggregation"], _OUTER[objective["aggregation"]]
    if objective["level"] != "sequence":
        return f"J = E {outer} (1/|yᵢ|) Σₜ" if aggregation == "sequence_mean" else f"J = E {outer} Σₜ"
    return f"J = E {outer}" if aggregation == "sequence_mean" else f"J = E {outer} |yᵢ| ·"


def objective_section(f: Facts) -> dict[str, Any]:
    objective, actor = f.objective, f.actor
    algorithm, settings = algorithm_in(f.config), objective["settings"]
    own = _function_of(f)
    as_published = objective["level"] == algorithm.level and objective["aggregation"] == algorithm.aggregation
    return {
        "algorithm": algorithm.name,
        "title": algorithm.title if own is None else own.title or algorithm.title,
        "paper": algorithm.paper,
        "as_published": as_published or algorithm.of_user,
        "same_as": None if as_published else same_as(objective),
        "formula": formula(objective, penalised=actor.kl_ctl > 0) if own is None else own.formula(f),
        "words": [*_words(f), *([f"note: {note}"] if (note := default_algorithm_note(f.loaded)) else [])],
        "level": objective["level"],
        "gate": None if algorithm.of_user else objective["gate"],
        "advantage": objective["advantage"],
        "aggregation": objective["aggregation"],
        "settings": dict(settings),
        "eps_auto": objective["eps_auto"],
        "decided_by": [
            {"key": key, "value": value, "where": f.where(key)} for key, value in _decisions(f) if value is not None
        ],
    }


def _words(f: Facts) -> list[str]:
    objective, kind = f.objective, RATIO_WORDS[f.objective["level"]]
    if is_supervised(f.config):
        return [
            "completions: those of the data set; nothing is sampled or rewarded in training",
            f"loss: negative log-likelihood, {AGGREGATION_WORDS[objective['aggregation']]}",
        ]
    own = _function_of(f)
    band = GATES[objective["gate"]].words
    if objective["eps_auto"]:
        band = (
            "clipped to an automatic range: nothing is clipped in the first step, then the range adapts until 5 % of "
            "the sequences are clipped"
        )
    band = "".join([band, *_extra(objective, "words")]).format(**_numbers(objective))
    words = [
        *([f"ratio: {kind}, {band}"] if own is None else own.words(f)),
        f"advantage: {_advantage_words(f)}",
        f"loss: {AGGREGATION_WORDS[objective['aggregation']]}",
        f"groups with equal rewards: {_zero_variance_words(f)}",
    ]
    if f.actor.entropy_coef:
        words.append(f"entropy: {_entropy_words(f)}")
    if f.config.rollout.dynamic_filter_fn is not None:
        words.append(
            f"other groups: {f.config.rollout.dynamic_filter_fn} decides which are trained on; others are resampled, "
            f"at most {f.actor.max_refills} rounds"
        )
    if f.actor.overlong_reward_penalty:
        longest, most = f.config.gconfig.max_new_tokens, float(f.actor.overlong_reward_penalty)
        words.append(
            f"overlong completions: a penalty of up to {number(most)}, rising over the last "
            f"{f.actor.overlong_tokens:,} of {longest:,} tokens"
        )
    env = f.config.env
    agent = " ".join(env.agent) if isinstance(env.agent, list) else env.agent
    if played := env.path or agent:
        unit = f.actor.sequence_unit if f.sequence_level else "token"
        words.append(
            f"episodes: {played}, at most {env.max_turns} turns; one ratio per {unit}; tokens of tools and of the "
            "environment are neither in |y| nor in the loss"
        )
    if agent:
        words.append("agents: call an OpenAI-compatible server on this machine; the policy is the model 'policy'")
    if objective["advantage"] == "gae" and f.config.critic is not None:
        words.append(f"critic: {_critic_words(f, f.config.critic)}")
    return words


@dataclass(frozen=True)
class _Function:
    """A function of the user, as its file has it; it is not imported here."""

    name: str
    file: Path | None
    title: str  # the first line of its docstring
    parameters: Sequence[str] | None  # None: the file has no such `def`

    def keys(self, f: Facts) -> list[str]:
        """The keys of `actor` that it asks for."""
        return [name for name in self.parameters or () if name in type(f.actor).model_fields]

    def formula(self, f: Facts) -> str:
        call = "…" if self.parameters is None else ", ".join(self.parameters)
        return f"loss = {_OUTER[f.objective['aggregation']]} {self.name}({call})ᵢ"

    def words(self, f: Facts) -> list[str]:
        if self.parameters is None:
            return [f"function: {self.name}; its file is not found here, or has no `def {self.name}`"]
        given = [f"actor.{key} {_value(getattr(f.actor, key))}" for key in self.keys(f)]
        return [
            f"function: {self.name} in {self.file}; it computes the ratio, and what is clipped",
            f"keys that it is given: {', '.join(given) or 'none'}",
        ]


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _function_of(f: Facts) -> _Function | None:
    """None for a preset."""
    if not f.objective["of_user"]:
        return None
    name, file = f.objective["name"].rpartition(":")[2], source_file(f.objective["name"])
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(file.read_bytes() if file is not None else b"").body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                title = (ast.get_docstring(node) or "").partition("\n")[0]
                return _Function(name, file, title, [each.arg for each in arguments])
    return _Function(name, file, "", None)


def _entropy_words(f: Facts) -> str:
    coefficient, target = number(f.actor.entropy_coef), f.actor.entropy_target
    if target is None:
        return f"{coefficient} × the policy's entropy is subtracted from the loss"
    return (
        f"α × the policy's entropy is subtracted from the loss; α starts at {coefficient} and follows the target of "
        f"{number(target)} nats per token"
    )


def _critic_words(f: Facts, critic: CriticSection) -> str:
    return (
        f"{critic.path} with a new value head, {f.num_minibatches} updates per batch at "
        f"{number(critic.optimizer.lr or 0)}, values clipped to ±{number(critic.value_eps_clip)} around those at the "
        "start of the batch"
    )


def _advantage_words(f: Facts) -> str:
    chosen, actor = f.objective["advantage"], f.actor
    words = ADVANTAGE_WORDS.get(chosen)
    if words is None:
        words = "reward normalised by actor.reward_norm: " + _norm_words(actor.reward_norm or Norm())
    if f.config.reward.normalize == "each":
        words += ", for each reward apart; their weighted sum is the advantage (GDPO)"
    if chosen == "gae":
        words += f" (γ {actor.discount:g}, λ {actor.gae_lambda:g})"
    if actor.kl_ctl > 0:
        words += f"; {number(actor.kl_ctl)} × the KL to the reference is subtracted from the reward of each token"
        if f.objective["level"] == "sequence":
            words += " (with a sequence ratio: its mean over tokens)"
    if actor.adv_norm is not None:
        words += "; then " + _norm_words(actor.adv_norm)
    return words


def _norm_words(norm: Norm | RewardNorm) -> str:
    mean = {
        None: "no mean subtracted",
        "group": "minus its group's mean",
        "leave1out": "minus its group's mean (without the sample itself)",
        "batch": "minus the batch's mean",
    }
    std = {None: "not divided", "group": "divided by its group's std", "batch": "divided by the batch's std"}
    return f"{mean[norm.mean_level]}, {std[norm.std_level]}"


def _zero_variance_words(f: Facts) -> str:
    chosen = f.actor.zero_variance_groups or "count"
    if f.objective["advantage"] == "gae" and chosen == "count":
        return "treated like other groups: the critic gives their advantages"
    if f.actor.kl_ctl > 0 and chosen == "count":
        return "advantage 0 before the KL penalty; counted in the loss denominator"
    return {
        "count": "no gradient (advantage 0), but counted in the loss denominator",
        "drop": "no gradient (advantage 0), and not counted in the loss denominator",
        "refill": f"resampled, at most {f.actor.max_refills} rounds",
    }[chosen]


def _decisions(f: Facts) -> list[tuple[str, Any]]:
    actor, gate = f.actor, GATES[f.objective["gate"]]
    keys = [
        "importance_sampling_level",
        "loss_aggregation",
        "ppo_n_minibatches",
        "zero_variance_groups",
        "kl_loss_coef",
    ]
    own = _function_of(f)
    keys[1:1] = [setting.key for setting in gate.settings.values() if setting.key] if own is None else own.keys(f)
    keys += ["kl_ctl"] if actor.kl_ctl > 0 else []
    keys += ["discount", "gae_lambda"] if f.objective["advantage"] == "gae" else []
    return [("algorithm", f.config.algorithm), *((f"actor.{key}", getattr(actor, key)) for key in keys)]
