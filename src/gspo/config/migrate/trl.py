"""Every field of TRL's GRPOConfig: its key in gspo, or why there is none.

Several keys with the same row are written together, separated by spaces.
"""

from __future__ import annotations

_BATCH = "prompts per step × gconfig.n_samples completions"
_CORRECTION = "preset tis (by token), seq_tis (by sequence), mis, icepop, or level, action, upper and lower"

MAPPED: tuple[tuple[str, str, str], ...] = (
    ("num_generations", "gconfig.n_samples", ""),
    ("num_generations_eval", "eval_gconfig.n_samples", ""),
    ("max_completion_length", "gconfig.max_new_tokens", ""),
    ("temperature", "gconfig.temperature", ""),
    ("top_p", "gconfig.top_p", ""),
    ("top_k", "gconfig.top_k", ""),
    ("min_p", "gconfig.min_p", ""),
    ("generation_kwargs", "gconfig", "its keys are stop, min_new_tokens, …"),
    ("generation_batch_size", "train_dataset.batch_size", f"{_BATCH}; TRL counts completions"),
    (
        "steps_per_generation",
        "actor.ppo_n_minibatches",
        "optimizer updates per rollout batch: steps_per_generation / gradient_accumulation_steps",
    ),
    ("num_iterations", "actor.ppo_epochs", "passes over the same samples with the same π_old"),
    (
        "per_device_train_batch_size gradient_accumulation_steps",
        "actor.mb_spec.max_tokens_per_mb",
        "tokens per pass, memory only; the batch is train_dataset.batch_size × gconfig.n_samples over "
        "actor.ppo_n_minibatches",
    ),
    ("per_device_eval_batch_size", "evaluator.size", "problems per evaluation; the sampler batches by itself"),
    ("epsilon", "actor.eps_clip", ""),
    ("epsilon_high", "actor.eps_clip_higher", ""),
    ("delta", "actor.c_clip", "both limit the ratio where A < 0"),
    ("beta", "actor.kl_loss_coef", "above 0 needs a ref section"),
    (
        "importance_sampling_level",
        "actor.importance_sampling_level",
        "it also sets clip range and aggregation; or use algorithm: gspo",
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
    ("entropy_coef", "actor.entropy_coef", ""),
    ("use_adaptive_entropy entropy_target", "actor.entropy_target", "adaptive where it is set; in nats per token"),
    (
        "multi_objective_aggregation",
        "reward.normalize",
        "sum_then_normalize: sum; normalize_then_sum: each, with actor.adv_norm: {mean_level: batch, std_level: batch}",
    ),
    ("vllm_importance_sampling_correction", "actor.use_decoupled_loss", "weighs by π_old/μ"),
    (
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap",
        "actor.rejection_sampling",
        _CORRECTION,
    ),
    (
        "off_policy_mask_threshold",
        "actor.rejection_sampling.preset",
        "sequence_mask, with lower: exp(−threshold)",
    ),
    ("learning_rate", "actor.optimizer.lr", ""),
    ("lr_scheduler_type", "actor.optimizer.lr_scheduler_type", "constant, linear, cosine"),
    ("warmup_steps", "actor.optimizer.warmup_steps_proportion", "a share of all updates"),
    ("optim", "actor.optimizer.type", "adamw, adamw8bit or sgd"),
    ("weight_decay", "actor.optimizer.weight_decay", ""),
    ("adam_beta1", "actor.optimizer.beta1", ""),
    ("adam_beta2", "actor.optimizer.beta2", ""),
    ("adam_epsilon", "actor.optimizer.eps", ""),
    ("max_grad_norm", "actor.optimizer.gradient_clipping", ""),
    ("num_train_epochs", "total_train_epochs", "passes over the prompts"),
    ("max_steps", "total_train_steps", "a step is one rollout batch with all its updates"),
    ("bf16 fp16", "actor.dtype", "bfloat16, float16 or float32"),
    ("gradient_checkpointing", "actor.gradient_checkpointing", ""),
    ("cast_lm_head_to_fp32", "actor.fp32_lm_head", ""),
    ("model_init_kwargs", "actor.path", "with actor.dtype"),
    ("seed data_seed", "seed", ""),
    ("shuffle_dataset", "train_dataset.shuffle", ""),
    ("chat_template_kwargs", "train_dataset.chat_template_kwargs", ""),
    ("output_dir", "cluster.fileroot", "the run is <fileroot>/<experiment_name>/<trial_name>"),
    ("run_name", "trial_name", "with experiment_name"),
    ("project", "experiment_name", "or the environment variable WANDB_PROJECT"),
    ("report_to", "stats_logger.wandb.mode", "or .tensorboard, .trackio; metrics.jsonl is always written"),
    ("eval_strategy eval_steps", "evaluator.freq_steps", "a number of steps, or epoch"),
    ("eval_on_start", "evaluator.at_start", ""),
    ("save_strategy save_steps", "saver.freq_steps", "a number of steps, or epoch; or recover.freq_secs"),
    ("save_total_limit", "saver.keep", "beside the best one"),
    ("resume_from_checkpoint", "recover.mode", "auto: run the same command again to resume"),
    ("log_completions", "rollout.dump_to_file", "every sample is written"),
    ("use_vllm vllm_mode", "rollout.backend", "auto, local, vllm:dN"),
    ("vllm_tensor_parallel_size", "rollout.backend", "vllm:d1tN"),
    ("vllm_max_model_length", "gconfig.max_tokens", ""),
    (
        "vllm_gpu_memory_utilization vllm_model_impl vllm_enable_sleep_mode",
        "vllm",
        "flags below that section are passed on to the server",
    ),
    ("vllm_server_timeout", "rollout.request_timeout", ""),
    ("fsdp fsdp_config parallelism_config", "actor.backend", "fsdp:dN"),
)

# Of ModelConfig, ScriptArguments, the arguments of GRPOTrainer, and older versions of GRPOConfig.
SCRIPT: tuple[tuple[str, str, str], ...] = (
    ("model_name_or_path model", "actor.path", ""),
    ("dataset_name train_dataset_name", "train_dataset.path", ""),
    ("dataset_train_split", "train_dataset.split", ""),
    ("dataset_test_split", "valid_dataset.split", ""),
    ("use_peft peft_config", "actor.use_lora", "true; without it all weights are trained"),
    ("lora_r", "actor.lora_rank", "with actor.use_lora: true"),
    ("load_in_4bit load_in_8bit", "actor.lora_base_bits", "4 or 8, with actor.use_lora: true"),
    ("lora_target_modules", "actor.target_modules", "with actor.use_lora: true"),
    ("lora_target_parameters", "actor.target_modules", "add experts to the list: all packed tensors of the experts"),
    ("torch_dtype", "actor.dtype", "bfloat16, float16 or float32"),
    ("max_prompt_length", "train_dataset.max_length", "TRL cuts longer prompts; here such rows are dropped"),
    ("reward_funcs", "reward.functions", "or Trainer(config, reward=…)"),
    ("max_seq_length", "train_dataset.max_length", "of SFTConfig; with algorithm: sft, longer rows are dropped"),
)
SCRIPT_NEEDLESS: tuple[tuple[str, str], ...] = (
    (
        "completion_only_loss assistant_only_loss packing packing_strategy padding_free eval_packing",
        "of SFTConfig: with algorithm: sft only completions are trained, and micro-batches are always packed",
    ),
    ("attn_implementation", "the attention that shares prefixes is chosen by a check when the model is loaded"),
)
SCRIPT_UNSUPPORTED: tuple[tuple[str, str], ...] = ()

NEEDLESS: tuple[tuple[str, str], ...] = (
    (
        "bf16_full_eval fp16_full_eval tf32 use_cpu",
        "evaluation uses the policy's dtype, and the device is detected",
    ),
    ("disable_dropout", "dropout is always off"),
    ("gradient_checkpointing_kwargs", "there is one form of activation checkpointing"),
    ("use_liger_kernel liger_kernel_config use_cache", "logits are computed at trained positions only, in chunks"),
    ("auto_find_batch_size pad_to_multiple_of", "micro-batches are limited in tokens and nothing is padded"),
    ("average_tokens_across_devices", "the denominator is one number over all ranks"),
    ("torch_empty_cache_steps", "actor.mb_spec.max_tokens_per_mb limits memory"),
    (
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm log_unique_prompts "
        "num_completions_to_print log_multimodal",
        "every step is logged once, with every sample",
    ),
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics label_names eval_delay",
        "evaluation is sampling and scoring; eval_gconfig configures it",
    ),
    (
        "save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint",
        "a checkpoint always holds everything that a bit-for-bit resume needs",
    ),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "evaluator.best: the checkpoint with the best held-out score is always kept",
    ),
    (
        "full_determinism",
        "every random number is a function of the seed and its position; on a CPU a run repeats bit for bit",
    ),
    (
        "accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank",
        "rollout.backend and actor.backend place the processes",
    ),
    (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
        "length_column_name",
        "prompts form an endless stream of full batches",
    ),
    ("remove_unused_columns", "reward functions receive every column"),
    ("do_train do_eval do_predict", "the command decides: gspo train or gspo eval"),
    ("debug skip_memory_metrics", "`profile` writes a timeline, `gspo doctor` estimates memory"),
    ("ds3_gather_for_generation", "actor.weight_update_mode decides how the sampler gets new weights"),
    ("cache_implementation", "the sampler manages its cache"),
    (
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        "the local sampler batches continuously",
    ),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port", "the run starts its own servers"),
)

UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("optim_args optim_target_modules", "only AdamW and SGD are available"),
    ("lr_scheduler_kwargs", "linear and cosine schedules end at 0"),
    ("label_smoothing_factor neftune_noise_alpha", "the loss of algorithm: sft is the plain likelihood"),
    (
        "torch_compile torch_compile_backend torch_compile_mode",
        "torch.compile is used for the attention of shared prefixes on CUDA only",
    ),
    ("deepspeed", "shard with actor.backend: fsdp:dN"),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", "use stats_logger"),
    (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "log_completions_hub_repo",
        "`gspo export` writes a folder that can be uploaded",
    ),
    ("trust_remote_code", "only models that transformers implements can be loaded"),
    ("router_aux_loss_coef", "no auxiliary loss is added"),
    ("repetition_penalty", "the log-probs would not be those of the policy"),
    ("vllm_structured_outputs_regex", "completions are sampled from the policy without constraints"),
    (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        "VESPO is not among the algorithms (`gspo objectives`)",
    ),
    ("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "the reference model is never updated"),
    ("top_entropy_quantile", "every token of a completion is trained"),
    (
        "entropy_coef_min entropy_coef_max entropy_coef_delta",
        "the coefficient of actor.entropy_target changes by at most 10 % per step, within a factor of 100 of "
        "actor.entropy_coef",
    ),
    ("max_tool_calling_iterations", "use an environment: env.path: tools with env.options.max_turns"),
    ("use_bias_correction_kl", "the KL estimators are k1, k2, k3"),
)
