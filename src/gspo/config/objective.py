"""The objective that a resolved config trains with: ratio level, clip range, advantage, π_old and its correction."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from gspo.algorithms import ALGORITHMS, CORRECTIONS, GATES, LEVEL_DEFAULTS, Algorithm, algorithm_of
from gspo.config.loaded import Loaded
from gspo.config.schema import Config, Correction, RewardNorm
from gspo.system.text import number


class ProximalPolicy(NamedTuple):
    """Where π_old comes from, and whether the loss is multiplied by π_old/μ."""

    method: str  # auto, recompute, rollout or loglinear
    corrected: bool


def proximal_policy(use_decoupled_loss: bool, prox_logp_method: str | None) -> ProximalPolicy:
    """The table of docs/config.md.

    >>> proximal_policy(use_decoupled_loss=True, prox_logp_method=None)
    ProximalPolicy(method='recompute', corrected=True)
    """
    if prox_logp_method in (None, "auto"):
        return ProximalPolicy("recompute" if use_decoupled_loss else "auto", use_decoupled_loss)
    # With π_old from the sampler π_old is μ, so the weight is 1.
    return ProximalPolicy(str(prox_logp_method), use_decoupled_loss and prox_logp_method != "rollout")


class ObjectiveSettings(TypedDict):
    """The objective of a run; `gspo.objectives.loss(name, …, **settings)` accepts name and settings as they are."""

    name: str
    level: str  # token, sequence or sequence_token
    gate: str
    advantage: str  # the algorithm's, or the name of what actor.reward_norm computes; "reward_norm" if it has no name
    aggregation: str
    settings: dict[str, Any]
    eps_auto: bool  # eps_clip: auto; the run replaces clip_low and clip_high in every step
    proximal: str  # auto, recompute, rollout or loglinear
    corrected: bool  # the loss is multiplied by π_old/μ
    of_user: bool  # name is a function; level, gate and their settings are defaults that it may not use


def effective_objective(loaded: Loaded) -> ObjectiveSettings:
    """The objective of a resolved config.

    >>> from gspo.config import load
    >>> effective_objective(load(None, ["algorithm=gspo"]))["settings"]["clip_high"]
    0.0004
    """
    config, actor = loaded.config, loaded.config.actor
    algorithm = algorithm_in(config)
    gate = GATES[algorithm.gate]
    level = level_of(algorithm, actor.importance_sampling_level)
    settings: dict[str, Any] = {"level": level, "aggregation": actor.loss_aggregation}
    low, high = default_clip_range(algorithm, level)
    # Each gate has its own settings; the loss function accepts only those of its gate.
    auto = gate.has_range and actor.eps_clip == "auto"
    adjusted = {"clip_low": low, "clip_high": high} if auto else {}
    for name, setting in gate.settings.items():
        own = getattr(actor, setting.key) if setting.key else setting.default
        settings[name] = adjusted.get(name, own)
    proximal = proximal_policy(actor.use_decoupled_loss, actor.prox_logp_method)
    settings["kl_coef"] = actor.kl_loss_coef
    settings["kl_estimator"] = actor.kl_estimator or "k3"
    settings["entropy_coef"] = actor.entropy_coef
    # Without π_old/μ in the loss there is nothing to limit.
    settings["correction"] = _correction_settings(actor.rejection_sampling, level) if proximal.corrected else None
    if actor.loss_aggregation == "token_sum":
        settings["max_new_tokens"] = config.gconfig.max_new_tokens
    return ObjectiveSettings(
        name=algorithm.name,
        level=level,
        gate=algorithm.gate,
        advantage=_advantage(algorithm, actor.reward_norm),
        aggregation=str(actor.loss_aggregation),
        settings=settings,
        eps_auto=auto,
        proximal=proximal.method,
        corrected=proximal.corrected,
        of_user=algorithm.of_user,
    )


def same_as(objective: ObjectiveSettings) -> str | None:
    """The preset with exactly these parts: grpo with level sequence is gspo."""
    if objective["of_user"]:
        return None
    for algorithm in ALGORITHMS.values():
        if all(getattr(algorithm, part) == objective[part] for part in ("level", "gate", "advantage", "aggregation")):
            return algorithm.name
    return None


def objective_words(loaded: Loaded) -> str:
    """The objective in one line, for the first line of a run.

    >>> from gspo.config import load
    >>> objective_words(load(None, ["algorithm=gspo", "actor.ppo_n_minibatches=2"]))
    'GSPO (one ratio per completion), clip 3e-4/4e-4, 2 updates per batch'
    """
    objective, updates = (
        effective_objective(loaded),
        (loaded.config.actor.ppo_n_minibatches or 1) * loaded.config.actor.ppo_epochs,
    )
    settings, name = objective["settings"], same_as(objective) or objective["name"]
    if is_supervised(loaded.config):
        return f"{name.upper()} (likelihood of the data's completions), {updates} update{'s' * (updates > 1)} per batch"
    if algorithm_in(loaded.config).of_user:
        return f"{objective['name']} (an objective of your own), {updates} update{'s' * (updates > 1)} per batch"
    ratio = "one ratio per token" if objective["level"] == "token" else "one ratio per completion"
    parts = [f"{name.upper()} ({ratio})"]
    if objective["eps_auto"]:
        parts.append("automatic clip range")
    elif GATES[objective["gate"]].has_range:
        parts.append(f"clip {number(settings['clip_low'])}/{number(settings['clip_high'])}")
    return ", ".join([*parts, f"{updates} update{'s' * (updates > 1)} per batch"])


def algorithm_in(config: Config) -> Algorithm:
    """The algorithm of a resolved config."""
    return algorithm_of(config.algorithm, has_critic=config.critic is not None)


def is_supervised(config: Config) -> bool:
    """Whether completions come from the data set; nothing is sampled for training."""
    return algorithm_in(config).supervised


def default_algorithm_note(loaded: Loaded) -> str | None:
    """A note for configs that leave the algorithm to the default, which is AReaL's and not GSPO."""
    if loaded.is_set("algorithm") or loaded.is_set("actor.importance_sampling_level"):
        return None
    return f"algorithm is not set, so it is {loaded.config.algorithm}; set algorithm: gspo to train with GSPO"


