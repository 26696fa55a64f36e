"""AReaL's keys of both eras (2025 and 2026), as one table of migration rules.

A rule removes an AReaL key from the tree. It moves the value to our key, or ignores it because gspo does not need it,
or refuses it and names the alternative. Each key gives exactly one message. Braces stand for several keys:
"{actor,ref}.is_critic" is two keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gspo.config import Node, known_keys
from gspo.config import yaml_tree as tree
from gspo.migrate import translate
from gspo.migrate.rule import Move, Rule, drops, only, renames, repeats, translates

_MODELS = "{actor,ref,critic}"
_OTHERS = "{ref,critic}"
_ENGINES = "{rollout,actor,ref,critic}"
_OPTIMIZERS = "{actor,critic}.optimizer"
_SAMPLING = "{gconfig,eval_gconfig}"
_DATA = "{train_dataset,valid_dataset}"
_OFF = (None, False)
_MORE_RANKS = (
    "weights are not offloaded; set actor.optimizer.offload, shard over more ranks with actor.backend, or train with "
    "actor.use_lora"
)


def areal_rules() -> Iterable[Rule]:
    """The table, in the order of application."""
    groups = (_first(), *_objective_rules(), *_engine_rules(), *_sampling_rules(), *_run_rules())
    return (rule for group in groups for rule in group)


def _first() -> list[Rule]:
    """Keys of both systems that mean something else in AReaL. `is_areal` needs the keys that later rules remove."""
    return translates(
        "rollout.backend",
        "in a file of AReaL's, `sglang:dN` becomes `vllm:dN`, with the same sizes",
        _in_place_of_sglang,
    ) + translates("actor.mask_no_eos_with_zero", "in a file of AReaL's, true becomes `reward`", _zero_reward)


def _zero_reward(move: Move) -> None:
    is_theirs = move.node.value is True and is_areal(move.root)
    new = Node("reward", move.node.place, text=move.node.text, settled=True) if is_theirs else move.node
    tree.put(move.root, move.rule.key, new)
    if is_theirs:
        move.say("true is now reward: AReaL sets the reward to 0, before KL and adv_norm; here true is the advantage")


def _in_place_of_sglang(move: Move) -> None:
    """A config that was written for gspo and names sglang stays as it is: the check of the key refuses it."""
    old = move.node.value
    new = translate.in_place_of_sglang(old) if isinstance(old, str) and not move.node.from_command_line else old
    if new == old or not is_areal(move.root):
        tree.put(move.root, move.rule.key, move.node)
        return
    tree.put(move.root, move.rule.key, Node(new, move.node.place, text=new, settled=True))
    move.say(f"{old} is now {new}: gspo has no SGLang")


def is_areal(root: Node) -> bool:
    """Whether a config file was written for AReaL: it has a key that only AReaL has (the command line does not count).

    This is the one place that decides it. What follows from it: `defaults`, and the rules of `_first`.
    """
    theirs = (tree.get(root, rule.key) for rule in areal_rules() if rule.key not in known_keys())
    return any(node is not None and not node.from_command_line for node in theirs)


def defaults(root: Node) -> Mapping[str, tuple[Any, str]]:
    """Values of our keys that a file of AReaL's leaves to AReaL, where gspo's default differs, each with a sentence.

    A file that sets `algorithm`, or a command line that does, asks for gspo's preset with its defaults.
    """
    if not is_areal(root) or any(tree.get(root, key) for key in ("algorithm", "model")):
        return {}

    def value(key: str) -> Any:
        node = tree.get(root, f"actor.{key}")
        return None if node is None else node.data()

    found: dict[str, tuple[Any, str]] = {
        "algorithm": ("grpo", ""),
        "actor.loss_aggregation": ("token_mean", "GRPO and GSPO by their papers: sequence_mean"),
    }
    # A section that is there has `batch` for a level that it does not name.
    for norm in ("reward_norm", "adv_norm"):
        missing = [level for level in ("mean_level", "std_level") if level not in (value(norm) or {})]
        if isinstance(value(norm), dict):
            found |= {f"actor.{norm}.{level}": ("batch", "null: none") for level in missing}
        elif norm == "reward_norm" and value(norm) is None:
            why = "rewards are not normalised; GRPO and GSPO: {mean_level: group, std_level: group}"
            found["actor.reward_norm"] = ({"mean_level": None, "std_level": None}, why)
    if value("importance_sampling_level") == "sequence":
        found["actor.eps_clip"] = (0.2, "GSPO by its paper: remove importance_sampling_level, set algorithm: gspo")
    limits = ("rejection_sampling", "behav_imp_weight_cap", "behave_imp_weight_cap", "behave_imp_weight_mode")
    if any(value(key) is not None for key in limits):
        found["actor.use_decoupled_loss"] = (False, "without it, the limits of π_old/μ have no effect")
    if not value("use_decoupled_loss"):
        found["actor.prox_logp_method"] = ("rollout", "auto: recompute where the sampler's noise needs it")
    if isinstance((tree.get(root, "ref") or Node(None, "")).value, dict):
        found["actor.kl_ctl"] = (0.1, "0: no KL in the reward")
    if isinstance((tree.get(root, "critic") or Node(None, "")).value, dict):
        found["critic.value_eps_clip"] = (0.5, "the default here is 0.2")
        del found["algorithm"]  # a critic means ppo, here too
    return found


def _objective_rules() -> Iterable[list[Rule]]:
    cap = "`actor.rejection_sampling`, together with the other behav(e)_imp_weight key"
    recompute = "metrics and reuse_train_logp become recompute; mini-batch 1 reuses its own forward pass"
    return (
        # First: the rules of actor then apply to its keys.
        translates("model", "of AReaL's SFTConfig: `actor`, with `algorithm: sft`", translate.sft_model),
        translates(
            "actor.{behav_imp_weight_cap,behave_imp_weight_cap,behave_imp_weight_mode}", cap, translate.weight_cap
        ),
        translates("actor.group_size", "`gconfig.n_samples`", translate.group_size),
        translates(
            "actor.dynamic_sampling", "`actor.zero_variance_groups`: refill, false: count", translate.dynamic_sampling
        ),
        translates("dynamic_bs", "`actor.zero_variance_groups: drop` if true", translate.dynamic_bs),
        translates(
            "async_training",
            "false: `rollout.max_head_offpolicyness: 0`; true: that key decides",
            translate.async_training,
        ),
        translates("actor.use_sapo_loss", "`algorithm: sapo` if true", translate.loss_switch("sapo")),
        translates("actor.use_cispo_loss", "`algorithm: cispo` if true", translate.loss_switch("cispo")),
        translates(
            "actor.prox_logp_method",
            recompute,
            translate.values_of({"metrics": "recompute", "reuse_train_logp": "recompute"}),
        ),
        translates(
            "actor.{recompute_logprob,recompute_logprobs}",
            "`actor.prox_logp_method` unless that is set: recompute if true; if false rollout, or recompute with the "
            "decoupled loss",
            translate.recompute_logprob,
        ),
        repeats("actor.temperature", "gconfig.temperature"),
        repeats("actor.max_new_tokens", "gconfig.max_new_tokens"),
        translates(
            "actor.{reward_norm,adv_norm}.group_size",
            "accepted if it is equal to `gconfig.n_samples`; ignored without a group level",
            translate.norm_group_size,
        ),
        only("actor.{reward_norm,adv_norm}.std_unbiased", (None, True), "the variance divides by n − 1; remove it"),
        only(
            "actor.{reward_norm,adv_norm}.eps",
            lambda move: move.node.value is None or (move.is_number and 0 <= move.node.value <= 1e-4),
            "nothing is added to a std, and equal rewards have advantage 0; remove it",
        ),
        only("actor.adv_norm.mean_leave1out", _OFF, "set actor.reward_norm.mean_level: leave1out, or algorithm: rloo"),
        translates(
            "actor.overlong_penalty_factor",
            "`actor.overlong_reward_penalty`, in place of true",
            translate.overlong_penalty_factor,
        ),
        translates("actor.reward_norm.mean_leave1out", "`mean_level: leave1out` if true", translate.mean_leave1out),
        renames("critic.eps_clip", "critic.value_eps_clip"),
        renames("actor.enable_tree_training", "actor.share_prefix"),
        repeats("critic.mask_no_eos_with_zero", "actor.mask_no_eos_with_zero"),
        only("actor.m2_threshold", (None,), "there is no M2PO; limit π_old/μ with actor.rejection_sampling"),
        drops("actor.{log_agent_stats,log_agent_stats_keys}", "every sample is logged"),
    )


def _engine_rules() -> Iterable[list[Rule]]:
    return (
        translates(
            "allocation_mode",
            "`rollout.backend` and `actor.backend`, with vLLM in place of SGLang",
            translate.allocation_mode,
        ),
        translates(_MODELS + ".{archon,megatron}", "refused: use `actor.backend: fsdp:dN`", translate.engine_section),
        translates(_OTHERS + ".backend", "ignored: it follows `actor.backend`", translate.engine_backend),
        translates(
            "actor.weight_update_mode",
            "nccl and xccl become broadcast",
            translate.values_of({"nccl": "broadcast", "xccl": "broadcast"}),
        ),
        translates("actor.mb_spec.max_tokens_per_mb", "null becomes the default", translate.values_of({}, True)),
        drops(
            "actor.mb_spec.{n_mbs,n_mbs_divisor,granularity,packing_algorithm}",
            "it changes speed only; gspo packs micro-batches up to max_tokens_per_mb",
        ),
        drops(_OTHERS + ".mb_spec", "it changes memory and speed only; micro-batches follow actor.mb_spec"),
        drops("actor.logprobs_chunk_size", "it changes memory only; the LM head computes 256 positions at a time"),
        only(
            _OTHERS + ".dtype",
            lambda move: move.node.value in (None, "auto", move.value_of("actor.dtype")),
            "it is actor.dtype; remove it",
        ),
        repeats("critic.ppo_n_minibatches", "actor.ppo_n_minibatches"),
        only(_OPTIMIZERS + ".min_lr_ratio", (None, 0), "linear and cosine schedules end at 0; remove it"),
        repeats("critic.optimizer.{type,weight_decay,gradient_clipping,lr_scheduler_type}", "actor.optimizer."),
        repeats("critic.optimizer.{warmup_steps_proportion,beta1,beta2,eps}", "actor.optimizer."),
        drops("actor.attn_impl", "gspo chooses the attention kernel: sdpa, or flex attention on CUDA"),
        only("actor.disable_dropout", (None, True), "with dropout the ratio of a policy to itself is not 1; remove it"),
        drops(
            "{rollout,actor,ref,critic,train_dataset,valid_dataset}.scheduling_spec",
            "rollout.backend and actor.backend place the processes",
        ),
        drops(_ENGINES + ".scheduling_strategy", "rollout.backend and actor.backend place the processes"),
        drops("sglang", "gspo has no SGLang; flags of vLLM are keys below vllm"),
        drops("launcher", "the launcher uses the resources that the scheduler grants"),
        drops(_ENGINES + ".{_version,admin_api_key,log_level,setup_timeout}", "it configures AReaL's RPC service"),
        drops(_MODELS + ".request_timeout", "it configures AReaL's RPC service"),
        drops(_MODELS + ".is_critic", "the name of the section says which model it is"),
        drops(_MODELS + ".fsdp.{wrap_policy,memory_efficient_load}", "layers are always wrapped and loaded one by one"),
        drops(_MODELS + ".fsdp.optim_step_prefetch_layers", "the optimizer steps all layers at once"),
        drops(_OTHERS + ".{disable_dropout,weight_update_mode}", "only the actor has it"),
        drops(_OTHERS + ".{attn_impl,gradient_checkpointing}", "it follows the actor"),
        drops(
            _OPTIMIZERS + ".{initial_loss_scale,min_loss_scale,loss_scale_window,hysteresis}", "losses are not scaled"
        ),
        only(_OTHERS + ".{init_from_scratch,use_lora}", _OFF, "only the actor has it; set it there"),
        drops("ref.optimizer", "the reference is not trained"),
        drops(_MODELS + ".pad_to_maximum", "sequences are packed without padding"),
        drops(_OTHERS + ".enable_tree_training", "only the actor has it"),
        only(_MODELS + ".use_kernels", _OFF, "custom kernels are not supported; remove it"),
        only(_MODELS + ".grad_reduce_dtype", (None, "float32"), "gradients are summed in float32; remove it"),
        only("actor.fsdp.reduce_dtype", (None, "float32"), "gradients are summed in float32; remove it"),
        only("actor.peft_type", (None, "lora"), "LoRA is the only adapter; set actor.use_lora"),
        only("{enable_offload,actor.offload,ref.offload,critic.offload}", _OFF, _MORE_RANKS),
        only(_MODELS + ".fsdp.{offload_params,per_layer_optim_step,shard_vision_across_sp}", _OFF, _MORE_RANKS),
        only("critic.optimizer.offload", _OFF, "the critic follows actor.optimizer.offload"),
    )


def _sampling_rules() -> Iterable[list[Rule]]:
    controller = "it configures AReaL's rollout controller"
    return (
        translates(_SAMPLING + ".top_k", "-1 and AReaL's 100000000 become 0, all tokens", translate.top_k),
        repeats("eval_gconfig.min_new_tokens", "gconfig.min_new_tokens"),
        repeats("eval_gconfig.ignore_eos", "gconfig.ignore_eos"),
        repeats("eval_gconfig.stop", "gconfig.stop"),
        only("eval_gconfig.stop_token_ids", translate.is_as_in_sampling, "it is that of gconfig; remove it"),
        translates("gconfig.stop_token_ids", "integers in `gconfig.stop`", translate.stop_token_ids),
        drops("eval_gconfig.max_tokens", "gconfig.max_tokens applies to evaluation too"),
        translates("rollout.consumer_batch_size", "`train_dataset.batch_size`", translate.consumer_batch_size),
        only(
            "rollout.queue_size",
            translate.adds_no_limit,
            "lower rollout.max_head_offpolicyness, or set rollout.max_concurrent_rollouts, and remove it",
        ),
        only("rollout.request_retries", (None, 3), "a request is retried 3 times; remove it"),
        translates(_SAMPLING + ".greedy", "true: temperature 0", translate.greedy),
        drops(_SAMPLING + ".skip_special_tokens", "rewards get the decoded completion; training uses its tokens"),
        drops(_SAMPLING + ".lora_name", "samplers use the adapter of the actor"),
        only(_SAMPLING + ".frequency_penalty", (None, 0), "the log-probs would not be those of the policy; remove it"),
        only(_SAMPLING + ".use_beam_search", _OFF, "beam search does not sample from the policy; remove it"),
        repeats("rollout.tokenizer_path", "tokenizer_path"),
        repeats("rollout.use_lora", "actor.use_lora"),
        drops("rollout.enable_rollout_tracing", "samples are written to samples/, `profile: true` writes a timeline"),
        drops("rollout.{check_trajectory_format,schedule_policy,pause_grace_period}", controller),
        drops("rollout.{routing_strategy,poll_interval,model}", controller),
        only(
            "rollout.return_routed_experts", _OFF, "set actor.routing_replay: rollout instead (GSPO does not need it)"
        ),
        only("rollout.{agent,openai,api_url,provider_api_key}", (None,), "set env.agent (docs/agents.md)"),
    )


def _run_rules() -> Iterable[list[Rule]]:
    modes = {True: "auto", False: "disabled", "on": "auto", "off": "disabled", "resume": "auto", "fault": "auto"}
    wandb = "{wandb_base_url,wandb_api_key,entity,project,name,job_type,group,notes,tags,config,id_suffix}"
    services = "{endpoint,deploy_mode,functioncall_service_domain,reward_functioncall_config,reward_model_service_url}"
    return (
        repeats("{rollout,actor,ref,critic,saver,recover,evaluator,stats_logger}.experiment_name", "experiment_name"),
        repeats("{rollout,actor,ref,critic,saver,recover,evaluator,stats_logger}.trial_name", "trial_name"),
        repeats("{rollout,saver,recover,evaluator,stats_logger}.fileroot", "cluster.fileroot"),
        renames("evaluator.eval_before_train", "evaluator.at_start"),
        translates(
            "recover.mode", "on, resume and fault become auto, off becomes disabled", translate.values_of(modes)
        ),
        translates("perf_tracer", "`profile: true` if enabled", translate.perf_tracer),
        translates("stats_logger.tensorboard", "true if a path is given, else false", translate.tensorboard),
        drops("memory_profiler", "`gspo doctor` estimates memory, `profile` writes a timeline"),
        drops(
            _DATA + ".{pin_memory,num_workers,num_dataset_workers,setup_timeout,_version}",
            "all prompts are loaded at the start",
        ),
        drops(_DATA + ".drop_last", "prompts form an endless stream of full batches"),
        only(_DATA + ".type", translate.is_algorithms_type, "set algorithm: sft to train on completions, or remove it"),
        drops("valid_dataset.{batch_size,shuffle}", "evaluation uses the first evaluator.size problems in file order"),
        only("valid_dataset.max_length", translate.is_as_in_training, "it is train_dataset.max_length; remove it"),
        only(_DATA + ".dataset_kwargs", (None, {}), "write the rows to a file and set path to that file"),
        only("total_train_n_seqs", (None,), "set total_train_steps instead"),
        translates(
            "saver.freq_secs", "`recover.freq_secs`, the smaller value", translate.smaller_of("recover.freq_secs")
        ),
        translates(
            "recover.freq_steps", "`saver.freq_steps`, the smaller value", translate.smaller_of("saver.freq_steps")
        ),
        translates(
            "{saver,recover}.freq_epochs",
            "`saver.freq_steps: epoch`, `2 epochs`, …; the smaller value",
            translate.freq_epochs("saver.freq_steps"),
        ),
        translates(
            "evaluator.freq_epochs",
            "`evaluator.freq_steps: epoch`, `2 epochs`, …",
            translate.freq_epochs("evaluator.freq_steps"),
        ),
        only("evaluator.freq_secs", (None,), "set evaluator.freq_steps"),
        drops("saver.mode", "checkpoints have one format, complete and verified"),
        drops(
            "recover.retries",
            "run the same command again to resume; `scheduler.restarts` limits the restarts of a launcher",
        ),
        only(
            "recover.{no_save_optim,no_load_optim}",
            _OFF,
            "a run always resumes with its optimizer; set another trial_name for a new run",
        ),
        drops("stats_logger.wandb." + wandb, "set the WANDB_* environment variables"),
        translates("stats_logger.trackio", "true if its mode is not disabled", translate.trackio),
        translates("stats_logger.swanlab", "ignored if disabled, else refused", translate.other_logger),
        drops("cluster.cluster_name", "experiment_name and trial_name name a run"),
        drops("cluster.name_resolve", "gspo needs no service discovery"),
        drops("scheduler." + services, "rewards run in local worker processes"),
        only("scheduler.reward_model_path", (None, ""), "write reward.functions: [{name: reward_model, path: …}]"),
    )
