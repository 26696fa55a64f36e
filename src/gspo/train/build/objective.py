"""The objective: loss, advantages, reward shaping, and where π_old comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.algorithms import clip_range_of
from gspo.config import Loaded, effective_objective, is_supervised
from gspo.config.schema import Config, Norm, RewardNorm
from gspo.learner.credit import Credit, Shaping
from gspo.learner.proximal import AutoClip, ProximalSource
from gspo.learner.step import Plan
from gspo.system.imports import by_name


def make_plan(loaded: Loaded, own: Any = None) -> Plan:
    """The settings that all updates share. `own`: the function of the user, if it was found already."""
    config, actor, preset = loaded.config, loaded.config.actor, effective_objective(loaded)
    if own is None and preset["of_user"]:
        own = by_name("gspo.train.build.own_objective:find_objective")(loaded)
    return Plan(
        name=preset["name"],
        settings=preset["settings"] if own is None else own.settings,
        function=None if own is None else own.function,
        num_minibatches=actor.ppo_n_minibatches or 1,
        num_epochs=actor.ppo_epochs,
        seed=config.seed,
        # The likelihood of given completions is that of the model itself; gconfig is for evaluations.
        temperature=1.0 if is_supervised(config) else temperature(config),
        max_tokens=actor.mb_spec.max_tokens_per_mb,
        max_norm=actor.optimizer.gradient_clipping,
        max_new_tokens=config.gconfig.max_new_tokens,
        # A sequence with advantage 0 still has an entropy and a KL to the reference or the teacher.
        skip_zero_advantage=(own is None or own.skips_zero)
        and not (actor.kl_loss_coef or actor.entropy_coef or (config.teacher and config.teacher.exact_kl is not None)),
        routing_replay=actor.routing_replay,
        sequence_unit=actor.sequence_unit,
    )


def first_proximal_source(config: Config) -> ProximalSource:
    """Where π_old of mini-batches 2…K comes from in the first step; `auto` starts with `recompute` and measures."""
    method = config.actor.prox_logp_method
    return method if method in ("rollout", "loglinear") else "recompute"


def narrowest_clip(config: Config, settings: Mapping[str, Any]) -> float | None:
    """The ε that the sampler's noise is compared with; None if the objective does not clip.

    With `eps_clip: auto` it is the widest range that auto may choose, because auto stays above the noise by itself.
    """
    names = clip_range_of(settings)
    if names is None:
        return None
    if config.actor.eps_clip == "auto":
        return AutoClip.eps_max / AutoClip.high_over_low
    return min(settings[name] for name in names)


def temperature(config: Config) -> float:
    return config.gconfig.temperature or 1.0


def assembly(loaded: Loaded) -> dict[str, Any]:
    """How rewards become advantages per sequence: keywords of `learner.credit.batch_with_advantages`."""
    config, actor = loaded.config, loaded.config.actor
    if is_supervised(config):
        return {"norm": "one", "shaping": Shaping()}
    norm = effective_objective(loaded)["advantage"] if actor.reward_norm is None else norm_settings(actor.reward_norm)
    if effective_objective(loaded)["advantage"] == "teacher":
        # A reward that the user configured is added to the teacher's advantage; the default of a task is only shown.
        norm = "teacher" if not config.reward.functions else norm if actor.reward_norm is not None else "group_std"
    how = {"norm": norm, "shaping": make_shaping(config), "zero_variance": actor.zero_variance_groups or "count"}
    how["turn_discount"] = config.env.turn_discount
    return how if make_credit(loaded) is not None else how | _last(config)


def make_credit(loaded: Loaded) -> Credit | None:
    """How advantages differ between tokens of a sequence; None if they do not."""
    actor, by_critic = loaded.config.actor, effective_objective(loaded)["advantage"] == "gae"
    if not (actor.kl_ctl or by_critic):
        return None
    return Credit(
        kl_coef=actor.kl_ctl,
        kl_estimator=actor.kl_estimator or "k1",
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
        **_last(loaded.config),
    )


def _last(config: Config) -> dict[str, Any]:
    """The last transformations of advantages, for sequences and for tokens alike."""
    norm = config.actor.adv_norm
    return {
        "adv_norm": None if norm is None else norm_settings(norm),
        "truncated_is_zero": config.actor.mask_no_eos_with_zero,
    }


def norm_settings(norm: Norm | RewardNorm) -> dict[str, Any]:
    leave_one_out = norm.mean_level == "leave1out"
    return {
        "mean_level": "group" if leave_one_out else norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": leave_one_out,
    }


def make_shaping(config: Config) -> Shaping:
    actor, longest = config.actor, config.gconfig.max_new_tokens
    tail = (actor.overlong_tokens or max(longest // 5, 1)) if actor.overlong_reward_penalty else 0
    return Shaping(
        bias=actor.reward_bias,
        scaling=actor.reward_scaling,
        clip=actor.reward_clip,
        overlong_tokens=tail,
        overlong_factor=float(actor.overlong_reward_penalty or 0),
        max_new_tokens=longest,
        normalize_each=config.reward.normalize == "each",
    )
