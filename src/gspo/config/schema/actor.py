"""`actor`: the policy, its objective and its trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le

from gspo.config.schema.key import Section, key
from gspo.config.schema.optimizer import MicroBatch, Optimizer


class Norm(Section):
    mean_level: Literal["batch", "group"] | None = key(None, "Subtract the mean over this set; null: none.")
    mean_leave1out: bool = key(False, "Leave the sample itself out of its mean.")
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std over this set; null: none.")
    std_unbiased: bool = key(True, "Divide by n − 1 in the variance.")
    eps: float = key(0.0, "Added to the std.", low=0.0)


class Correction(Section):
    preset: Literal["tis", "mis", "icepop", "sequence_mask", "geometric"] | None = key(
        None, "A named correction; the other keys override its values."
    )
    level: Literal["token", "sequence"] = key("token", "Judge each token, or each sequence.")
    action: Literal["mask", "clamp"] = key("mask", "Outside the bounds: drop, or truncate the weight.")
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = key("ratio", "What is compared with the bounds.")
    agg: Literal["mean", "sum", "max"] = key("mean", "From tokens to a sequence; for ratio in log space.")
    upper: float | None = key(5.0, "Upper bound; null: none.")
    lower: float | None = key(None, "Lower bound; null: none.")
    only_negative: bool = key(False, "Drop only sequences with a negative advantage.")


class AutoClip(Section):
    target_fraction: float = key(0.15, "Share of sequences to clip that eps_clip: auto steers to.", above=0.0, high=0.9)
    high_over_low: float = key(4.0 / 3.0, "eps_high / eps_low, kept fixed.", above=0.0)
    decay: float = key(0.8, "Weight of the past in the exponential average of quantiles.", low=0.0, high=0.999)
    eps_max: float = key(0.2, "Hard upper bound of both.", above=0.0, high=1.0)


class Sharding(Section):
    param_dtype: Literal["bfloat16", "float16"] | None = key(
        None, "What layers compute in, of weights kept as actor.dtype (float32, say).", unset="actor.dtype"
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "What gradients are summed over ranks in.", unset="float32, or the weights' type where that is wider"
    )


class Actor(Section):
    path: str = key(
        "embedded:tiny",
        "Model: embedded:tiny, embedded:tiny-moe, embedded:tiny-tools, smollm2-135m, a folder, a hub name, or a .gguf "
        "file.",
    )
    backend: str = key("auto", 'Trainer: auto, "fsdp:d4". auto: one rank where there is no CUDA.')
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto", "Type of the weights; auto: bfloat16 on CUDA, float32 elsewhere."
    )
    fsdp: Sharding = key(Sharding, "Mixed precision on several ranks, for the actor, ref and critic.")
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")
    init_from_scratch: bool = key(False, "Random weights in the model's architecture.")
    fp32_lm_head: bool | None = key(None, "Compute the LM head in float32.", unset="yes for sequence ratios")
    logprobs_chunk_size: int = key(256, "Positions per chunk of the LM head; bounds memory.", low=1)
    share_prefix: bool = key(True, "Compute a group's prompt once for its completions.")
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches of the actor, ref and critic.")
    optimizer: Optimizer = key(Optimizer, "Optimizer and its schedule.")
    weight_update_mode: Literal["auto", "disk", "shm", "broadcast"] = key(
        "auto",
        "How weights reach sampler servers: shm (this machine's memory), disk (the run directory, on a shared file "
        "system), broadcast (from memory to memory by gloo, on a network that you trust; AReaL's nccl); auto: shm "
        "where all servers are on this machine and it has room, else disk.",
    )
    use_lora: bool = key(False, "Train a low-rank adapter (peft) instead of all weights.")
    lora_rank: int = key(32, "Rank of the adapter.", low=1)
    lora_alpha: int = key(16, "Scale of the adapter: lora_alpha / lora_rank multiplies it.", low=1)
    target_modules: list[str] = key(
        ["all-linear"], "Layers that get an adapter, by the ends of their names; [all-linear]: all but the head."
    )

    importance_sampling_level: Literal["token", "sequence"] | None = key(
        None,
        "Ratio per token (PPO, GRPO) or per sequence (GSPO). It brings clip and aggregation.",
        unset="the algorithm's",
    )
    eps_clip: Annotated[float, Gt(0.0), Le(1.0)] | Literal["auto"] | None = key(
        None, "Lower clip range ε_low, or auto.", unset="the level's or algorithm's"
    )
    eps_clip_higher: float | None = key(
        None, "Upper clip range ε_high.", unset="eps_clip where that is set, else the algorithm's", above=0.0
    )
    eps_clip_auto: AutoClip = key(AutoClip, "Settings of eps_clip: auto.")
    c_clip: float | None = key(None, "Dual clip: bounds the ratio for A < 0; above 1; null: off.", above=1.0)
    loss_aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "token_sum"] | None = key(
        None, "How tokens and sequences are summed.", unset="the level's or algorithm's"
    )
    ppo_n_minibatches: int | None = key(
        None, "Optimizer updates per rollout batch (not micro-batches).", unset="the algorithm's", low=1
    )
    zero_variance_groups: Literal["count", "drop", "refill"] | None = key(
        None, "Groups of equal rewards: stay in the denominator, leave it, or are resampled.", unset="the algorithm's"
    )
    max_refills: int = key(8, "Refill rounds per step before giving up.", low=1)
    cispo_weight_max: float = key(5.0, "Bound of the CISPO weight.", above=0.0)
    gmpo_log_clip: float = key(0.4, "Band of GMPO's token log-ratios.", above=0.0)
    sapo_tau_pos: float = key(1.0, "SAPO temperature for A > 0.", above=0.0)
    sapo_tau_neg: float = key(1.05, "SAPO temperature for A ≤ 0.", above=0.0)

    prox_logp_method: Literal["auto", "recompute", "rollout", "loglinear"] | None = key(
        None,
        "Where π_old comes from: the trainer, the sampler, or interpolation.",
        unset="auto, the trainer, or the sampler where its noise was measured to be far below the clip range",
    )
    prox_logp_recenter: bool = key(
        False,
        "With prox_logp_method rollout: take the sampler's mean error per token off π_old of mini-batches 2…K. "
        "Mini-batch 1 measures it, and is its own π_old.",
    )
    prox_logp_force: bool = key(
        False, "With prox_logp_method rollout: train even where the sampler's noise is above the clip range."
    )
    routing_replay: Literal["none", "proximal", "rollout"] = key(
        "none",
        "Experts of a mixture's training passes: each router's own, those of π_old's forward, or the sampler's. "
        "GSPO needs none; see docs/moe.md.",
    )
    use_decoupled_loss: bool = key(False, "Weigh by π_old/μ (behavior correction) beside the policy ratio.")
    rejection_sampling: Correction | None = key(None, "Behavior correction: bounds on π_old/μ.")

    kl_loss_coef: float = key(0.0, "Weight of KL(π_θ‖π_ref) in the loss; above 0 needs ref.", low=0.0)
    kl_ctl: float = key(0.0, "Weight of the KL penalty in the reward, as in AReaL; above 0 needs ref.", low=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] | None = key(
        None, "KL estimator.", unset="k3 in the loss, k1 in the reward"
    )

    reward_bias: float = key(0.0, "Added to every reward, before scaling.")
    reward_scaling: float = key(1.0, "Multiplies every reward, after the bias.")
    reward_clip: float = key(20.0, "Rewards are clipped to ± this, after scaling.", above=0.0)
    reward_norm: Norm | None = key(None, "Normalisation of rewards.", unset="the algorithm's advantage")
    adv_norm: Norm | None = key(None, "Normalisation of advantages after GAE; null: none.")
    discount: float = key(1.0, "γ of GAE.", low=0.0, high=1.0)
    gae_lambda: float = key(1.0, "λ of GAE.", low=0.0, high=1.0)
    overlong_reward_penalty: bool | None = key(
        None, "Penalise completions near max_new_tokens.", unset="the algorithm's"
    )
    overlong_tokens: int | None = key(None, "Length of the penalised tail.", unset="a fifth of max_new_tokens", low=1)
    overlong_penalty_factor: float = key(1.0, "Largest overlong penalty.", low=0.0)
    mask_no_eos_with_zero: bool = key(False, "Truncated completions get advantage 0.")

    max_nonfinite_updates: int = key(3, "Non-finite updates in a row that end the run.", low=1)
    sequence_unit: Literal["trajectory", "turn"] = key(
        "trajectory", "What of an episode has one sequence ratio, clip and |y|: all its turns together, or each turn."
    )
