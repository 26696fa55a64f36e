"""AReaL's keys of both eras (2025 and 2026), as one table of migration rules.

A rule removes an AReaL key from the tree. It moves the value to our key, or ignores it because gspo does not need it,
or refuses it and names the alternative. Each key gives exactly one message. Braces stand for several keys:
"{actor,ref}.is_critic" is two keys.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gspo.config import yaml_tree as tree
from gspo.config.migrate import translate
from gspo.config.migrate.rule import Move, Rule, apply
from gspo.config.yaml_tree import Node, is_failed

_MODELS = "{actor,ref,critic}"
_OTHERS = "{ref,critic}"
_ENGINES = "{rollout,actor,ref,critic}"
_OPTIMIZERS = "{actor,critic}.optimizer"
_SAMPLING = "{gconfig,eval_gconfig}"
_DATA = "{train_dataset,valid_dataset}"
_OFF = (None, False)
_MORE_RANKS = "there is no offloading; shard over more ranks with actor.backend, or train with actor.use_lora"


def _expand(pattern: str) -> list[str]:
    """The keys of a pattern.

    >>> _expand("{saver,recover}.{a,b}")
    ['saver.a', 'saver.b', 'recover.a', 'recover.b']
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [key for part in match[1].split(",") for key in _expand(head + part + tail)]


def _rename(old: str, target: str) -> list[Rule]:
    return [Rule(old, "rename", target=target)]


def _repeat(pattern: str, target: str) -> list[Rule]:
    return [Rule(key, "repeat", target=target) for key in _expand(pattern)]


def _drop(pattern: str, reason: str) -> list[Rule]:
    return [Rule(key, "drop", reason=reason) for key in _expand(pattern)]


def _only(pattern: str, harmless: tuple[Any, ...], instead: str) -> list[Rule]:
    """Ignore these values, refuse all others."""
    return [Rule(key, "drop", harmless=harmless, instead=instead) for key in _expand(pattern)]


def _translate(pattern: str, reason: str, translation: Callable[[Move], None]) -> list[Rule]:
    return [Rule(key, "translate", reason=reason, translate=translation) for key in _expand(pattern)]


@functools.cache
def rules() -> Mapping[str, Rule]:
    """The table by AReaL's key, in the order of application."""
    groups = (*_objective_rules(), *_engine_rules(), *_sampling_rules(), *_run_rules())
    return types.MappingProxyType({rule.key: rule for group in groups for rule in group})


def _objective_rules() -> Iterable[list[Rule]]:
    cap = "`actor.rejection_sampling`, together with the other behav(e)_imp_weight key"
    recompute = "metrics and reuse_train_logp become recompute; mini-batch 1 reuses its own forward pass"
    return (
        _translate(
            "actor.{behav_imp_weight_cap,behave_imp_weight_cap,behave_imp_weight_mode}", cap, translate.weight_cap
        ),
        _translate("actor.group_size", "`gconfig.n_samples`", translate.group_size),
        _translate(
            "actor.dynamic_sampling", "`actor.zero_variance_groups`: refill, false: count", translate.dynamic_sampling
        ),
        _translate("dynamic_bs", "`actor.zero_variance_groups: drop` if true", translate.dynamic_bs),
        _translate(
            "async_training",
            "false: `rollout.max_head_offpolicyness: 0`; true: that key decides",
            translate.async_training,
        ),
        _translate("actor.use_sapo_loss", "`algorithm: sapo` if true", translate.loss_switch("sapo")),
        _translate("actor.use_cispo_loss", "`algorithm: cispo` if true", translate.loss_switch("cispo")),
        _translate(
            "actor.prox_logp_method",
            recompute,
            translate.values_of({"metrics": "recompute", "reuse_train_logp": "recompute"}),
        ),
        _translate("actor.overlong_penalty_factor", "null becomes the default", translate.values_of({}, True)),
        _rename("actor.recompute_logprobs", "actor.recompute_logprob"),
        _rename("critic.eps_clip", "critic.value_eps_clip"),
        _rename("actor.enable_tree_training", "actor.share_prefix"),
        _repeat("critic.mask_no_eos_with_zero", "actor.mask_no_eos_with_zero"),
        _only("actor.m2_threshold", (None,), "there is no M2PO; limit π_old/μ with actor.rejection_sampling"),
        _only("teacher", (None,), "there is no distillation; remove it"),
        _drop("actor.{log_agent_stats,log_agent_stats_keys}", "every sample is logged"),
    )


