"""TRL's GRPOConfig, and ms-swift's arguments of GRPO (which are TRL's with additions), in our keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.algorithms import ALGORITHMS
from gspo.audit.foreign import Draft
from gspo.system import number

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "token_sum",
    "luspo": "sequence_sum",
}
CLIPPED = frozenset({"grpo", "bnpo", "dapo", "dr_grpo", "luspo"})  # loss types with the clip range of PPO
PI_OLD = (
    "the trainer's weights at the start of the batch: a forward pass before the first update, for every mini-batch; in "
    "mini-batch 1 the ratio differs from 1 by rounding only"
)
# Settings of the loss without a key here, and the values that turn them off.
OTHERS: dict[str, tuple[Any, ...]] = {
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "repetition_penalty": (1.0,),
    "async_generate": (False,),
    "overlong_filter": (False,),
    "off_policy_sequence_mask_delta": (),
}


def from_trl(values: Mapping[str, Any], file: str) -> Draft:
    draft = Draft("TRL", file, values)
    _translate(draft)
    _own_objective(draft)
    draft.notes.append(
        "TRL differs from the paper: advantages are divided by std + 1e-4, and a completion without trained tokens "
        "counts in the denominator"
    )
    mode, upper = draft.get("vllm_importance_sampling_mode"), draft.get("vllm_importance_sampling_clip_max")
    if draft.get("use_vllm") and draft.get("vllm_importance_sampling_correction") and isinstance(mode, str):
        _correct(draft, mode, "vllm_importance_sampling_mode", upper)
    return draft


def _own_objective(draft: Draft) -> None:
    """What gspo.trl.GSPOConfig adds."""
    name = draft.get("objective")
    if isinstance(name, str) and name in ALGORITHMS:
        preset = ALGORITHMS[name]
        draft.set("algorithm", name, "objective")
        draft.set("actor.importance_sampling_level", preset.level.partition("_")[0], "objective")
        draft.set("actor.loss_aggregation", preset.aggregation, "objective")
    elif isinstance(name, str):
        draft.unexplained = f"objective={name} is a function of the user"
    if draft.get("per_turn"):
        draft.set("actor.sequence_unit", "turn", "per_turn")
    for setting in ("correction", "objective_settings"):
        draft.note(setting, ())


def from_swift(values: Mapping[str, Any], file: str) -> Draft:
    """ms-swift's args.json. Unset values get the defaults that ms-swift computes after it has written the file."""
    estimator = str(values.get("advantage_estimator") or "grpo")
    scale = {"rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator, "group")
    known = {name: value for name, value in values.items() if value is not None}
    draft = Draft("ms-swift", file, {"scale_rewards": scale, "loss_type": "grpo", "beta": 0.04} | known)
    _translate(draft)
    draft.unset("actor.sapo_tau_pos", "actor.sapo_tau_neg")
    for side in ("pos", "neg") if draft.get("loss_type") == "sapo" else ():
        draft.set(f"actor.sapo_tau_{side}", draft.number(f"tau_{side}", 1.0), f"tau_{side}")
    if estimator == "rloo":
        draft.normalise("leave1out", None, "advantage_estimator")
    elif estimator == "reinforce_plus_plus":
        draft.normalise("batch", "batch", "advantage_estimator")
    if draft.get("kl_in_reward", estimator != "grpo") and "actor.kl_loss_coef" in draft.keys:
        draft.set("actor.kl_ctl", draft.keys["actor.kl_loss_coef"], "beta with kl_in_reward")
        draft.unset("actor.kl_loss_coef")
    if draft.get("dynamic_sample"):
        draft.set("actor.zero_variance_groups", "refill", "dynamic_sample")
    if isinstance(mode := draft.get("rollout_importance_sampling_mode"), str):
        upper = draft.get("rollout_importance_sampling_threshold")
        _correct(draft, mode, "rollout_importance_sampling_mode", upper)
    return draft


def num_updates(draft: Draft) -> tuple[int, int]:
    """(mini-batches per pass, passes) of a rollout batch: both systems count micro-batches, not updates."""
    accumulated = draft.count("gradient_accumulation_steps", 1)
    micro = draft.count("steps_per_generation", accumulated)
    return max(1, round(micro / accumulated)), draft.count("num_iterations", 1)


def _translate(draft: Draft) -> None:
    loss, level = str(draft.get("loss_type", "dapo")), str(draft.get("importance_sampling_level", "token"))
    draft.copy(names_of="TRL")
    draft.truncate()
    if loss not in AGGREGATIONS:
        draft.unexplained = f"loss_type={loss} is not among the objectives of gspo (`gspo objectives`)"
        return
    by_level = {"token": "grpo", "sequence": "gspo", "sequence_token": "gspo_token"}.get(level, "grpo")
    named = loss in ("cispo", "sapo", "luspo")
    draft.set("algorithm", loss if named else by_level, "loss_type" if named else "importance_sampling_level")
    draft.set("actor.importance_sampling_level", level.partition("_")[0], "importance_sampling_level")
    draft.set("actor.loss_aggregation", AGGREGATIONS[loss], f"loss_type={loss}")
    _gate(draft, loss)
    scale = str(draft.get("scale_rewards", "group"))
    scale = {"True": "group", "False": "none"}.get(scale, scale)
    if scale in ("batch", "none"):
        draft.normalise("group", "batch" if scale == "batch" else None, f"scale_rewards={scale}")
    if (beta := draft.number("beta", 0.0)) > 0:
        draft.set("actor.kl_loss_coef", beta, "beta")
        draft.set("ref.path", str(draft.keys.get("actor.path", "the initial model")), "beta")
        draft.note("use_bias_correction_kl", (False,))
    if draft.get("mask_truncated_completions"):
        draft.set("actor.mask_no_eos_with_zero", True, "mask_truncated_completions")
    for name, harmless in OTHERS.items():
        draft.note(name, harmless)
    if loss == "bnpo":
        draft.notes.append("bnpo divides by the tokens of each micro-batch, not of the update: its size matters")
    _batch(draft)


def _gate(draft: Draft, loss: str) -> None:
    """The clip range, or what replaces it."""
    if loss in CLIPPED:
        if draft.get("epsilon_high") is None and "actor.eps_clip" in draft.keys:
            draft.set("actor.eps_clip_higher", draft.keys["actor.eps_clip"], "epsilon, because epsilon_high is unset")
        if isinstance(bound := draft.get("delta"), int | float):
            # TRL limits the ratio before it clips it: below 1 + ε_high, delta is the upper bound for A > 0, and
            # 1 + ε_high is that for A < 0.
            high = draft.keys.get("actor.eps_clip_higher", 0.2)
            draft.set("actor.c_clip", max(bound, 1 + high), "delta")
            if 1 < bound < 1 + high:
                draft.set("actor.eps_clip_higher", bound - 1, "delta")
        return
    draft.unset("actor.eps_clip", "actor.eps_clip_higher")
    # epsilon_high is the bound of the weight itself here, not a distance from 1.
    bound = draft.number("epsilon_high", draft.number("epsilon", 0.2))
    if loss == "cispo" and bound != 5:
        draft.notes.append(
            f"the weight is at most epsilon_high={number(bound)} here; the formula shows gspo's bound, 5"
        )
    if loss == "cispo" and bound <= 1:
        draft.warn(
            "epsilon_high",
            f"with loss_type=cispo the weight is min(ratio, epsilon_high), so {number(bound)} makes every weight about "
            f"{number(bound)} and the gradient {1 / max(bound, 1e-9):.2g} times smaller",
            "set epsilon_high=5.0",
        )


def _batch(draft: Draft) -> None:
    group, accumulated = draft.count("num_generations", 8), draft.count("gradient_accumulation_steps", 1)
    micro = draft.count("steps_per_generation", accumulated)
    device = draft.count("per_device_train_batch_size", 8)
    ranks = draft.count("world_size", draft.count("global_world_size", 1))
    completions = draft.count("generation_batch_size", device * ranks * micro)
    minibatches, epochs = num_updates(draft)
    draft.batches(
        max(1, completions // group),
        minibatches,
        epochs,
        (
            "generation_batch_size / num_generations",
            "steps_per_generation / gradient_accumulation_steps",
            "num_iterations",
        ),
    )
    if micro % accumulated and accumulated % micro:
        draft.notes.append(
            f"steps_per_generation={micro} is not a multiple of gradient_accumulation_steps={accumulated}: an update "
            "mixes two rollout batches"
        )
    if (steps := draft.count("max_steps", -1, least=-1)) > 0:
        draft.set("total_train_steps", max(1, steps // draft.num_updates), "max_steps / updates per rollout batch")
    draft.set("actor.prox_logp_method", "recompute", "π_old is the trainer's")
    draft.pi_old = PI_OLD if draft.num_updates > 1 else ""


def _correct(draft: Draft, mode: str, theirs: str, upper: Any) -> None:
    level, _, action = mode.partition("_")
    if level in ("token", "sequence") and action in ("truncate", "mask"):
        bound = float(upper) if isinstance(upper, int | float) else 2.0
        draft.correct(level, {"truncate": "clamp", "mask": "mask"}[action], bound, theirs)
