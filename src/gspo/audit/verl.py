"""verl's config (the resolved Hydra config of a run) in our keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.audit.foreign import Draft
from gspo.system import number

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
LOSSES = {"vanilla": "grpo", "gspo": "gspo_token", "sapo": "sapo", "cispo": "cispo", "geo_mean": "gmpo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "token_sum",
}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
PI_OLD = (
    "the trainer's weights at the start of the batch: a forward pass before the first update, for every mini-batch; in "
    "mini-batch 1 the ratio differs from 1 by rounding only"
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "algorithm.use_pf_ppo": (False,),
    "algorithm.kl_ctrl.type": ("fixed",),
    "algorithm.rollout_correction.rollout_rs": (),
    "trainer.critic_warmup": (0,),
}


def from_verl(values: Mapping[str, Any], file: str) -> Draft:
    draft = Draft("verl", file, values)
    draft.copy()
    mode = _loss_mode(draft)
    if draft.unexplained:
        return draft
    if mode not in LOSSES:
        draft.unexplained = f"policy_loss.loss_mode={mode} is not among the objectives of gspo (`gspo objectives`)"
        return draft
    gae = draft.get("algorithm.adv_estimator") == "gae"
    algorithm = "ppo" if gae and mode == "vanilla" else LOSSES[mode]
    draft.set("algorithm", algorithm, "policy_loss.loss_mode")
    draft.set("actor.importance_sampling_level", "sequence" if mode == "gspo" else "token", "policy_loss.loss_mode")
    if draft.count(f"{R}top_k", -1) < 0:  # all tokens: here 0
        draft.unset("gconfig.top_k")
    draft.truncate()
    _clip(draft, mode)
    _aggregation(draft, mode)
    _advantage(draft, gae)
    _kl(draft)
    _batch(draft)
    _pi_old(draft)
    if draft.get("algorithm.filter_groups.enable"):
        draft.set("actor.zero_variance_groups", "refill", "algorithm.filter_groups.enable")
    for name, harmless in OTHERS.items():
        draft.note(name, harmless)
    return draft


def _loss_mode(draft: Draft) -> str:
    """The loss that verl takes: bypass_mode replaces the chosen one (`apply_bypass_mode` of verl)."""
    chosen = str(draft.get(f"{A}policy_loss.loss_mode", "vanilla"))
    if not draft.get(f"{CORRECTION}bypass_mode"):
        return chosen
    if (kind := draft.get(f"{CORRECTION}loss_type", "ppo_clip")) != "ppo_clip":
        draft.unexplained = f"{CORRECTION}loss_type={kind} is not among the objectives of gspo (`gspo objectives`)"
    elif chosen != "vanilla":
        draft.warn(
            f"{A}policy_loss.loss_mode",
            f"policy_loss.loss_mode={chosen} has no effect: with bypass_mode verl takes the clipped token ratios of "
            "PPO, whatever the loss mode is",
            f"set {CORRECTION}bypass_mode=false",
        )
    return "vanilla"


def _clip(draft: Draft, mode: str) -> None:
    plain = draft.number(f"{A}clip_ratio", 0.2)
    low, high = draft.number(f"{A}clip_ratio_low", plain), draft.number(f"{A}clip_ratio_high", plain)
    if mode not in ("vanilla", "gspo"):
        draft.unset("actor.eps_clip", "actor.eps_clip_higher")
        return
    draft.set("actor.eps_clip", low, f"{A}clip_ratio_low")
    draft.set("actor.eps_clip_higher", high, f"{A}clip_ratio_high")
    if mode == "vanilla":
        draft.set("actor.c_clip", draft.number(f"{A}clip_ratio_c", 3.0), f"{A}clip_ratio_c")
    if plain not in (low, high):
        draft.warn(
            f"{A}clip_ratio",
            f"clip_ratio={number(plain)} has no effect: clip_ratio_low={number(low)} and "
            f"clip_ratio_high={number(high)} are set (both are 0.2 by default)",
            f"set {A}clip_ratio_low and {A}clip_ratio_high",
        )


def _aggregation(draft: Draft, mode: str) -> None:
    chosen = str(draft.get(f"{A}loss_agg_mode", "token-mean"))
    if chosen in AGGREGATIONS and mode != "geo_mean":
        draft.set("actor.loss_aggregation", AGGREGATIONS[chosen], f"loss_agg_mode={chosen}")
    if mode == "gspo" and chosen != "seq-mean-token-mean":
        draft.notes.append(f"loss_agg_mode={chosen}: older versions of verl (0.7) take the mean per sequence instead")


def _advantage(draft: Draft, gae: bool) -> None:
    estimator = str(draft.get("algorithm.adv_estimator", "gae"))
    if gae:
        draft.set("critic.path", str(draft.get("critic.model.path", "the critic")), "critic.model.path")
        draft.whiten("algorithm.adv_estimator")
    elif estimator in ("rloo", "rloo_vectorized"):
        draft.normalise("leave1out", None, "algorithm.adv_estimator")
    elif estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        draft.normalise("group" if estimator.endswith("baseline") else None, None, "algorithm.adv_estimator")
        draft.whiten("algorithm.adv_estimator")
    elif estimator == "gdpo":
        draft.notes.append("algorithm.adv_estimator=gdpo: reward.normalize: each; it is shown as grpo's advantage")
    elif estimator not in ("grpo", "grpo_vectorized"):
        draft.notes.append(
            f"algorithm.adv_estimator={estimator} has no counterpart here; it is shown as grpo's advantage"
        )
    elif draft.get("algorithm.norm_adv_by_std_in_grpo", True) is False:
        draft.normalise("group", None, "algorithm.norm_adv_by_std_in_grpo")


def _kl(draft: Draft) -> None:
    model = str(draft.keys.get("actor.path", "the initial model"))
    in_loss, in_reward = draft.get(f"{A}use_kl_loss"), draft.get("algorithm.use_kl_in_reward")
    if in_reward:
        draft.set("actor.kl_ctl", draft.number("algorithm.kl_ctrl.kl_coef", 1e-3), "algorithm.kl_ctrl.kl_coef")
    if in_loss:
        draft.set("actor.kl_loss_coef", draft.number(f"{A}kl_loss_coef", 1e-3), "actor.kl_loss_coef")
    if in_loss or in_reward:
        draft.set("ref.path", model, "actor_rollout_ref.model.path")
        name = f"{A}kl_loss_type" if in_loss else "algorithm.kl_penalty"
        chosen = str(draft.get(name, "low_var_kl" if in_loss else "kl")).rstrip("+")
        if chosen in ESTIMATORS:
            draft.set("actor.kl_estimator", ESTIMATORS[chosen], name)
        else:
            draft.notes.append(f"{name}={chosen} has no counterpart here; the KL is shown with the default estimator")


def _batch(draft: Draft) -> None:
    prompts = draft.count("data.train_batch_size", 1024)
    part = min(draft.count(f"{A}ppo_mini_batch_size", 256), prompts)
    names = ("data.train_batch_size", "data.train_batch_size / ppo_mini_batch_size", "ppo_epochs")
    draft.batches(prompts, max(1, prompts // max(part, 1)), draft.count(f"{A}ppo_epochs", 1), names)
    if prompts % part:
        draft.notes.append(f"train_batch_size={prompts} is not a multiple of ppo_mini_batch_size={part}")
    if (steps := draft.count("trainer.total_training_steps", 0)) > 0:
        draft.set("total_train_steps", steps, "trainer.total_training_steps")


def _pi_old(draft: Draft) -> None:
    if draft.get(f"{CORRECTION}bypass_mode"):
        draft.set("actor.prox_logp_method", "rollout", f"{CORRECTION}bypass_mode")
        draft.pi_old = "the sampler's log-probs (bypass_mode): the ratio is not 1 before the first update"
        return
    draft.set("actor.prox_logp_method", "recompute", "π_old is the trainer's")
    draft.pi_old = PI_OLD if draft.num_updates > 1 else ""
    level = draft.get(f"{CORRECTION}rollout_is")
    if level in ("token", "sequence"):
        upper = draft.number(f"{CORRECTION}rollout_is_threshold", 2.0)
        draft.correct(level, "clamp", upper, f"{CORRECTION}rollout_is")