def _engine_rules() -> Iterable[list[Rule]]:
    return (
        _translate("allocation_mode", "`rollout.backend` and `actor.backend`", translate.allocation_mode),
        _translate(_MODELS + ".{archon,megatron}", "refused: use `actor.backend: fsdp:dN`", translate.engine_section),
        _translate(_OTHERS + ".backend", "ignored: it follows `actor.backend`", translate.engine_backend),
        _translate(
            "actor.weight_update_mode",
            "nccl and xccl become broadcast",
            translate.values_of({"nccl": "broadcast", "xccl": "broadcast"}),
        ),
        _translate(_MODELS + ".mb_spec.max_tokens_per_mb", "null becomes the default", translate.values_of({}, True)),
        _drop(_MODELS + ".mb_spec.n_mbs_divisor", "micro-batches need no divisor"),
        _drop(
            "{rollout,actor,ref,critic,train_dataset,valid_dataset}.scheduling_spec",
            "rollout.backend and actor.backend place the processes",
        ),
        _drop(_ENGINES + ".scheduling_strategy", "rollout.backend and actor.backend place the processes"),
        _drop("launcher", "the launcher uses the resources that the scheduler grants"),
        _drop(_ENGINES + ".{_version,admin_api_key,log_level,setup_timeout}", "it configures AReaL's RPC service"),
        _drop(_MODELS + ".request_timeout", "it configures AReaL's RPC service"),
        _drop(_MODELS + ".is_critic", "the name of the section says which model it is"),
        _drop(_MODELS + ".fsdp.{wrap_policy,memory_efficient_load}", "layers are always wrapped and loaded one by one"),
        _drop(_MODELS + ".fsdp.optim_step_prefetch_layers", "the optimizer steps all layers at once"),
        _drop(_OTHERS + ".{disable_dropout,weight_update_mode}", "only the actor has it"),
        _drop(_OTHERS + ".{attn_impl,gradient_checkpointing}", "it follows the actor"),
        _drop(
            _OPTIMIZERS + ".{initial_loss_scale,min_loss_scale,loss_scale_window,hysteresis}", "losses are not scaled"
        ),
        _only(_OTHERS + ".{init_from_scratch,use_lora}", _OFF, "only the actor has it; set it there"),
        _drop("ref.optimizer", "the reference is not trained"),
        _drop(_MODELS + ".pad_to_maximum", "sequences are packed without padding"),
        _drop(_OTHERS + ".enable_tree_training", "only the actor has it"),
        _only(_MODELS + ".use_kernels", _OFF, "custom kernels are not supported; remove it"),
        _only(_MODELS + ".grad_reduce_dtype", (None, "float32"), "set actor.fsdp.reduce_dtype instead"),
        _only("actor.peft_type", (None, "lora"), "LoRA is the only adapter; set actor.use_lora"),
        _only("{enable_offload,actor.offload,ref.offload,critic.offload}", _OFF, _MORE_RANKS),
        _only(_MODELS + ".fsdp.{offload_params,per_layer_optim_step,shard_vision_across_sp}", _OFF, _MORE_RANKS),
        _only(_OPTIMIZERS + ".offload", _OFF, _MORE_RANKS),
    )


def _sampling_rules() -> Iterable[list[Rule]]:
    controller = "it configures AReaL's rollout controller"
    return (
        _translate(_SAMPLING + ".top_k", "-1 and AReaL's 100000000 become 0, all tokens", translate.top_k),
        _drop(_SAMPLING + ".skip_special_tokens", "rewards get the decoded completion; training uses its tokens"),
        _drop(_SAMPLING + ".lora_name", "samplers use the adapter of the actor"),
        _only(_SAMPLING + ".frequency_penalty", (None, 0), "the log-probs would not be those of the policy; remove it"),
        _only(_SAMPLING + ".use_beam_search", _OFF, "beam search does not sample from the policy; remove it"),
        _repeat("rollout.tokenizer_path", "tokenizer_path"),
        _repeat("rollout.use_lora", "actor.use_lora"),
        _drop("rollout.enable_rollout_tracing", "samples are written to samples/, `profile: true` writes a timeline"),
        _drop("rollout.{check_trajectory_format,schedule_policy,pause_grace_period}", controller),
        _drop("rollout.{routing_strategy,poll_interval,model}", controller),
        _only(
            "rollout.return_routed_experts", _OFF, "set actor.routing_replay: rollout instead (GSPO does not need it)"
        ),
        _only(
            "rollout.{agent,openai,api_url,provider_api_key}", (None,), "set env.agent or env.command (docs/agents.md)"
        ),
    )


