"""The keys of verl's ppo_trainer.yaml: their keys in gspo, or why there are none.

Several keys with the same row are written together, separated by spaces. `*` at the end of a key stands for every key
below it.
"""

from __future__ import annotations

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_CORRECTION = "preset tis (by token), seq_tis (by sequence), mis, icepop, or level, action, upper and lower"

MAPPED: tuple[tuple[str, str, str], ...] = (
    (f"{_A}ppo_epochs", "actor.ppo_epochs", "passes over the same samples with the same π_old"),
    ("data.train_files", "train_dataset.path", "or train_dataset.mixture for several, with weights"),
    ("data.val_files", "valid_dataset.path", ""),
    ("data.train_batch_size data.gen_batch_size", "train_dataset.batch_size", "prompts per step in both"),
    ("data.val_batch_size data.val_max_samples", "evaluator.size", "problems per evaluation"),
    ("data.train_max_samples", "train_dataset.size", ""),
    ("data.prompt_key data.messages_key", "train_dataset.columns", "{prompt: …}; a list of messages is fine"),
    ("data.response_key", "train_dataset.columns", "{completion: …}, with algorithm: sft"),
    ("data.max_length", "train_dataset.max_length", "of the SFT trainer: longer rows are dropped, not cut"),
    ("model.partial_pretrain", "actor.path", "of the SFT trainer, with algorithm: sft"),
    (
        "data.reward_fn_key",
        "train_dataset.mixture",
        "a source can have its own reward; for verl's files set columns: {answer: reward_model.ground_truth}",
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
    (_M + "target_parameters", "actor.target_modules", "add experts to the list: all packed tensors of the experts"),
    (_M + "enable_gradient_checkpointing", "actor.gradient_checkpointing", ""),
    (
        _A + "ppo_mini_batch_size",
        "actor.ppo_n_minibatches",
        "optimizer updates per rollout batch: data.train_batch_size / ppo_mini_batch_size",
    ),
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
    (f"{_A}use_kl_loss {_A}kl_loss_coef", "actor.kl_loss_coef", "above 0 needs a ref section"),
    (_A + "kl_loss_type", "actor.kl_estimator", "kl: k1; mse: k2; low_var_kl: k3"),
    (f"{_A}grad_clip {_A}optim.clip_grad", "actor.optimizer.gradient_clipping", ""),
    (_A + "optim.lr", "actor.optimizer.lr", ""),
    (_A + "optim.optimizer", "actor.optimizer.type", ""),
    (_A + "fsdp_config.optimizer_offload", "actor.optimizer.offload", "one rank"),
    (_A + "optim.weight_decay", "actor.optimizer.weight_decay", ""),
    (_A + "optim.betas", "actor.optimizer.beta1", "and beta2"),
    (f"{_A}optim.lr_warmup_steps {_A}optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps_proportion", ""),
    (f"{_A}optim.lr_scheduler_type {_A}optim.warmup_style", "actor.optimizer.lr_scheduler_type", ""),
    (f"{_A}fsdp_config.dtype {_A}fsdp_config.model_dtype", "actor.dtype", ""),
    (f"{_A}strategy {_A}fsdp_config.fsdp_size", "actor.backend", "fsdp:dN"),
    (_A + "use_prefix_grouper", "actor.share_prefix", ""),
    (f"{_R}n {_A}rollout_n actor_rollout_ref.ref.rollout_n", "gconfig.n_samples", ""),
    (_R + "name", "rollout.backend", "auto, local, vllm:dN; vllm:dN for sglang, too"),
    (f"{_R}tensor_model_parallel_size {_R}data_parallel_size", "rollout.backend", "vllm:dNtM"),
    (_R + "temperature", "gconfig.temperature", ""),
    (_R + "top_p", "gconfig.top_p", ""),
    (_R + "top_k", "gconfig.top_k", "0 keeps all, there -1"),
    (_R + "ignore_eos", "gconfig.ignore_eos", ""),
    (f"{_R}prompt_length {_R}response_length", "gconfig.max_new_tokens", "with train_dataset.max_length"),
    (_R + "max_model_len", "gconfig.max_tokens", ""),
    (_R + "max_num_seqs", "rollout.max_concurrent_rollouts", ""),
    (_R + "val_kwargs.n", "eval_gconfig.n_samples", ""),
    (_R + "val_kwargs.temperature", "eval_gconfig.temperature", ""),
    (_R + "val_kwargs.top_p", "eval_gconfig.top_p", ""),
    (_R + "val_kwargs.top_k", "eval_gconfig.top_k", ""),
    (_R + "val_kwargs.do_sample", "eval_gconfig.temperature", "0 for false"),
    (
        f"{_R}gpu_memory_utilization {_R}engine_kwargs.vllm",
        "vllm",
        "flags below that section are passed on to the server",
    ),
    (f"{_R}calculate_log_probs", "actor.prox_logp_method", "rollout uses the sampler's values as π_old"),
    (
        f"{_A}router_replay.mode {_R}enable_rollout_routing_replay",
        "actor.routing_replay",
        "R2: proximal; R3: rollout; GSPO needs none",
    ),
    (
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "actor.mb_spec.max_tokens_per_mb",
        "it applies to all models",
    ),
    (
        "algorithm.adv_estimator",
        "algorithm",
        "gae: ppo; grpo, rloo, reinforce_plus_plus; or gspo, dapo, …; gdpo: grpo with reward.normalize: each",
    ),
    ("algorithm.norm_adv_by_std_in_grpo", "actor.reward_norm.std_level", "null for false; or algorithm: dr_grpo"),
    (f"{_A}entropy_coeff", "actor.entropy_coef", ""),
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
        "true, or the penalty factor",
    ),
    (
        "reward_model.overlong_buffer.len reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "actor.overlong_tokens",
        "",
    ),
    (
        "reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        "actor.overlong_reward_penalty",
        "the factor in place of true",
    ),
    ("reward_model.reward_manager reward_manager.name", "reward.functions", "[math], [numeric], [module:function], …"),
    ("critic.model.path", "critic.path", ""),
    ("critic.optim.lr", "critic.optimizer.lr", ""),
    ("critic.optim.weight_decay", "actor.optimizer.weight_decay", "it applies to actor and critic"),
    (
        "critic.grad_clip critic.optim.clip_grad",
        "actor.optimizer.gradient_clipping",
        "it applies to actor and critic",
    ),
    ("critic.cliprange_value", "critic.value_eps_clip", ""),
    ("critic.ppo_mini_batch_size", "actor.ppo_n_minibatches", "updates per rollout batch, of actor and critic"),
    (
        "critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu "
        "critic.use_dynamic_bsz",
        "actor.mb_spec.max_tokens_per_mb",
        "it applies to all models",
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
    ("trainer.resume_mode trainer.resume_from_path", "recover.mode", "auto: run the same command again to resume"),
    ("trainer.max_actor_ckpt_to_keep", "saver.keep", ""),
    ("trainer.rollout_data_dir trainer.log_val_generations", "rollout.dump_to_file", "every sample is written"),
)

NEEDLESS: tuple[tuple[str, str], ...] = (
    (_R + "do_sample", "training always samples"),
    (f"{_A}use_remove_padding {_M}use_remove_padding critic.model.use_remove_padding", "nothing is padded"),
    (
        f"{_A}entropy_from_logits_with_chunking {_A}use_fused_kernels {_M}use_fused_kernels {_M}fused_kernel_options.*",
        "logits are computed at trained positions only, in chunks",
    ),
    (f"{_R}log_prob_*", "log-probs of π_old use actor.mb_spec"),
    (
        f"{_R}free_cache_engine {_R}enforce_eager {_R}enable_chunked_prefill {_R}enable_prefix_caching {_R}load_format "
        f"{_R}layered_summon {_R}dtype {_R}max_num_batched_tokens {_R}disable_log_stats {_R}multi_stage_wake_up",
        "write flags of vLLM below vllm, by vLLM's own names",
    ),
    (
        "trainer.balance_batch trainer.device trainer.use_legacy_worker_impl trainer.ray_wait_register_center_timeout "
        "trainer.del_local_ckpt_after_load trainer.default_hdfs_dir trainer.esi_redundant_time "
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout ray_kwargs.* transfer_queue.*",
        "it configures verl's controller",
    ),
    ("trainer.val_only", "use the command gspo eval"),
    ("global_profiler.*", "`profile` writes a timeline"),
    (
        "data.truncation data.return_raw_chat data.return_raw_input_ids data.return_full_prompt "
        "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm data.validation_shuffle",
        "prompts are tokenised once, at the start",
    ),
    (f"{_A}shuffle {_A}data_loader_seed", "mini-batches follow the order of the prompts"),
    (f"{_A}checkpoint.* critic.checkpoint.*", "checkpoints have one format, complete and verified"),
    (f"{_M}use_shm {_M}external_lib {_M}hf_config_path", "models load from a folder or the hub"),
    ("critic.enable", "a critic section turns it on"),
    (f"{_A}loss_scale_factor", "token_sum divides by gconfig.max_new_tokens"),
)

UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (_R + "engine_kwargs.sglang", "gspo has no SGLang; set rollout.backend: vllm:dN and write vLLM's flags below vllm"),
    ("critic.ppo_epochs", "the critic makes one pass over each batch"),
    (
        f"{_A}policy_loss.clip_cov_ratio {_A}policy_loss.clip_cov_lb {_A}policy_loss.clip_cov_ub "
        f"{_A}policy_loss.kl_cov_ratio {_A}policy_loss.ppo_kl_coef",
        "clip-cov and kl-cov are not among the algorithms (`gspo objectives`)",
    ),
    (f"{_A}megatron.* critic.megatron.*", "shard with actor.backend: fsdp:dN"),
    (
        f"{_A}fsdp_config.param_offload {_A}fsdp_config.offload_policy {_M}enable_activation_offload",
        "weights and activations are not offloaded; shard over more ranks, or train with actor.use_lora",
    ),
    (f"{_A}ulysses_sequence_parallel_size", "sequences are not split over ranks"),
    (f"{_A}use_torch_compile", "torch.compile is used for the attention of shared prefixes on CUDA only"),
    (_A + "optim.min_lr_ratio", "linear and cosine schedules end at 0"),
    (f"{_R}multi_turn.* {_R}agent.* data.tool_config_path", "use an environment: env.path"),
    ("algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the KL coefficient is fixed"),
    ("algorithm.use_pf_ppo algorithm.pf_ppo.*", "samples have equal weights"),
    ("trainer.critic_warmup", "critic and policy are trained from the first step"),
    ("data.image_key data.return_multi_modal_inputs", "a row shows the images of its column image or images"),
    ("data.video_key", "videos are not supported"),
    (
        "data.custom_cls.* data.sampler.* data.datagen.*",
        "give rows from Python: Trainer(dataset=…); train_dataset.shuffle: pass_rate draws them by their pass rate",
    ),
    ("reward_model.sandbox_fusion.*", "rewards run in local worker processes"),
    (f"{_M}trust_remote_code data.trust_remote_code", "only models that transformers implements can be loaded"),
)
