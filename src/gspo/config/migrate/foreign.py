"""What TRL and verl call things, and what they are called here: one table, for error messages and docs/migrating.md.

Nothing is translated: those systems count batches, steps and epochs differently, and a config that loads but means
something else is worse than one that does not load. A key of theirs is an error that says ours. (AReaL's keys are close
enough to be translated: areal.py.) In a verl key, `*` at the end stands for everything below.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

# Their key, ours, and what to know. Several keys with one fate are written together, separated by spaces.
Mapped = tuple[str, str, str]
Other = tuple[str, str]


@dataclass(frozen=True)
class Foreign:
    """The fate of one key.

    >>> print(find("num_generations").sentence)
    `gconfig.n_samples`
    """

    system: Literal["TRL", "verl"]
    key: str
    fate: Literal["mapped", "needless", "unsupported"]
    ours: str
    note: str

    @property
    def sentence(self) -> str:
        """For the table of docs/migrating.md."""
        if self.fate == "mapped":
            return f"`{self.ours}`" + (f": {self.note}" if self.note else "")
        return f"{'not needed' if self.fate == 'needless' else 'not offered'}: {self.note}"

    def complaint(self, written: str) -> str:
        """For a config that uses it."""
        if self.fate == "mapped":
            return f"{written} is {self.system}'s name; here it is {self.ours}" + (
                f" ({self.note})" if self.note else ""
            )
        word = "is not needed here" if self.fate == "needless" else "is not offered here"
        return f"{written} is a key of {self.system}'s and {word}: {self.note}; remove it"


_BATCH = "prompts per step × gconfig.n_samples completions"
_UPDATES = "optimizer updates per rollout batch"
_CORRECTION = "preset tis, mis, icepop, or level, action, upper and lower"

_TRL_MAPPED: tuple[Mapped, ...] = (
    ("num_generations", "gconfig.n_samples", ""),
    ("num_generations_eval", "eval_gconfig.n_samples", ""),
    ("max_completion_length", "gconfig.max_new_tokens", ""),
    ("temperature", "gconfig.temperature", ""),
    ("top_p", "gconfig.top_p", ""),
    ("top_k", "gconfig.top_k", ""),
    ("generation_kwargs", "gconfig", "its keys are stop, stop_token_ids, min_new_tokens, …"),
    ("generation_batch_size", "train_dataset.batch_size", f"{_BATCH}; TRL counts completions"),
    ("steps_per_generation num_iterations", "actor.ppo_n_minibatches", _UPDATES),
    (
        "per_device_train_batch_size gradient_accumulation_steps",
        "actor.mb_spec.max_tokens_per_mb",
        "tokens per pass, memory only; the batch is train_dataset.batch_size × gconfig.n_samples over "
        "actor.ppo_n_minibatches",
    ),
    ("per_device_eval_batch_size", "evaluator.size", "problems per evaluation; the sampler batches by itself"),
    ("epsilon", "actor.eps_clip", ""),
    ("epsilon_high", "actor.eps_clip_higher", ""),
    ("delta", "actor.c_clip", "ours bounds the ratio where A < 0, as delta does"),
    ("beta", "actor.kl_loss_coef", "above 0 needs a ref section"),
    (
        "importance_sampling_level",
        "actor.importance_sampling_level",
        "brings clip range and aggregation; or algorithm: gspo",
    ),
    (
        "loss_type",
        "actor.loss_aggregation",
        "grpo: sequence_mean; dapo and bnpo: token_mean; dr_grpo: token_sum; cispo, sapo, luspo are algorithms: "
        "algorithm: cispo",
    ),
    ("scale_rewards", "actor.reward_norm.std_level", "group, batch, or null with mean_level: group"),
    ("sapo_temperature_pos", "actor.sapo_tau_pos", ""),
    ("sapo_temperature_neg", "actor.sapo_tau_neg", ""),
    ("mask_truncated_completions", "actor.mask_no_eos_with_zero", "truncated completions get advantage 0"),
    ("reward_weights", "reward.weights", ""),
    ("vllm_importance_sampling_correction", "actor.use_decoupled_loss", "weighs by π_old/μ"),
    (
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap",
        "actor.rejection_sampling",
        _CORRECTION,
    ),
    (
        "off_policy_mask_threshold",
        "actor.rejection_sampling.only_negative",
        "with level: sequence, metric: kl_k1 and upper: the threshold",
    ),
    ("learning_rate", "actor.optimizer.lr", ""),
    ("lr_scheduler_type", "actor.optimizer.lr_scheduler_type", "constant, linear, cosine"),
    ("lr_scheduler_kwargs", "actor.optimizer.min_lr_ratio", ""),
    ("warmup_steps", "actor.optimizer.warmup_steps_proportion", "a share of all updates"),
    ("optim", "actor.optimizer.type", "adamw or sgd"),
    ("weight_decay", "actor.optimizer.weight_decay", ""),
    ("adam_beta1", "actor.optimizer.beta1", ""),
    ("adam_beta2", "actor.optimizer.beta2", ""),
    ("adam_epsilon", "actor.optimizer.eps", ""),
    ("max_grad_norm", "actor.optimizer.gradient_clipping", ""),
    ("num_train_epochs", "total_train_epochs", "passes over the prompts"),
    ("max_steps", "total_train_steps", "a step is one rollout batch with all its updates"),
    ("bf16 fp16", "actor.dtype", "bfloat16, float16 or float32"),
    ("gradient_checkpointing", "actor.gradient_checkpointing", ""),
    ("disable_dropout", "actor.disable_dropout", ""),
    ("cast_lm_head_to_fp32", "actor.fp32_lm_head", ""),
    ("model_init_kwargs", "actor.path", "with actor.dtype and actor.attn_impl"),
    ("seed data_seed", "seed", ""),
    ("shuffle_dataset", "train_dataset.shuffle", ""),
    ("chat_template_kwargs", "train_dataset.chat_template_kwargs", ""),
    ("output_dir", "cluster.fileroot", "the run is <fileroot>/<experiment_name>/<trial_name>"),
    ("run_name", "trial_name", "with experiment_name"),
    ("project", "stats_logger.wandb.project", ""),
    ("report_to", "stats_logger.wandb.mode", "or .tensorboard, .trackio; metrics.jsonl is always written"),
    ("eval_strategy eval_steps", "evaluator.freq_steps", "or freq_epochs, freq_secs"),
    ("eval_on_start", "evaluator.at_start", ""),
    ("save_strategy save_steps", "saver.freq_steps", "or freq_epochs, freq_secs"),
    ("save_total_limit", "saver.keep", "beside the best one"),
    ("resume_from_checkpoint", "recover.mode", "auto: the same command goes on"),
    ("log_completions", "rollout.dump_to_file", "every sample is written"),
    ("use_vllm vllm_mode", "rollout.backend", "auto, local, vllm:dN"),
    ("vllm_tensor_parallel_size", "rollout.backend", "vllm:d1tN"),
    ("vllm_max_model_length", "gconfig.max_tokens", ""),
    (
        "vllm_gpu_memory_utilization vllm_model_impl vllm_enable_sleep_mode",
        "vllm",
        "flags are passed on under that section",
    ),
    ("vllm_server_timeout", "rollout.request_timeout", ""),
    ("fsdp fsdp_config parallelism_config", "actor.backend", "fsdp:dN"),
)

_TRL_NEEDLESS: tuple[Other, ...] = (
    (
        "bf16_full_eval fp16_full_eval tf32 use_cpu",
        "evaluation uses the policy's own type, and the device is found",
    ),
    ("gradient_checkpointing_kwargs", "checkpointing has one form"),
    ("use_liger_kernel liger_kernel_config use_cache", "logits exist only at trained positions, in chunks"),
    ("auto_find_batch_size pad_to_multiple_of", "micro-batches are bounded in tokens and nothing is padded"),
    ("average_tokens_across_devices", "the denominator is one number over all ranks"),
    ("torch_empty_cache_steps", "memory is bounded by actor.mb_spec.max_tokens_per_mb"),
    (
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm log_unique_prompts "
        "num_completions_to_print log_multimodal",
        "every step is logged once, with every sample",
    ),
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics label_names eval_delay",
        "evaluation is sampling and scoring; its form is eval_gconfig",
    ),
    (
        "save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint",
        "checkpoints are whole, written once, and hold what a bit-for-bit resume needs",
    ),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "the best checkpoint by held-out accuracy is kept",
    ),
    ("full_determinism", "runs are deterministic: every draw is a function of its key"),
    (
        "accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank",
        "backend strings place processes",
    ),
    (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
        "length_column_name",
        "prompts are an endless stream of full batches",
    ),
    ("remove_unused_columns", "rewards are given every column"),
    ("do_train do_eval do_predict", "the verb says it: gspo train, gspo eval"),
    ("debug skip_memory_metrics", "`profile` writes a timeline, `gspo doctor` estimates memory"),
    ("ds3_gather_for_generation", "weights reach the sampler in one way"),
    ("cache_implementation", "the sampler has a cache of its own"),
    (
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        "the local sampler batches continuously",
    ),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port", "servers are started by the run itself"),
)

_TRL_UNSUPPORTED: tuple[Other, ...] = (
    ("optim_args optim_target_modules", "there are AdamW and SGD"),
    ("label_smoothing_factor neftune_noise_alpha", "a term of supervised losses"),
    ("torch_compile torch_compile_backend torch_compile_mode", "models run as transformers builds them"),
    ("deepspeed", "shard with actor.backend: fsdp:dN"),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", "use stats_logger"),
    (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "log_completions_hub_repo",
        "`gspo export` writes a folder that can be uploaded",
    ),
    ("trust_remote_code", "models whose code transformers does not have are not loaded"),
    ("router_aux_loss_coef", "no auxiliary loss is added"),
    ("min_p repetition_penalty", "log-probs would not be the policy's"),
    ("vllm_structured_outputs_regex", "completions are the policy's own samples"),
    (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        "VESPO is not among the algorithms (`gspo objectives`)",
    ),
    ("multi_objective_aggregation", "rewards are summed by weight, then normalised"),
    ("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "the reference stays as it is"),
    ("top_entropy_quantile", "every token of a completion is trained"),
    (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "entropy is measured, not rewarded",
    ),
    ("max_tool_calling_iterations", "an episode is an environment: env.path: tools, env.options.max_turns"),
    ("use_bias_correction_kl", "the KL estimators are k1, k2, k3"),
)

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

_VERL_MAPPED: tuple[Mapped, ...] = (
    ("data.train_files", "train_dataset.path", "or train_dataset.mixture for several, with weights"),
    ("data.val_files", "valid_dataset.path", ""),
    ("data.train_batch_size data.gen_batch_size", "train_dataset.batch_size", "prompts per step in both"),
    ("data.val_batch_size data.val_max_samples", "evaluator.size", "problems per evaluation"),
    ("data.train_max_samples", "train_dataset.size", ""),
    ("data.prompt_key", "train_dataset.prompt_column", "a list of messages is fine"),
    (
        "data.reward_fn_key",
        "train_dataset.mixture",
        "a source has its own reward; for verl's files set answer_column: reward_model.ground_truth",
    ),
    (
        "data.max_prompt_length data.filter_overlong_prompts",
        "train_dataset.max_length",
        "longer prompts are dropped, and counted",
    ),
    ("data.max_response_length", "gconfig.max_new_tokens", ""),
    ("data.shuffle", "train_dataset.shuffle", ""),
    ("data.seed", "seed", ""),
    ("data.tokenizer " + _M + "tokenizer_path", "tokenizer_path", ""),
    ("data.apply_chat_template_kwargs", "train_dataset.chat_template_kwargs", ""),
    (_M + "path", "actor.path", ""),
    (_M + "custom_chat_template", "train_dataset.chat_template", ""),
    (_M + "lora_rank", "actor.lora_rank", "with actor.use_lora: true"),
    (_M + "lora_alpha", "actor.lora_alpha", ""),
    (_M + "target_modules", "actor.target_modules", ""),
    (_M + "enable_gradient_checkpointing", "actor.gradient_checkpointing", ""),
    (
        _A + "ppo_mini_batch_size",
        "actor.ppo_n_minibatches",
        f"{_UPDATES}: data.train_batch_size / ppo_mini_batch_size × ppo_epochs",
    ),
    (_A + "ppo_epochs", "actor.ppo_n_minibatches", _UPDATES),
    (
        f"{_A}ppo_micro_batch_size {_A}ppo_micro_batch_size_per_gpu {_A}ppo_max_token_len_per_gpu {_A}use_dynamic_bsz",
        "actor.mb_spec.max_tokens_per_mb",
        "tokens per pass, memory only",
    ),
    (f"{_A}clip_ratio {_A}clip_ratio_low", "actor.eps_clip", ""),
    (_A + "clip_ratio_high", "actor.eps_clip_higher", ""),
    (_A + "clip_ratio_c", "actor.c_clip", ""),
    (_A + "policy_loss.loss_mode", "algorithm", "vanilla is grpo or ppo; gspo, sapo, cispo, gmpo (geo_mean)"),
    (_A + "tau_pos", "actor.sapo_tau_pos", ""),
    (_A + "tau_neg", "actor.sapo_tau_neg", ""),
    (
        _A + "loss_agg_mode",
        "actor.loss_aggregation",
        "token-mean: token_mean; seq-mean-token-mean: sequence_mean; seq-mean-token-sum: sequence_sum; "
        "seq-mean-token-sum-norm: token_sum",
    ),
    (_A + "loss_scale_factor", "actor.max_new_tokens", "what token_sum divides by"),
    (f"{_A}use_kl_loss {_A}kl_loss_coef", "actor.kl_loss_coef", "above 0 needs a ref section"),
    (_A + "kl_loss_type", "actor.kl_estimator", "kl: k1; mse: k2; low_var_kl: k3"),
    (f"{_A}grad_clip {_A}optim.clip_grad", "actor.optimizer.gradient_clipping", ""),
    (_A + "optim.lr", "actor.optimizer.lr", ""),
    (_A + "optim.optimizer", "actor.optimizer.type", ""),
    (_A + "optim.weight_decay", "actor.optimizer.weight_decay", ""),
    (_A + "optim.betas", "actor.optimizer.beta1", "and beta2"),
    (f"{_A}optim.lr_warmup_steps {_A}optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps_proportion", ""),
    (f"{_A}optim.lr_scheduler_type {_A}optim.warmup_style", "actor.optimizer.lr_scheduler_type", ""),
    (_A + "optim.min_lr_ratio", "actor.optimizer.min_lr_ratio", ""),
    (f"{_A}fsdp_config.dtype {_A}fsdp_config.model_dtype", "actor.dtype", ""),
    (f"{_A}strategy {_A}fsdp_config.fsdp_size", "actor.backend", "fsdp:dN"),
    (_A + "use_prefix_grouper", "actor.share_prefix", ""),
    (f"{_R}n {_A}rollout_n actor_rollout_ref.ref.rollout_n", "gconfig.n_samples", ""),
    (_R + "name", "rollout.backend", "auto, local, vllm:dN, sglang:dN"),
    (f"{_R}tensor_model_parallel_size {_R}data_parallel_size", "rollout.backend", "vllm:dNtM"),
    (_R + "temperature", "gconfig.temperature", ""),
    (_R + "top_p", "gconfig.top_p", ""),
    (_R + "top_k", "gconfig.top_k", "0 keeps all, there -1"),
    (_R + "do_sample", "gconfig.greedy", "the opposite"),
    (_R + "ignore_eos", "gconfig.ignore_eos", ""),
    (f"{_R}prompt_length {_R}response_length", "gconfig.max_new_tokens", "with train_dataset.max_length"),
    (_R + "max_model_len", "gconfig.max_tokens", ""),
    (_R + "max_num_seqs", "rollout.max_concurrent_rollouts", ""),
    (_R + "val_kwargs.n", "eval_gconfig.n_samples", ""),
    (_R + "val_kwargs.temperature", "eval_gconfig.temperature", ""),
    (_R + "val_kwargs.top_p", "eval_gconfig.top_p", ""),
    (_R + "val_kwargs.top_k", "eval_gconfig.top_k", ""),
    (_R + "val_kwargs.do_sample", "eval_gconfig.greedy", "the opposite"),
    (f"{_R}gpu_memory_utilization {_R}engine_kwargs.vllm", "vllm", "flags are passed on under that section"),
    (_R + "engine_kwargs.sglang", "sglang", "flags are passed on under that section"),
    (f"{_R}calculate_log_probs", "actor.prox_logp_method", "rollout uses the sampler's values as π_old"),
    (
        f"{_A}router_replay.mode {_R}enable_rollout_routing_replay",
        "actor.routing_replay",
        "R2: proximal; R3: rollout; GSPO needs none",
    ),
    (
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "ref.mb_spec.max_tokens_per_mb",
        "",
    ),
    ("algorithm.adv_estimator", "algorithm", "gae: ppo; grpo, rloo, reinforce_plus_plus; or gspo, dapo, …"),
    ("algorithm.norm_adv_by_std_in_grpo", "actor.reward_norm.std_level", "null for false; or algorithm: dr_grpo"),
    ("algorithm.gamma", "actor.discount", ""),
    ("algorithm.lam", "actor.gae_lambda", ""),
    ("algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", "actor.kl_ctl", "above 0 needs a ref section"),
    ("algorithm.kl_penalty", "actor.kl_estimator", "kl: k1; mse: k2; low_var_kl: k3"),
    (
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
        "actor.rejection_sampling",
        _CORRECTION,
    ),
    ("algorithm.rollout_correction.bypass_mode", "actor.prox_logp_method", "rollout where true"),
    ("algorithm.filter_groups.enable", "actor.zero_variance_groups", "refill where true"),
    ("algorithm.filter_groups.max_num_gen_batches", "actor.max_refills", ""),
    ("custom_reward_function.path custom_reward_function.name", "reward.functions", "[path/to/file.py:function]"),
    ("reward_model.model.path reward_model.enable", "reward.functions", "[{name: reward_model, path: …}]"),
    ("reward_model.num_workers", "reward.workers", ""),
    (
        "reward_model.overlong_buffer.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        "actor.overlong_reward_penalty",
        "",
    ),
    (
        "reward_model.overlong_buffer.len reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "actor.overlong_tokens",
        "",
    ),
    (
        "reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        "actor.overlong_penalty_factor",
        "",
    ),
    ("reward_model.reward_manager reward_manager.name", "reward.functions", "[math], [numeric], [module:function], …"),
    ("critic.model.path", "critic.path", ""),
    ("critic.optim.lr", "critic.optimizer.lr", ""),
    ("critic.optim.weight_decay", "critic.optimizer.weight_decay", ""),
    ("critic.grad_clip critic.optim.clip_grad", "critic.optimizer.gradient_clipping", ""),
    ("critic.cliprange_value", "critic.value_eps_clip", ""),
    ("critic.ppo_mini_batch_size critic.ppo_epochs", "critic.ppo_n_minibatches", "updates per rollout batch"),
    (
        "critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu "
        "critic.use_dynamic_bsz",
        "critic.mb_spec.max_tokens_per_mb",
        "",
    ),
    ("trainer.total_epochs", "total_train_epochs", ""),
    ("trainer.total_training_steps", "total_train_steps", "a step is one rollout batch in both"),
    ("trainer.project_name", "experiment_name", ""),
    ("trainer.experiment_name", "trial_name", ""),
    ("trainer.default_local_dir", "cluster.fileroot", ""),
    ("trainer.logger", "stats_logger.wandb.mode", "or .tensorboard, .trackio; metrics.jsonl is always written"),
    ("trainer.nnodes", "cluster.n_nodes", ""),
    ("trainer.n_gpus_per_node", "cluster.n_gpus_per_node", ""),
    ("trainer.save_freq", "saver.freq_steps", ""),
    ("trainer.test_freq", "evaluator.freq_steps", ""),
    ("trainer.val_before_train", "evaluator.at_start", ""),
    ("trainer.resume_mode trainer.resume_from_path", "recover.mode", "auto: the same command goes on"),
    ("trainer.max_actor_ckpt_to_keep", "saver.keep", ""),
    ("trainer.rollout_data_dir trainer.log_val_generations", "rollout.dump_to_file", "every sample is written"),
)

_VERL_NEEDLESS: tuple[Other, ...] = (
    (f"{_A}use_remove_padding {_M}use_remove_padding critic.model.use_remove_padding", "nothing is padded"),
    (
        f"{_A}entropy_from_logits_with_chunking {_A}use_fused_kernels {_M}use_fused_kernels {_M}fused_kernel_options.*",
        "logits exist only at trained positions, in chunks (actor.logprobs_chunk_size)",
    ),
    (f"{_R}log_prob_*", "log-probs of π_old use actor.mb_spec"),
    (
        f"{_R}free_cache_engine {_R}enforce_eager {_R}enable_chunked_prefill {_R}enable_prefix_caching {_R}load_format "
        f"{_R}layered_summon {_R}dtype {_R}max_num_batched_tokens {_R}disable_log_stats {_R}multi_stage_wake_up",
        "an engine's own flags go under vllm or sglang, by its own names",
    ),
    (
        "trainer.balance_batch trainer.device trainer.use_legacy_worker_impl trainer.ray_wait_register_center_timeout "
        "trainer.del_local_ckpt_after_load trainer.default_hdfs_dir trainer.esi_redundant_time "
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout ray_kwargs.* transfer_queue.*",
        "it belongs to verl's controller",
    ),
    ("trainer.val_only", "the verb says it: gspo eval"),
    ("global_profiler.*", "`profile` writes a timeline"),
    (
        "data.truncation data.return_raw_chat data.return_raw_input_ids data.return_full_prompt "
        "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm data.validation_shuffle",
        "prompts are rendered once, at the start",
    ),
    (f"{_A}shuffle {_A}data_loader_seed", "mini-batches follow the order of the prompts"),
    (f"{_A}checkpoint.* critic.checkpoint.*", "checkpoints are written one way, whole and verified"),
    (f"{_M}use_shm {_M}external_lib {_M}hf_config_path", "models load from a folder or the hub"),
    ("critic.enable", "a critic section turns it on"),
)

_VERL_UNSUPPORTED: tuple[Other, ...] = (
    (f"{_A}entropy_coeff", "entropy is measured, not rewarded"),
    (
        f"{_A}policy_loss.clip_cov_ratio {_A}policy_loss.clip_cov_lb {_A}policy_loss.clip_cov_ub "
        f"{_A}policy_loss.kl_cov_ratio {_A}policy_loss.ppo_kl_coef",
        "clip-cov and kl-cov are not among the algorithms (`gspo objectives`)",
    ),
    (f"{_A}megatron.* critic.megatron.*", "shard with actor.backend: fsdp:dN"),
    (
        f"{_A}fsdp_config.param_offload {_A}fsdp_config.optimizer_offload {_A}fsdp_config.offload_policy "
        f"{_M}enable_activation_offload",
        "offloading; shard over more ranks, or train with actor.use_lora",
    ),
    (f"{_A}ulysses_sequence_parallel_size", "sequences are not split over ranks"),
    (f"{_A}use_torch_compile", "models run as transformers builds them"),
    (f"{_R}multi_turn.* {_R}agent.* data.tool_config_path", "an episode is an environment: env.path"),
    ("algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the KL coefficient is fixed"),
    ("algorithm.use_pf_ppo algorithm.pf_ppo.*", "samples are not reweighted"),
    ("trainer.critic_warmup", "critic and policy are trained from the first step"),
    ("data.image_key data.video_key data.return_multi_modal_inputs", "text only"),
    ("data.custom_cls.* data.sampler.* data.datagen.*", "give rows from Python: Trainer(dataset=…)"),
    ("reward_model.sandbox_fusion.*", "rewards run in local, killable workers"),
    (f"{_M}trust_remote_code data.trust_remote_code", "models whose code transformers does not have are not loaded"),
)


@functools.cache
def table() -> Mapping[tuple[str, str], Foreign]:
    """Every known key by (system, key), in the order of the documentation."""
    rows = (
        *_rows("TRL", _TRL_MAPPED, _TRL_NEEDLESS, _TRL_UNSUPPORTED),
        *_rows("verl", _VERL_MAPPED, _VERL_NEEDLESS, _VERL_UNSUPPORTED),
    )
    return types.MappingProxyType({(row.system, row.key): row for row in rows})


def _rows(
    system: Literal["TRL", "verl"], mapped: Iterable[Mapped], needless: Iterable[Other], unsupported: Iterable[Other]
) -> Iterable[Foreign]:
    for keys, ours, note in mapped:
        yield from (Foreign(system, key, "mapped", ours, note) for key in keys.split())
    for keys, note in needless:
        yield from (Foreign(system, key, "needless", "", note) for key in keys.split())
    for keys, note in unsupported:
        yield from (Foreign(system, key, "unsupported", "", note) for key in keys.split())


def find(name: str) -> Foreign | None:
    """What a key of TRL's or verl's is here; also a key of TRL's that stands in a section of ours.

    >>> find("actor_rollout_ref.rollout.multi_turn.enable").fate, find("actor.num_generations").ours
    ('unsupported', 'gconfig.n_samples')
    """
    known = table()
    if ("verl", name) in known:
        return known["verl", name]
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        below = known.get(("verl", ".".join(parts[:depth]) + ".*"))
        if below is not None:
            return below
    for (system, key), row in known.items():  # log_prob_* and the like
        if system == "verl" and key.endswith("_*") and name.startswith(key[:-1]):
            return row
    return known.get(("TRL", parts[-1]))


@functools.cache
def _sections() -> frozenset[str]:
    found: set[str] = set()
    for system, key in table():
        parts = key.split(".") if system == "verl" else []
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return frozenset(found)


def is_section(name: str) -> bool:
    """Whether verl has a section of this name.

    >>> is_section("actor_rollout_ref.actor"), is_section("actor")
    (True, False)
    """
    return name in _sections()