def _run_rules() -> Iterable[list[Rule]]:
    modes = {True: "auto", False: "disabled", "on": "auto", "off": "disabled"}
    wandb = "{wandb_base_url,wandb_api_key,entity,name,job_type,group,notes,tags,config,id_suffix}"
    services = "{endpoint,deploy_mode,functioncall_service_domain,reward_functioncall_config,reward_model_service_url}"
    return (
        _repeat("{rollout,actor,ref,critic,saver,recover,evaluator,stats_logger}.experiment_name", "experiment_name"),
        _repeat("{rollout,actor,ref,critic,saver,recover,evaluator,stats_logger}.trial_name", "trial_name"),
        _repeat("{rollout,saver,recover,evaluator,stats_logger}.fileroot", "cluster.fileroot"),
        _rename("evaluator.eval_before_train", "evaluator.at_start"),
        _translate("recover.mode", "on becomes auto, off becomes disabled", translate.values_of(modes)),
        _translate("perf_tracer", "`profile: true` if enabled", translate.perf_tracer),
        _translate("stats_logger.tensorboard", "true if a path is given, else false", translate.tensorboard),
        _drop("memory_profiler", "`gspo doctor` estimates memory, `profile` writes a timeline"),
        _drop(
            _DATA + ".{pin_memory,num_workers,num_dataset_workers,setup_timeout,_version}",
            "all prompts are loaded at the start",
        ),
        _drop(_DATA + ".drop_last", "prompts form an endless stream of full batches"),
        _only(_DATA + ".dataset_kwargs", (None, {}), "write the rows to a file and set path to that file"),
        _only("total_train_n_seqs", (None,), "set total_train_steps instead"),
        _drop("saver.mode", "checkpoints have one format, complete and verified"),
        _drop(
            "recover.retries",
            "run the same command again to resume; `scheduler.restarts` limits the restarts of a launcher",
        ),
        _only(
            "recover.{no_save_optim,no_load_optim}",
            _OFF,
            "a run always resumes with its optimizer; set another trial_name for a new run",
        ),
        _drop("stats_logger.wandb." + wandb, "set the WANDB_* environment variables"),
        _translate("stats_logger.trackio", "true if its mode is not disabled", translate.trackio),
        _translate("stats_logger.swanlab", "ignored if disabled, else refused", translate.other_logger),
        _drop("cluster.cluster_name", "experiment_name and trial_name name a run"),
        _drop("cluster.name_resolve", "gspo needs no service discovery"),
        _drop("scheduler." + services, "rewards run in local worker processes"),
        _only("scheduler.reward_model_path", (None, ""), "write reward.functions: [{name: reward_model, path: …}]"),
    )


# -- Use of the table -------------------------------------------------------------------------------------------


def migrate(root: Node, problems: list[str], messages: list[str]) -> None:
    """Replace AReaL's keys in a tree by ours, in place; one message for each AReaL key."""
    for rule in rules().values():
        node = tree.pop(root, rule.key)
        if node is not None and not is_failed(node):
            apply(Move(rule, node, root, problems, messages))
    _sweep(root)


def _sweep(root: Node) -> None:
    """Remove sections of AReaL that are empty after the rules."""
    for key in ("actor.fsdp", "ref.fsdp", "critic.fsdp"):
        node = tree.get(root, key)
        if node is not None and node.value in (None, {}):
            tree.pop(root, key)


def _aliases() -> Iterable[tuple[str, str]]:
    for rule in rules().values():
        if rule.kind == "rename":
            yield rule.key, rule.target
    yield "actor.group_size", "gconfig.n_samples"
    yield "actor.dynamic_sampling", "actor.zero_variance_groups"
    yield "dynamic_bs", "actor.zero_variance_groups"
    yield "async_training", "rollout.max_head_offpolicyness"
    for name in ("behav_imp_weight_cap", "behave_imp_weight_cap", "behave_imp_weight_mode"):
        yield f"actor.{name}", "actor.rejection_sampling"
    for key in ("rollout.backend", "actor.backend"):
        yield "allocation_mode", key
    for key in ("actor.use_sapo_loss", "actor.use_cispo_loss"):
        yield key, "algorithm"


def spellings(key: str) -> list[str]:
    """AReaL's names of one of our keys, and our names of one of AReaL's keys.

    >>> spellings("gconfig.n_samples"), spellings("actor.group_size")
    (['actor.group_size'], ['gconfig.n_samples'])
    """
    return [old for old, new in _aliases() if new == key] + [new for old, new in _aliases() if old == key]


def renamed(key: str) -> str:
    """Our name of a key; the key itself if its value does not simply move."""
    rule = rules().get(key)
    if key == "actor.group_size":
        return "gconfig.n_samples"
    return rule.target if rule is not None and rule.kind in ("rename", "repeat") else key


def is_known(key: str) -> bool:
    """Whether the table has this AReaL key."""
    return key in rules()
