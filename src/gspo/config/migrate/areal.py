"""What AReaL called things, in both its eras, and what became of them here: one table.

A rule takes a key out of the tree and either moves its value to our key, drops it because we need no such thing, or
refuses it with a sentence that says what to use instead. Each key handled leaves exactly one message; nothing is
ignored in silence. Keys are written with braces: "{actor,ref}.is_critic" is two keys.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gspo.config import yaml_tree as tree
from gspo.config.migrate import moves
from gspo.config.migrate.moves import Move, Rule
from gspo.config.yaml_tree import Node, is_failed

_MODELS = "{actor,ref,critic}"
_OTHERS = "{ref,critic}"
_ENGINES = "{rollout,actor,ref,critic}"
_OPTIMIZERS = "{actor,critic}.optimizer"
_SAMPLING = "{gconfig,eval_gconfig}"
_DATA = "{train_dataset,valid_dataset}"
_OFF = (None, False)
_MORE_RANKS = "offloading is not offered; shard over more ranks with actor.backend, or train with actor.use_lora"


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
    """Dropped where it asks for nothing special, refused otherwise."""
    reason = "it asks for nothing special"
    return [Rule(key, "drop", harmless=harmless, reason=reason, instead=instead) for key in _expand(pattern)]


def _translate(pattern: str, reason: str, translation: Callable[[Move], None]) -> list[Rule]:
    return [Rule(key, "translate", reason=reason, translate=translation) for key in _expand(pattern)]


@functools.cache
def rules() -> Mapping[str, Rule]:
    """The table by AReaL's key, in the order in which it is applied."""
    groups = (*_objective_rules(), *_engine_rules(), *_sampling_rules(), *_run_rules())
    return types.MappingProxyType({rule.key: rule for group in groups for rule in group})


def _objective_rules() -> Iterable[list[Rule]]:
    cap = "`actor.rejection_sampling`, together with the other behav(e)_imp_weight key"
    recompute = "metrics and reuse_train_logp become recompute, where mini-batch 1 reuses its own forward"
    return (
        _translate("actor.{behav_imp_weight_cap,behave_imp_weight_cap,behave_imp_weight_mode}", cap, moves.weight_cap),
        _translate("actor.group_size", "`gconfig.n_samples`", moves.group_size),
        _translate(
            "actor.dynamic_sampling", "`actor.zero_variance_groups`: refill, false: count", moves.dynamic_sampling
        ),
        _translate("dynamic_bs", "`actor.zero_variance_groups: drop` where true", moves.dynamic_bs),
        _translate(
            "async_training", "false: `rollout.max_head_offpolicyness: 0`; true: that key decides", moves.async_training
        ),
        _translate("actor.use_sapo_loss", "`algorithm: sapo` where true", moves.loss_switch("sapo")),
        _translate("actor.use_cispo_loss", "`algorithm: cispo` where true", moves.loss_switch("cispo")),
        _translate(
            "actor.prox_logp_method",
            recompute,
            moves.values_of({"metrics": "recompute", "reuse_train_logp": "recompute"}),
        ),
        _translate("actor.overlong_penalty_factor", "null becomes the default", moves.values_of({}, True)),
        _rename("actor.recompute_logprobs", "actor.recompute_logprob"),
        _rename("critic.eps_clip", "critic.value_eps_clip"),
        _rename("actor.enable_tree_training", "actor.share_prefix"),
        _repeat("critic.mask_no_eos_with_zero", "actor.mask_no_eos_with_zero"),
        _only("actor.m2_threshold", (None,), "M2PO is not offered; bound π_old/μ with actor.rejection_sampling"),
        _only("teacher", (None,), "distillation is not offered; remove it"),
        _drop("actor.{log_agent_stats,log_agent_stats_keys}", "every sample is logged anyway"),
    )


def _engine_rules() -> Iterable[list[Rule]]:
    return (
        _translate("allocation_mode", "`rollout.backend` and `actor.backend`", moves.allocation_mode),
        _translate(_MODELS + ".{archon,megatron}", "refused: use `actor.backend: fsdp:dN`", moves.engine_section),
        _translate(_OTHERS + ".backend", "dropped: it follows `actor.backend`", moves.engine_backend),
        _translate(
            "actor.weight_update_mode",
            "nccl and xccl become broadcast",
            moves.values_of({"nccl": "broadcast", "xccl": "broadcast"}),
        ),
        _translate(_MODELS + ".mb_spec.max_tokens_per_mb", "null becomes the default", moves.values_of({}, True)),
        _drop(_MODELS + ".mb_spec.n_mbs_divisor", "micro-batches need no divisor"),
        _drop(
            "{rollout,actor,ref,critic,train_dataset,valid_dataset}.scheduling_spec", "backend strings place processes"
        ),
        _drop(_ENGINES + ".scheduling_strategy", "backend strings place processes"),
        _drop("launcher", "launchers take what the scheduler grants"),
        _drop(_ENGINES + ".{_version,admin_api_key,log_level,setup_timeout}", "it belongs to AReaL's RPC service"),
        _drop(_MODELS + ".request_timeout", "it belongs to AReaL's RPC service"),
        _drop(_MODELS + ".is_critic", "the section says which model it is"),
        _drop(_MODELS + ".fsdp.{wrap_policy,memory_efficient_load}", "layers are wrapped and loaded one by one"),
        _drop(_MODELS + ".fsdp.optim_step_prefetch_layers", "the optimizer steps all layers at once"),
        _drop(_OTHERS + ".{disable_dropout,weight_update_mode}", "it means the actor only"),
        _drop(_OTHERS + ".{attn_impl,gradient_checkpointing}", "it follows the actor's"),
        _drop(
            _OPTIMIZERS + ".{initial_loss_scale,min_loss_scale,loss_scale_window,hysteresis}", "losses are not scaled"
        ),
        _only(_OTHERS + ".{init_from_scratch,use_lora}", _OFF, "not offered for this model; set it for the actor"),
        _drop("ref.optimizer", "the reference is not trained"),
        _drop(_MODELS + ".pad_to_maximum", "sequences are packed without padding"),
        _drop(_OTHERS + ".enable_tree_training", "it means the actor only"),
        _only(_MODELS + ".use_kernels", _OFF, "not offered; choose the attention with actor.attn_impl"),
        _only(_MODELS + ".grad_reduce_dtype", (None, "float32"), "gradients are reduced in float32; remove it"),
        _only("actor.peft_type", (None, "lora"), "LoRA is the one adapter; set actor.use_lora"),
        _only("{enable_offload,actor.offload,ref.offload,critic.offload}", _OFF, _MORE_RANKS),
        _only(_MODELS + ".fsdp.{offload_params,per_layer_optim_step,shard_vision_across_sp}", _OFF, _MORE_RANKS),
        _only(_OPTIMIZERS + ".offload", _OFF, _MORE_RANKS),
    )