def level_of(algorithm: Algorithm, chosen: str | None) -> str:
    """The ratio level of an algorithm with `actor.importance_sampling_level`.

    The key has two values; `sequence` does not change the level sequence_token of gspo_token. With GAE and a teacher,
    `sequence` means sequence_token: a ratio per sequence that keeps the advantage of each token.
    """
    own = "token" if algorithm.level == "token" else "sequence"
    if chosen in (None, own):
        return algorithm.level
    by_token = algorithm.advantage in ("gae", "teacher")
    return "sequence_token" if chosen == "sequence" and by_token else str(chosen)


def default_clip_range(algorithm: Algorithm, level: str) -> tuple[float | None, float | None]:
    """The default (ε_low, ε_high) of an algorithm at a level."""
    source = algorithm.settings if level == algorithm.level else LEVEL_DEFAULTS[level]
    return source.get("clip_low"), source.get("clip_high")


def _correction_settings(correction: Correction | None, level: str) -> dict[str, Any]:
    # Without actor.rejection_sampling the weight is π_old/μ without bounds. At sequence level it is the geometric mean
    # over tokens, like the ratio; a product of token ratios shrinks with length.
    own = "token" if level == "token" else "sequence"
    form = correction if correction is not None else Correction(level=own, action="clamp", upper=None)
    # resolve has copied the values of a preset to the keys; `only_negative` is not a key.
    only_negative = CORRECTIONS.get(form.preset or "", {}).get("only_negative", False)
    return {**form.model_dump(exclude={"preset"}), "only_negative": only_negative}


_NAMED_NORMS = {
    "group_std": {"mean_level": "group", "std_level": "group"},
    "group_mean": {"mean_level": "group", "std_level": None},
    "leave_one_out": {"mean_level": "leave1out", "std_level": None},
    "batch": {"mean_level": "batch", "std_level": "batch"},
}


def _advantage(algorithm: Algorithm, norm: RewardNorm | None) -> str:
    if norm is None or algorithm.advantage in ("gae", "teacher"):
        return algorithm.advantage
    # A known norm is shown by its name.
    return next((name for name, named in _NAMED_NORMS.items() if norm.model_dump() == named), "reward_norm")
