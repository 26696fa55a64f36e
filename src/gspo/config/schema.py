"""Every key, once: its type, default, bounds and a sentence. Torch-free.

`--help`, docs/config.md, error messages and the resolved config all read these dataclasses. A default of
UNSET_BY_USER (None) whose sentence says "algorithm" is filled in by `config.load` from `algorithms.py`,
with the precedence: set by the user > importance_sampling_level > algorithm > default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.algorithms import ALGORITHMS


def key(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A field with its sentence and bounds (low and high inclusive, `above` exclusive)."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class NameResolve:
    type: Literal["nfs", "file", "etcd3", "ray"] | None = key(None, "AReaL's service discovery; ours needs none.")
    nfs_record_root: str | None = key(None, "AReaL's folder for service discovery; ours needs none.")


@dataclass
class Cluster:
    n_nodes: int = key(1, "Machines to use.", low=1)
    n_gpus_per_node: int | None = key(None, "GPUs on each machine; null: what the machine has.", low=0)
    fileroot: str = key("runs", "Root of all run directories: <fileroot>/<experiment_name>/<trial_name>.")
    name_resolve: NameResolve = key(NameResolve, "Accepted for AReaL configs.")


@dataclass
class Slurm:
    partition: str | None = key(None, "Partition; null: the cluster's default.")
    account: str | None = key(None, "Account to charge; null: yours.")
    time: str | None = key(None, "Time limit as sbatch takes it, 24:00:00; null: the partition's.")
    cpus_per_node: int | None = key(None, "CPUs on each machine; null: one per process there.", low=1)
    save_before: int = key(120, "Seconds before the time limit at which the run saves and is queued again.", low=1)
    sbatch: list[str] = key([], "Further sbatch options: [--mem=64G, --exclusive].")
    setup: list[str] = key([], "Lines of shell before anything starts: [module load cuda].")


@dataclass
class Scheduler:
    type: Literal["local", "ray", "slurm"] | None = key(None, "Where processes run; null: local.")
    restarts: int = key(
        3, "How often a killed process is started again: each sampler, and under ray and slurm the trainer.", low=0
    )
    start_timeout: float = key(
        300.0, "Seconds until a Ray cluster that does not answer, or has no room for the plan, fails the run.", above=0
    )
    slurm: Slurm = key(Slurm, "What sbatch is asked for.")


@dataclass
class Rollout:
    backend: str = key(
        "auto", 'Sampler: auto, local, "local:d2", "vllm:d4t2", "sglang:d4". auto: in-process where there is no CUDA.'
    )
    max_concurrent_rollouts: int | None = key(
        None, "Sequences sampled at once, whole groups; null: as many as the sampler and the bounds below take.", low=1
    )
    consumer_batch_size: int | None = key(None, "Prompts per rollout batch; null: train_dataset.batch_size.", low=1)
    max_head_offpolicyness: int = key(
        0, "η: how many weight versions a sample may be behind when it is trained on; 0: synchronous.", low=0
    )
    queue_size: int | None = key(
        None, "Groups sampled ahead, finished or not; null: max_head_offpolicyness + 1 rollout batches.", low=1
    )
    dynamic_filter_fn: str | None = key(
        None, "module:function (or file.py:function) that says which groups to train on; the others are resampled."
    )
    dump_to_file: bool = key(True, "Write every sample to samples/step_*.jsonl.")
    sampler_precision: Literal["none", "bf16", "int8"] = key(
        "none",
        "Round the in-process sampler's weights (int8: per output channel) and compute as before: it then differs from "
        "the trainer as a faster sampler does. For studies; none: it samples from the trainer's own weights.",
    )
    request_timeout: float = key(3600.0, "Seconds until samplers that do not answer or sample fail the run.", above=0)
    request_retries: int = key(3, "How often a request that was lost with its sampler server is tried again.", low=0)


@dataclass
class Generation:
    n_samples: int = key(8, "Completions per prompt: the group size G.", low=1)
    max_new_tokens: int = key(512, "Longest completion, in tokens.", low=1)
    min_new_tokens: int = key(0, "EOS and stop tokens are forbidden before this many tokens.", low=0)
    max_tokens: int | None = key(None, "Longest prompt + completion; null: the model's context.", low=1)
    greedy: bool = key(False, "Take the most likely token.")
    temperature: float = key(1.0, "Divides the logits before sampling.", low=0.0)
    top_p: float = key(1.0, "Keep the smallest set of tokens with this much probability.", above=0.0, high=1.0)
    top_k: int = key(0, "Keep this many tokens; 0: all.", low=0)
    stop: list[str] = key([], "Strings that end a completion; the token that completes one stays.")
    stop_token_ids: list[int] = key([], "Token ids, beside EOS, that end a completion.")
    ignore_eos: bool = key(False, "Sample on after EOS, to max_new_tokens.")


@dataclass
class Norm:
    mean_level: Literal["batch", "group"] | None = key(None, "Subtract the mean over this set; null: none.")
    mean_leave1out: bool = key(False, "Leave the sample itself out of its mean.")
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std over this set; null: none.")
    std_unbiased: bool = key(True, "Divide by n − 1 in the variance.")
    eps: float = key(0.0, "Added to the std.", low=0.0)
    group_size: int | None = key(None, "Size of a group; must equal gconfig.n_samples where it is given.", low=1)


@dataclass
class Correction:
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


@dataclass
class AutoClip:
    target_fraction: float = key(0.15, "Share of sequences to clip that eps_clip: auto steers to.", above=0.0, high=0.9)
    high_over_low: float = key(4.0 / 3.0, "eps_high / eps_low, kept fixed.", above=0.0)
    decay: float = key(0.8, "Weight of the past in the exponential average of quantiles.", low=0.0, high=0.999)
    eps_max: float = key(0.2, "Hard upper bound of both.", above=0.0, high=1.0)


@dataclass
class MicroBatch:
    max_tokens_per_mb: int = key(8192, "Tokens per forward/backward pass; changes memory and speed, no result.", low=1)
    n_mbs: int | None = key(None, "At least this many micro-batches per mini-batch; null: as few as fit.", low=1)
    granularity: int = key(1, "Sequences kept together in a micro-batch.", low=1)
    packing_algorithm: Literal["ffd", "kk"] = key("ffd", "How sequences are balanced over micro-batches.")


@dataclass
class Optimizer:
    type: Literal["adam", "adamw", "sgd"] = key("adamw", "Optimizer; adam means AdamW, as in AReaL.")
    lr: float | None = key(None, "Learning rate; null: 1e-6, or 1e-5 with LoRA.", low=0.0)
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0.0)
    beta1: float = key(0.9, "Decay of the first moment.", low=0.0, high=0.9999999)
    beta2: float = key(0.999, "Decay of the second moment.", low=0.0, high=0.9999999)
    eps: float = key(1e-8, "Added to the root of the second moment.", low=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("constant", "Schedule after the warm-up.")
    min_lr_ratio: float = key(0.0, "Final learning rate over the peak, for linear and cosine.", low=0.0, high=1.0)
    warmup_steps_proportion: float = key(0.0, "Share of all steps with a rising learning rate.", low=0.0, high=1.0)
    gradient_clipping: float = key(1.0, "Largest gradient norm; 0: no clipping.", low=0.0)


@dataclass
class Sharding:
    param_dtype: Literal["bfloat16", "float16"] | None = key(
        None, "What layers compute in, of weights kept as actor.dtype (float32, say); null: actor.dtype."
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "What gradients are summed over ranks in; null: float32, or the weights' type where that is wider."
    )


@dataclass
class Actor:
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
    attn_impl: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"] = key(
        "auto", "Attention kernel; auto: shared-prefix attention, on CUDA by flex attention."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")
    disable_dropout: bool = key(True, "Dropout off in training, as the ratio needs.")
    init_from_scratch: bool = key(False, "Random weights in the model's architecture.")
    fp32_lm_head: bool | None = key(None, "Compute the LM head in float32; null: yes for sequence ratios.")
    logprobs_chunk_size: int = key(256, "Positions per chunk of the LM head; bounds memory.", low=1)
    share_prefix: bool = key(True, "Compute a group's prompt once for its completions.")
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches.")
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
        None, "Ratio per token (PPO, GRPO) or per sequence (GSPO); null: the algorithm's. Brings clip and aggregation."
    )
    eps_clip: float | Literal["auto"] | None = key(
        None, "Lower clip range ε_low, or auto; null: the level's or algorithm's.", above=0.0, high=1.0
    )
    eps_clip_higher: float | None = key(
        None, "Upper clip range ε_high; null: eps_clip where that is set, else the algorithm's.", above=0.0
    )
    eps_clip_auto: AutoClip = key(AutoClip, "Settings of eps_clip: auto.")
    c_clip: float | None = key(None, "Dual clip: bounds the ratio for A < 0; above 1; null: off.", above=1.0)
    loss_aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "token_sum"] | None = key(
        None, "How tokens and sequences are summed; null: the level's or algorithm's."
    )
    ppo_n_minibatches: int | None = key(
        None, "Optimizer updates per rollout batch (not micro-batches); null: the algorithm's.", low=1
    )
    zero_variance_groups: Literal["count", "drop", "refill"] | None = key(
        None, "Groups of equal rewards: stay in the denominator, leave it, or are resampled; null: the algorithm's."
    )
    max_refills: int = key(8, "Refill rounds per step before giving up.", low=1)
    cispo_weight_max: float = key(5.0, "Bound of the CISPO weight.", above=0.0)
    gmpo_log_clip: float = key(0.4, "Band of GMPO's token log-ratios.", above=0.0)
    use_sapo_loss: bool | None = key(None, "AReaL's switch; the same as algorithm: sapo.")
    sapo_tau_pos: float = key(1.0, "SAPO temperature for A > 0.", above=0.0)
    sapo_tau_neg: float = key(1.05, "SAPO temperature for A ≤ 0.", above=0.0)
    use_cispo_loss: bool | None = key(None, "AReaL's switch; the same as algorithm: cispo.")

    prox_logp_method: Literal["auto", "recompute", "rollout", "loglinear"] | None = key(
        None,
        "Where π_old comes from: the trainer, the sampler, or interpolation; auto or null: the trainer, or the sampler "
        "where its noise was measured to be far below the clip range.",
    )
    prox_logp_recenter: bool = key(
        False,
        "With prox_logp_method rollout: take the sampler's mean error per token off π_old of mini-batches 2…K. "
        "Mini-batch 1 measures it, and is its own π_old.",
    )
    prox_logp_force: bool = key(
        False, "With prox_logp_method rollout: train even where the sampler's noise is above the clip range."
    )
    recompute_logprob: bool | None = key(None, "AReaL's switch; false without decoupling means rollout.")
    routing_replay: Literal["none", "proximal", "rollout"] = key(
        "none",
        "Experts of a mixture's training passes: each router's own, those of π_old's forward, or the sampler's. "
        "GSPO needs none; see docs/moe.md.",
    )
    use_decoupled_loss: bool = key(False, "Weigh by π_old/μ (behavior correction) beside the policy ratio.")
    rejection_sampling: Correction | None = key(None, "Behavior correction: bounds on π_old/μ.")

    kl_loss_coef: float = key(0.0, "Weight of KL(π_θ‖π_ref) in the loss; above 0 needs ref.", low=0.0)
    kl_ctl: float = key(0.0, "Weight of the KL penalty in the reward, as in AReaL; above 0 needs ref.", low=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] | None = key(None, "KL estimator; null: k3 in the loss, k1 in the reward.")

    reward_bias: float = key(0.0, "Added to every reward, before scaling.")
    reward_scaling: float = key(1.0, "Multiplies every reward, after the bias.")
    reward_clip: float = key(20.0, "Rewards are clipped to ± this, after scaling.", above=0.0)
    reward_norm: Norm | None = key(None, "Normalisation of rewards; null: the algorithm's advantage.")
    adv_norm: Norm | None = key(None, "Normalisation of advantages after GAE; null: none.")
    discount: float = key(1.0, "γ of GAE.", low=0.0, high=1.0)
    gae_lambda: float = key(1.0, "λ of GAE.", low=0.0, high=1.0)
    overlong_reward_penalty: bool | None = key(None, "Penalise completions near max_new_tokens; null: the algorithm's.")
    overlong_tokens: int | None = key(None, "Length of the penalised tail; null: a fifth of max_new_tokens.", low=1)
    overlong_penalty_factor: float = key(1.0, "Largest overlong penalty.", low=0.0)
    mask_no_eos_with_zero: bool = key(False, "Truncated completions get advantage 0.")

    temperature: float | None = key(
        None, "Sampling temperature for the trainer's log-probs; null: gconfig.temperature.", low=0.0
    )
    max_new_tokens: int | None = key(None, "For the token_sum denominator; null: gconfig.max_new_tokens.", low=1)
    max_nonfinite_updates: int = key(3, "Non-finite updates in a row that end the run.", low=1)
    sequence_unit: Literal["trajectory", "turn"] = key(
        "trajectory", "What of an episode has one sequence ratio, clip and |y|: all its turns together, or each turn."
    )


@dataclass
class Reference:
    path: str | None = key(None, "Reference model; null: actor.path.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key("auto", "Type of its weights.")
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches of the reference pass.")


@dataclass
class Critic:
    path: str | None = key(None, "Value model; null: actor.path with a new value head.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key("auto", "Type of its weights.")
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches of the critic.")
    optimizer: Optimizer = key(Optimizer, "Optimizer of the critic.")
    ppo_n_minibatches: int | None = key(None, "Critic updates per rollout batch; null: the actor's.", low=1)
    value_eps_clip: float = key(0.2, "Clip range of the value.", above=0.0)
    value_loss_coef: float = key(1.0, "Weight of the value loss.", low=0.0)


@dataclass
class MixtureSource:
    path: str = key("", "As in train_dataset.path; required.")
    weight: float = key(1.0, "Share of the prompts drawn from this source, relative to the others.", above=0.0)
    name: str | None = key(None, "Its name in metrics; null: the last part of path.")
    split: str | None = key(None, "Split to read; null: the data set's above.")
    size: int | None = key(None, "Use this many rows; procedural tasks generate them.", low=1)
    max_length: int | None = key(None, "Longer prompts are dropped and counted; null: the data set's above.", low=1)
    prompt_column: str | None = key(None, "Column with the question; null: guessed from usual names.")
    answer_column: str | None = key(None, "Column with the reference answer; null: guessed from usual names.")
    columns: dict[str, Any] = key({}, "Further columns by new name.")
    system_prompt: str | None = key(None, "System message; null: the data set's above.")
    chat_template: bool | str | None = key(None, "As above; null: the data set's above.")
    chat_template_kwargs: dict[str, Any] = key({}, "Handed to the chat template; empty: the data set's above.")
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task.")
    reward: list[str | dict[str, Any]] = key(
        [], "Rewards of its rows, as in reward.functions; empty: the source's own. reward.functions goes first."
    )


@dataclass
class DatasetSpec:
    path: str = key("embedded:arithmetic", "embedded:arithmetic, reasoning_gym:<task>, a hub name, a file or folder.")
    type: Literal["rl"] = key("rl", "Kind of data; prompts with references.")
    split: str | None = key(None, "Split to read; null: train for training, test for validation.")
    batch_size: int = key(32, "Prompts per rollout batch (training) or per evaluation pass.", low=1)
    shuffle: bool = key(True, "Draw prompts in a seeded random order.")
    max_length: int | None = key(None, "Longer prompts (in tokens) are dropped and counted.", low=1)
    size: int | None = key(None, "Use this many rows; procedural tasks generate them.", low=1)
    prompt_column: str | None = key(None, "Column with the question; null: guessed from usual names.")
    answer_column: str | None = key(None, "Column with the reference answer; null: guessed from usual names.")
    columns: dict[str, Any] = key({}, "Further columns by new name, for rewards: {level: extra_info.level}.")
    system_prompt: str | None = key(None, "System message; without a chat template it stands before the prompt.")
    chat_template: bool | str = key(
        "auto",
        "auto: the tokenizer's, if it has one; true: insist on it; false or none: plain text; a .jinja file, or the "
        "template itself.",
    )
    chat_template_kwargs: dict[str, Any] = key({}, "Handed to the chat template: {enable_thinking: false}.")
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task: {min_terms: 2, max_terms: 4}.")
    mixture: list[MixtureSource] = key(
        [], "Several data sets by weight, in place of path; a source inherits split, max_length and the template keys."
    )


@dataclass
class Frequency:
    freq_epochs: int | None = key(None, "Every so many epochs.", low=1)
    freq_steps: int | None = key(None, "Every so many steps.", low=1)
    freq_secs: float | None = key(None, "Every so many seconds.", above=0)


@dataclass
class Saver(Frequency):
    keep: int = key(2, "Checkpoints kept beside the best one.", low=1)


@dataclass
class Evaluator(Frequency):
    at_start: bool = key(True, "Evaluate before the first step.")
    size: int | None = key(512, "Held-out problems per evaluation; null: all.", low=1)


@dataclass
class Recover(Frequency):
    freq_secs: float | None = key(300.0, "Every so many seconds.", above=0)
    mode: Literal["auto", "disabled", "resume", "fault"] = key(
        "auto", "A used run directory: auto (also AReaL's resume and fault) resumes it, disabled refuses it."
    )


@dataclass
class WandB:
    mode: Literal["disabled", "offline", "online"] = key(
        "disabled", "offline: a folder in RUN/wandb for `wandb sync`; online: sent as it goes. Needs gspo[wandb]."
    )
    project: str | None = key(None, "Project; null: experiment_name.")


@dataclass
class StatsLogger:
    wandb: WandB = key(WandB, "Weights & Biases.")
    tensorboard: bool = key(False, "Also write TensorBoard events, to RUN/tensorboard. Needs gspo[tensorboard].")
    trackio: bool = key(False, "Also write a Trackio database, to RUN/trackio or $TRACKIO_DIR. Needs gspo[trackio].")
    keep_token_samples: int = key(16, "Sequences per step whose per-token values are kept.", low=0)
    keep_sample_steps: int | None = key(None, "Steps whose samples stay on disk; null: all.", low=1)


@dataclass
class Reward:
    functions: list[str | dict[str, Any]] = key(
        [],
        "Rewards: math, numeric, final, format, …, module:function, or with settings {name: reward_model, path: …}, "
        "{name: judge, url: …, model: …} (docs/data.md); empty: the task's own.",
    )
    weights: list[float] = key([], "One weight per function; empty: all 1.")
    format_regex: str | None = key(None, "Pattern of the format reward.")
    timeout: float = key(10.0, "Seconds until a reward that does not answer is killed.", above=0)
    workers: int = key(2, "Worker processes for rewards that need one.", low=1)
    max_failure_fraction: float = key(0.5, "Share of failed rewards in a batch that stops the run.", low=0.0, high=1.0)
    allow_unsandboxed_code: bool = key(
        False, "UNSAFE: where bubblewrap does not work, run model-written code with your own rights (docs/sandbox.md)."
    )


@dataclass
class Environment:
    path: str | None = key(
        None,
        "Multi-turn episodes: tools, self_correct, module:function or file.py:function (docs/episodes.md); null: one "
        "completion per prompt.",
    )
    agent: str | None = key(
        None,
        "An agent that speaks to an OpenAI-compatible address, in place of path: module:function or file.py:function "
        "of (base_url, api_key, data) (docs/agents.md).",
    )
    command: list[str] = key(
        [], "The same as a command line, one program per episode with OPENAI_BASE_URL and OPENAI_API_KEY: [node, a.js]."
    )
    model: str = key("policy", "The name by which agents ask for the model; other names are refused.")
    options: dict[str, Any] = key({}, "Settings of the environment, its keyword arguments: {tools: [calculator]}.")
    max_turns: int = key(16, "Answers of the model in one episode; an environment that asks for more fails.", low=1)
    timeout: float = key(
        60.0, "Seconds an environment may take from one answer to its next request; then its sample fails.", above=0
    )
    turn_discount: float = key(
        1.0, "γ by which a reward counts less for every turn between it and the turn that is credited.", low=0, high=1
    )


@dataclass
class Config:
    experiment_name: str = key("gspo", "First part of the run directory's name.")
    trial_name: str = key("trial0", "Second part of the run directory's name.")
    algorithm: str | None = key(
        None, f"Preset: {', '.join(ALGORITHMS)}. null: ppo where a critic is configured, else grpo."
    )
    seed: int = key(1, "Everything random is a function of it.", low=0)
    total_train_epochs: int = key(1, "Passes over the training data.", low=1)
    total_train_steps: int | None = key(None, "Training steps; null: by total_train_epochs.", low=1)
    tokenizer_path: str | None = key(None, "Tokenizer; null: actor.path.")
    allocation_mode: str | None = key(None, "AReaL's old spelling of rollout.backend and actor.backend.")
    strict: bool = key(False, "Turn warnings into errors.")
    stall_timeout: float = key(
        7200.0, "Seconds without any progress until a run ends itself with a stack dump (log.txt).", above=0
    )
    on_alarm: Literal["warn", "stop"] = key("warn", "What the checks during training do.")
    profile: bool = key(
        False, "Write a timeline of steps 2 and 3 (profile/*.trace.json.gz) for a browser's trace viewer."
    )
    threads: int | None = key(None, "CPU threads of the trainer; part of a run's identity; null: all cores.", low=1)
    cluster: Cluster = key(Cluster, "Machines and the run root.")
    scheduler: Scheduler = key(Scheduler, "Where processes run.")
    rollout: Rollout = key(Rollout, "Samplers and staleness.")
    gconfig: Generation = key(Generation, "Sampling for training.")
    eval_gconfig: Generation | None = key(None, "Sampling for evaluation; null: one greedy sample, gconfig's lengths.")
    actor: Actor = key(Actor, "The policy, its objective and its trainer.")
    ref: Reference | None = key(None, "Reference model for KL.")
    critic: Critic | None = key(None, "Value model for PPO.")
    reward: Reward = key(Reward, "Reward functions and their workers.")
    env: Environment = key(Environment, "Multi-turn episodes, tools, agents.")
    train_dataset: DatasetSpec = key(DatasetSpec, "Training problems.")
    valid_dataset: DatasetSpec | None = key(None, "Held-out problems; null: train_dataset's held-out split.")
    saver: Saver = key(Saver, "Checkpoints to keep.")
    recover: Recover = key(Recover, "Checkpoints for resuming.")
    evaluator: Evaluator = key(Evaluator, "Held-out evaluation.")
    stats_logger: StatsLogger = key(StatsLogger, "Where metrics go beside the run directory.")
    vllm: dict[str, Any] = key(
        {},
        "Flags passed on to vLLM servers, by their own names (max_model_len); and python: the interpreter that has "
        "vLLM, env: its variables, url: the address of servers that you run yourself.",
    )
    sglang: dict[str, Any] = key({}, "The same for SGLang servers; experimental.")
