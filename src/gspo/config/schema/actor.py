"""`actor`: the policy, its objective and its trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from gspo.algorithms import GATES
from gspo.config.schema.key import Section, key
from gspo.config.schema.optimizer import MicroBatch, Optimizer


def gate_key(gate: str, name: str, doc: str) -> Any:
    """The key of a gate's setting, with its default and bound."""
    setting = GATES[gate].settings[name]
    return key(setting.default, doc, above=setting.above)


class Norm(Section):
    mean_level: Literal["batch", "group"] | None = key(None, "Subtract the mean of the group or batch; null: none.")
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std of the group or batch; null: none.")


class RewardNorm(Section):
    mean_level: Literal["batch", "group", "leave1out"] | None = key(
        None, "Subtract the mean of the batch, of the group, or of the group's other samples (leave1out); null: none."
    )
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std of the group or batch; null: none.")


class Correction(Section):
    preset: Literal["tis", "mis", "seq_tis", "icepop", "sequence_mask", "geometric"] | None = key(
        None, "Preset values for the keys below. Keys that you set override it."
    )
    level: Literal["token", "sequence"] = key("token", "Compare each token, or each sequence, with the bounds.")
    action: Literal["mask", "clamp"] = key(
        "mask", "Outside the bounds: drop it (mask), or truncate the weight (clamp)."
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = key("ratio", "The quantity that is compared with the bounds.")
    upper: float | None = key(5.0, "Upper bound; null: none.")
    lower: float | None = key(None, "Lower bound; null: none.")
    agg: Literal["mean", "sum", "max", "product"] = key(
        "mean",
        "How tokens are reduced to a sequence. The ratio is reduced in log space. With mean, sum and max the weight of "
        "a sequence is the geometric mean of its token ratios; with product it is their product.",
    )


class Sharding(Section):
    param_dtype: Literal["bfloat16", "float16"] | None = key(
        None,
        "Data type of the computation, if the weights have a wider actor.dtype such as float32.",
        unset="actor.dtype",
    )


class Actor(Section):
    # The model and how it is trained.
    path: str = key(
        "embedded:tiny",
        "Model: embedded:tiny, embedded:tiny-{moe,tools,control,hybrid,chains,vision}, smollm2-135m, a folder, a hub "
        "name, or a .gguf file; with `gspo train` also a run directory, whose best checkpoint is exported and used.",
    )
    optimizer: Optimizer = key(Optimizer, "Optimizer and its schedule.")
    ppo_n_minibatches: int | None = key(
        None, "Optimizer updates (mini-batches) per rollout batch.", unset="the algorithm's", low=1
    )
    ppo_epochs: int = key(
        1,
        "Passes over each rollout batch. Each makes ppo_n_minibatches updates with the same samples and π_old; "
        "later passes take the mini-batches in another order. The critic makes one pass.",
        low=1,
    )
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches of the actor, ref and critic.")
    backend: str = key(
        "auto", 'Trainer: auto, "fsdp:d4", or local, which is fsdp:d1. With auto and no CUDA, one rank trains.'
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto", "Data type of the weights. auto: bfloat16 on CUDA, otherwise float32."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")
    use_lora: bool = key(False, "Train a LoRA adapter (peft) instead of all weights.")
    lora_rank: int = key(32, "Rank of the adapter.", low=1)
    lora_alpha: int = key(16, "Scale of the adapter: it is multiplied by lora_alpha / lora_rank.", low=1)
    target_modules: list[str] = key(
        ["all-linear"],
        "Layers with an adapter, by the last part of their names. [all-linear]: all except the LM head. In a "
        "vision-language model both mean the language part; `vision` adds the linear layers of the vision tower. In a "
        "mixture, `experts` adds the experts, each with an adapter of its own: [all-linear, experts].",
    )
    lora_base_bits: Literal[8, 4] | None = key(
        None,
        "With use_lora: store the frozen linear layers in 8 or 4 bits (QLoRA; 4 needs bitsandbytes), for sampler and "
        "trainer (docs/memory.md).",
        unset="in actor.dtype",
    )
    freeze_vision: bool | None = key(
        None,
        "true: do not train the vision tower of a vision-language model. The features of an image are then computed "
        "once and used by the sampler and in every pass of the trainer. true or false loads a model that can also be "
        "loaded without its tower (Qwen3.5) with it.",
        unset="false; Qwen3.5 is loaded without its tower, for text",
    )

    # The objective.
    importance_sampling_level: Literal["token", "sequence"] | None = key(
        None,
        "Importance ratio per token (PPO, GRPO) or per sequence (GSPO). It also sets the defaults of the clip range "
        "and the aggregation.",
        unset="the algorithm's",
    )
    eps_clip: Annotated[float, Gt(0.0), Le(1.0)] | Literal["auto"] | None = key(
        None,
        "Lower clip range ε_low; auto: both bounds follow the run, so that 5 % of the sequences are clipped.",
        unset="the level's or algorithm's",
    )
    eps_clip_higher: float | None = key(
        None, "Upper clip range ε_high.", unset="eps_clip if that is set, otherwise the algorithm's", above=0.0
    )
    loss_aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "token_sum"] | None = key(
        None, "How the loss is averaged over tokens and sequences.", unset="the level's or algorithm's"
    )
    zero_variance_groups: Literal["count", "drop", "refill"] | None = key(
        None,
        "Groups with equal rewards: count them in the denominator, drop them, or sample others instead (refill).",
        unset="the algorithm's",
    )
    max_refills: int = key(8, "Maximum number of refill rounds per step.", low=1)
    kl_loss_coef: float = key(0.0, "Coefficient of KL(π_θ‖π_ref) in the loss. Above 0, ref must be set.", low=0.0)
    kl_ctl: float = key(
        0.0, "Coefficient of the KL penalty in the reward, as in AReaL. Above 0, ref must be set.", low=0.0
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = key(
        None, "KL estimator.", unset="k3 in the loss, k1 in the reward"
    )
    entropy_coef: float = key(
        0.0,
        "Coefficient of the policy's entropy, which is subtracted from the loss: the policy stays more random. With "
        "entropy_target, the first coefficient.",
        low=0.0,
    )
    entropy_target: float | None = key(
        None,
        "Entropy in nats per token that the coefficient follows: it rises while the entropy is lower, by at most 10 % "
        "per step, and falls while it is higher, within a factor of 100 of entropy_coef; null: it stays.",
        above=0.0,
    )
    c_clip: float | None = gate_key("clip", "dual_clip", "Dual clip: upper bound of the ratio for A < 0; null: off.")
    sapo_tau_pos: float = gate_key("sapo", "tau_pos", "SAPO temperature for A > 0.")
    sapo_tau_neg: float = gate_key("sapo", "tau_neg", "SAPO temperature for A ≤ 0.")
    sequence_unit: Literal["trajectory", "turn"] = key(
        "trajectory",
        "In multi-turn episodes, the unit of the sequence ratio, clip and length: the whole trajectory, or each turn.",
    )

    # Rewards and advantages.
    reward_norm: RewardNorm | None = key(None, "Normalisation of rewards.", unset="the algorithm's advantage")
    adv_norm: Norm | None = key(None, "Normalisation of advantages after GAE; null: none.")
    discount: float = key(1.0, "γ of GAE.", low=0.0, high=1.0)
    gae_lambda: float = key(1.0, "λ of GAE.", low=0.0, high=1.0)
    overlong_reward_penalty: bool | Annotated[float, Gt(0.0)] | None = key(
        None,
        "Subtract a penalty from the reward of completions near max_new_tokens: at most this number; true: 1.",
        unset="the algorithm's",
    )
    overlong_tokens: int | None = key(
        None,
        "The penalty grows over the last N tokens before max_new_tokens.",
        unset="a fifth of max_new_tokens",
        low=1,
    )
    mask_no_eos_with_zero: bool = key(False, "Set the advantage of truncated completions to 0.")
    reward_bias: float = key(0.0, "Added to every reward, before scaling.")
    reward_scaling: float = key(1.0, "Every reward is multiplied by it, after the bias.")
    reward_clip: float = key(20.0, "Rewards are clipped to ± this value, after scaling.", above=0.0)

    # π_old, and the difference between the sampler and the trainer.
    prox_logp_method: Literal["auto", "recompute", "rollout", "loglinear"] | None = key(
        None,
        "Source of π_old: recompute (a forward pass of the trainer), rollout (the sampler's log-probs), or loglinear "
        "(interpolation).",
        unset="auto, which is recompute, or rollout if the sampler's measured noise is far below the clip range",
    )
    use_decoupled_loss: bool = key(False, "Multiply the loss by π_old/μ (behavior correction).")
    rejection_sampling: Correction | None = key(None, "Behavior correction: bounds on π_old/μ.")
    prox_logp_force: bool = key(
        False, "With prox_logp_method rollout: train even if the sampler's noise is above the clip range."
    )
    routing_replay: Literal["none", "proximal", "rollout"] = key(
        "none",
        "For mixture-of-experts models, the experts in training passes: chosen by the routers (none), as in π_old's "
        "forward pass (proximal), or as in the sampler (rollout). The paper claims that GSPO needs none (docs/moe.md).",
    )
    sampling_mask_replay: bool = key(
        True,
        "With gconfig.top_p, top_k or min_p: the sampler records the tokens that they keep, and all log-probs, ratios "
        "and KL of the trainer are over these tokens only (docs/mismatch.md). false: over the whole vocabulary.",
    )

    # Rarely set.
    weight_update_mode: Literal["auto", "disk", "shm", "broadcast"] = key(
        "auto",
        "How weights are sent to sampler servers: shm (shared memory of this machine), disk (the run directory, on a "
        "shared file system), or broadcast (over the network with gloo; the network must be trusted). auto: shm if all "
        "servers run on this machine and it has room, otherwise disk.",
    )
    fsdp: Sharding = key(Sharding, "Mixed precision on several ranks, for the actor, ref and critic.")
    fp32_lm_head: bool | None = key(None, "Compute the LM head in float32.", unset="true for sequence ratios")
    share_prefix: bool = key(True, "Compute the prompt of a group once for all its completions.")
    init_from_scratch: bool = key(False, "Start from random weights in the model's architecture.")