def _sampling_rules() -> Iterable[list[Rule]]:
    controller = "it belongs to AReaL's rollout controller"
    return (
        _translate(_SAMPLING + ".top_k", "-1 and AReaL's 100000000 become 0, all tokens", moves.top_k),
        _drop(_SAMPLING + ".skip_special_tokens", "completions are tokens; their text is only shown"),
        _drop(_SAMPLING + ".lora_name", "samplers hold one adapter, the actor's"),
        _only(_SAMPLING + ".frequency_penalty", (None, 0), "log-probs would not be the policy's; remove it"),
        _only(_SAMPLING + ".use_beam_search", _OFF, "beams are not samples of the policy; remove it"),
        _repeat("rollout.tokenizer_path", "tokenizer_path"),
        _repeat("rollout.use_lora", "actor.use_lora"),
        _drop("rollout.enable_rollout_tracing", "rollout.dump_to_file and profile show what it traced"),
        _drop("rollout.{check_trajectory_format,schedule_policy,pause_grace_period}", controller),
        _drop("rollout.{routing_strategy,poll_interval,model}", controller),
        _only("rollout.return_routed_experts", _OFF, "set actor.routing_replay: rollout instead; GSPO needs none"),
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
        _translate("recover.mode", "on becomes auto, off becomes disabled", moves.values_of(modes)),
        _translate("perf_tracer", "`profile: true` where enabled", moves.perf_tracer),
        _translate("stats_logger.tensorboard", "true where a path is given, else false", moves.tensorboard),
        _drop("memory_profiler", "`gspo doctor` estimates memory, `profile` writes a timeline"),
        _drop(_DATA + ".{pin_memory,num_workers,num_dataset_workers,setup_timeout,_version}", "prompts load at once"),
        _drop(_DATA + ".drop_last", "prompts are an endless stream of full batches"),
        _only(_DATA + ".dataset_kwargs", (None, {}), "write the rows to a file and set path to it"),
        _only("total_train_n_seqs", (None,), "set total_train_steps instead"),
        _drop("saver.mode", "checkpoints are written one way, whole and verified"),
        _drop("recover.retries", "rerun the same command; `scheduler.restarts` counts those of a launcher"),
        _only(
            "recover.{no_save_optim,no_load_optim}", _OFF, "a run resumes with its optimizer; start a new trial_name"
        ),
        _drop("stats_logger.wandb." + wandb, "set WANDB_* in the environment"),
        _translate("stats_logger.trackio", "true where its mode is not disabled", moves.trackio),
        _translate("stats_logger.swanlab", "dropped where disabled, else refused", moves.other_logger),
        _drop("cluster.cluster_name", "runs are named by experiment_name and trial_name"),
        _drop(
            "cluster.name_resolve.{type,nfs_record_root,etcd3_addr,ray_actor_name}", "no service discovery is needed"
        ),
        _drop("scheduler." + services, "rewards run in local workers"),
        _only("scheduler.reward_model_path", (None, ""), "write reward.functions: [{name: reward_model, path: …}]"),
    )


# -- Use of the table -------------------------------------------------------------------------------------------


def migrate(root: Node, problems: list[str], messages: list[str]) -> None:
    """Bring a tree to our keys, in place; one message for each foreign key."""
    for rule in rules().values():
        node = tree.pop(root, rule.key)
        if node is not None and not is_failed(node):
            moves.apply(Move(rule, node, root, problems, messages))
    _sweep(root)


def _sweep(root: Node) -> None:
    """Sections of AReaL's that the rules have emptied are gone with their keys."""
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
    """AReaL's names for a key of ours, and ours for one of AReaL's.

    >>> spellings("gconfig.n_samples"), spellings("actor.group_size")
    (['actor.group_size'], ['gconfig.n_samples'])
    """
    return [old for old, new in _aliases() if new == key] + [new for old, new in _aliases() if old == key]


def renamed(key: str) -> str:
    """Our name for a key, whichever era's it is; the key itself where the value did not simply move."""
    rule = rules().get(key)
    if key == "actor.group_size":
        return "gconfig.n_samples"
    return rule.target if rule is not None and rule.kind in ("rename", "repeat") else key


def is_known(key: str) -> bool:
    """Whether this is a key of AReaL's that the table has."""
    return key in rules()
