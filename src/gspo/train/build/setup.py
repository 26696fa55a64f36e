"""From a resolved config to the parts of a trainer. Only here and in the loop are config keys read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo.algorithms import ALGORITHMS
from gspo.config import Loaded, effective_objective
from gspo.config.backends import SAMPLERS, TRAINERS, parse_backend
from gspo.config.engine_flags import takes_adapter
from gspo.config.schema import Config, DatasetSpec, Frequency, Generation, MixtureSource, Norm, Optimizer
from gspo.data.dataset import Dataset, default_reward, load_dataset, make_dataset
from gspo.data.mixture import Data, Problems, distinct_names, make_mixture
from gspo.data.split import in_held_out
from gspo.envs.agents.agent import Agents, find_agent
from gspo.envs.chat import Chat
from gspo.envs.driver import Environment, Episodes
from gspo.envs.find import find_environment
from gspo.errors import ConfigError, DataError
from gspo.learner.batch import Credit, Shaping, is_flat
from gspo.learner.critic import Critic, ValueModule
from gspo.learner.optim import learning_rate, make_optimizer
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.sharding import full_parameters, shard
from gspo.learner.ranks.world import ALONE, Nowhere, World
from gspo.learner.reference import Reference
from gspo.learner.step import Plan, ProximalSource
from gspo.models.loading import load_model, load_tokenizer
from gspo.models.lora import adapter_off, add_adapter
from gspo.models.moe import check_replay
from gspo.monitor.loggers import Loggers
from gspo.rewards.functions.code import prepare
from gspo.rewards.pool import RewardPool
from gspo.rewards.route import RewardRouter, Rewards
from gspo.rewards.spec import RewardSpec, reward_spec
from gspo.rollout.buffer import Buffer, Snapshot
from gspo.rollout.groups import Arrivals, Filter, Keeps, Workflow, filtered
from gspo.rollout.producer import Ahead
from gspo.runs import checkpoint
from gspo.sampling.api import Sampler
from gspo.sampling.local.engine import LocalSampler
from gspo.sampling.local.rounded import RoundedSampler
from gspo.sampling.remote.client import JOIN_S
from gspo.system.imports import find_function
from gspo.train.build import servers as remote
from gspo.types import Group, Prompt, SamplingParams

ENGINES = ("vllm", "sglang")
ENGINE_START_S = 900.0  # an engine loads, compiles and captures for minutes before it serves


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = config.actor.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, name)


def set_threads(config: Config, ranks_here: int = 1) -> int:
    """Thread count is part of a run's identity: sums over threads round differently."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(config.threads or max((cores or 1) // ranks_here, 1))
    return torch.get_num_threads()


def num_ranks(config: Config) -> int | None:
    """Ranks that actor.backend asks for; None: as many as were started."""
    backend = config.actor.backend
    return parse_backend(backend, TRAINERS).data if ":" in backend or "." in backend else None


def sharding(config: Config) -> dict[str, Any]:
    """How several ranks compute (`shard.shard`)."""
    kinds = asdict(config.actor.fsdp)
    return {name: None if kind is None else getattr(torch, kind) for name, kind in kinds.items()}


def published_dtype(config: Config) -> torch.dtype | None:
    """What several ranks compute in is what they publish; None: the model's own type."""
    return sharding(config)["param_dtype"] if _has_ranks(config) else None


def _has_ranks(config: Config) -> bool:
    """Whether several ranks train, as trainer and sampler servers both know."""
    return (num_ranks(config) or int(os.environ.get(remote.RANKS, "1"))) > 1


def make_policy(config: Config, sequence_level: bool, world: World = ALONE) -> tuple[PolicyModule, Any]:
    """The policy and its tokenizer, checked against a plain forward pass."""
    actor = config.actor
    device, dtype = device_and_dtype(config)
    tokenizer = load_tokenizer(config.tokenizer_path or actor.path)
    # What is to be cut is read into the host's memory, and placed layer by layer.
    at_first = device if world.size == 1 else torch.device("cpu")
    model = load_model(
        actor.path, dtype, at_first, from_scratch=actor.init_from_scratch, seed=config.seed, tokenizer=tokenizer
    )
    add_configured_adapter(config, model)
    policy = PolicyModule(
        model,
        chunk_size=actor.logprobs_chunk_size,
        fp32_head=sequence_level if actor.fp32_lm_head is None else actor.fp32_lm_head,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    if world.size > 1:
        checkpoint.base(policy)
        shard(policy, policy, world, **sharding(config))
    policy.probe()
    policy.share_prefix = policy.share_prefix and actor.share_prefix
    if actor.routing_replay != "none":
        check_replay(policy.model)
    return policy, tokenizer


def add_configured_adapter(config: Config, model: Any) -> None:
    """With actor.use_lora the model is frozen and gets its adapter."""
    actor = config.actor
    if actor.use_lora:
        add_adapter(
            model,
            rank=actor.lora_rank,
            alpha=actor.lora_alpha,
            target_modules=actor.target_modules,
            seed=config.seed,
        )


def make_reference(config: Config, policy: PolicyModule, tokenizer: Any) -> Reference | None:
    """The policy that KL is measured to; None where no coefficient asks for it.

    Of an adapter on the same model it is the policy itself, adapter off, which costs no memory.
    """
    actor, ref = config.actor, config.ref
    if ref is None or not (actor.kl_loss_coef or actor.kl_ctl):
        return None
    asked = _temperature(config), ref.mb_spec.max_tokens_per_mb, ref.mb_spec.n_mbs or 1
    own = ref.path in (None, actor.path)
    if actor.use_lora and own and ref.dtype in ("auto", actor.dtype):
        return Reference(policy, *asked, asking=partial(adapter_off, policy.model))
    other = _other_model(config, ref.path, ref.dtype, tokenizer, "ref.path").requires_grad_(False)
    if policy.world.size > 1:
        shard(other, other, policy.world, **sharding(config))
    return Reference(other, *asked)


def make_critic(config: Config, tokenizer: Any, world: World = ALONE) -> Critic | None:
    """The value model of PPO with its optimizer; None where advantages come from groups."""
    how, actor = config.critic, config.actor
    if how is None or ALGORITHMS[str(config.algorithm)].advantage != "gae":
        return None
    trunk = _other_model(config, how.path, how.dtype, tokenizer, "critic.path")
    module = ValueModule(trunk)
    if world.size > 1:
        shard(module, trunk, world, **sharding(config))
    return Critic(
        module,
        _optimizer(how.optimizer, module),
        num_minibatches=how.ppo_n_minibatches or actor.ppo_n_minibatches or 1,
        max_tokens=how.mb_spec.max_tokens_per_mb,
        min_micro_batches=how.mb_spec.n_mbs or 1,
        max_norm=how.optimizer.gradient_clipping,
        eps_clip=how.value_eps_clip,
        loss_coef=how.value_loss_coef,
    )


def _other_model(config: Config, path: str | None, dtype: str, tokenizer: Any, key: str) -> PolicyModule:
    """A model beside the policy, from where it started or from its own path; random only where the policy is, too."""
    actor = config.actor
    device, own_dtype = device_and_dtype(config)
    own = path in (None, actor.path)
    try:
        model = load_model(
            path or actor.path,
            own_dtype if dtype == "auto" else getattr(torch, dtype),
            device,
            from_scratch=actor.init_from_scratch and own,
            seed=config.seed,
            tokenizer=tokenizer,
        )
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    module = PolicyModule(
        model,
        chunk_size=actor.logprobs_chunk_size,
        fp32_head=bool(actor.fp32_lm_head),
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    module.probe()
    module.share_prefix = module.share_prefix and actor.share_prefix
    return module


def make_sampler(
    config: Config,
    policy: PolicyModule,
    tokenizer: Any,
    version: int,
    run: Path | None = None,
    say: Callable[[str], None] = print,
) -> Sampler:
    """The sampler servers that the launcher started for this run, else the in-process one on the policy's weights."""
    if run is None or not remote.num_servers():
        if policy.world.size == 1:
            return local_sampler(config, policy.model, tokenizer, version)
        model = whole_model(config, tokenizer, policy.compute_dtype, with_adapter=True)
        local = local_sampler(config, model, tokenizer, version)
        local.load_weights(version, weights_for(config, local, policy))
        return local
    sampler = remote.connect(
        policy,
        tokenizer,
        run,
        seed=config.seed,
        max_tokens=config.gconfig.max_tokens,
        mode=config.actor.weight_update_mode,
        timeout_s=config.rollout.request_timeout,
        retries=config.rollout.request_retries,
        needs_routes=config.actor.routing_replay == "rollout",
        join_s=ENGINE_START_S if engine_of(config) else JOIN_S,
        computes_in=sampler_dtype(config),
        say=say,
    )
    try:
        sampler.load_weights(version, weights_for(config, sampler, policy))
    except BaseException:
        sampler.close()
        raise
    return sampler


def engine_of(config: Config) -> str | None:
    """The inference engine behind the sampler servers, where it is not ours."""
    name = parse_backend(config.rollout.backend, SAMPLERS).name
    return name if name in ENGINES else None


def sampler_dtype(config: Config) -> torch.dtype | None:
    """What sampler servers compute in where the user chose that by the engine's own flag; None: what the trainer does.

    A quantised engine is bounded as the coarsest type is.
    """
    engine = engine_of(config)
    options = {} if engine is None else getattr(config, engine)
    if options.get("quantization") is not None:
        return torch.bfloat16
    dtype = getattr(torch, str(options.get("dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def local_sampler(config: Config, model: Any, tokenizer: Any, version: int) -> LocalSampler:
    precision = config.rollout.sampler_precision
    make = LocalSampler if precision == "none" else partial(RoundedSampler, precision=precision)
    return make(
        model,
        seed=config.seed,
        eos_token_ids=remote.end_tokens(model, tokenizer),
        decode=decoder(tokenizer),
        max_rows=config.rollout.max_concurrent_rollouts or 256,
        max_context=config.gconfig.max_tokens,
        version=version,
    )


def whole_model(config: Config, tokenizer: Any, compute_dtype: torch.dtype | None, *, with_adapter: bool) -> Any:
    """The policy's model as one process can sample from it; its trained weights are still to come."""
    device, dtype = device_and_dtype(config)
    actor = config.actor
    model: Any = load_model(
        actor.path,
        compute_dtype or dtype,
        device,
        from_scratch=actor.init_from_scratch,
        seed=config.seed,
        tokenizer=tokenizer,
    )
    if with_adapter:
        add_configured_adapter(config, model)
    if compute_dtype is not None:
        # An adapter is float32 on a half-precision model, but computes in what all of the policy does. Buffers stay:
        # the frequencies of rotary positions are float32 in every model.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype)
    return model


def weights_for(
    config: Config, sampler: Sampler | Nowhere, policy: PolicyModule
) -> Iterable[tuple[str, torch.Tensor]] | None:
    """What `load_weights` needs: nothing where the sampler samples from the policy's own tensors.

    What is trained by its own names where the sampler has the same layers; else whole weights by the names of files,
    an adapter merged into them.
    """
    in_process = sampler.in_process if isinstance(sampler, Nowhere) else isinstance(sampler, LocalSampler)
    if in_process and policy.world.size == 1:
        return None
    if in_process or sends_adapter(config):
        return full_parameters(policy.model, policy.compute_dtype)
    return policy.full_weights()


def sends_adapter(config: Config) -> bool:
    """Whether sampler servers are given the adapter alone, on a base that they have loaded themselves.

    Not by several ranks: their servers are compared with each other, not with the trainer, and a wrong base would pass.
    """
    engine, actor = engine_of(config), config.actor
    can = takes_adapter(engine, getattr(config, engine) if engine else {}, actor.lora_rank)
    return actor.use_lora and can and not _has_ranks(config)


def make_ahead(
    config: Config,
    begin: Snapshot,
    *,
    sampler: Sampler,
    rewards: Rewards,
    prompt_of: Callable[[int], Prompt],
    decode: Callable[[Sequence[int]], str],
    workflow: Workflow,
    keeps: Keeps | None,
    step: int,
    total_steps: int,
) -> Ahead:
    """What samples and scores ahead of the trainer, as far as rollout.max_head_offpolicyness allows."""
    rollout, num_samples = config.rollout, config.gconfig.n_samples
    # A sampler that shares the trainer's process takes turns with it.
    beside = rollout.max_head_offpolicyness > 0 and not isinstance(sampler, LocalSampler)
    concurrent = rollout.max_concurrent_rollouts if beside else None
    buffer = Buffer(
        rollout.consumer_batch_size or config.train_dataset.batch_size,
        rollout.max_head_offpolicyness,
        queue_size=rollout.queue_size if rollout.max_head_offpolicyness else None,  # synchronous: there is no queue
        max_in_flight=None if concurrent is None else max(concurrent // num_samples, 1),
        num_batches=total_steps,
        taken=step,
        begin=begin,
    )
    return Ahead(
        buffer,
        sampler=sampler,
        rewards=rewards,
        prompt_of=prompt_of,
        arrivals=Arrivals(num_samples, sampling_params(config.gconfig), decode),
        workflow=workflow,
        beside=beside,
        keeps=keeps,
        max_refills=config.actor.max_refills,
        max_failure_fraction=config.reward.max_failure_fraction,
        timeout_s=rollout.request_timeout,
    )


def make_environment(config: Config, given: Any) -> Environment | None:
    """What plays the episodes: the caller's environment or the config's; None where a sample is one completion."""
    env = config.env
    if given is not None:
        return find_environment(given, env.options)
    if agent := env.command or (env.agent and find_agent(env.agent, env.options)):
        return Agents(agent, model=env.model, request_timeout_s=config.rollout.request_timeout)
    return None if env.path is None else find_environment(env.path, env.options)


def make_episodes(config: Config, environment: Environment, data: Data, tokenizer: Any, max_context: int) -> Episodes:
    """The workflow that plays episodes, spoken to as the prompts are rendered."""
    first = data if isinstance(data, Dataset) else data.sources[0]
    # A data set says True for the tokenizer's own template.
    chat = Chat(tokenizer, None if first.chat is True else first.chat, first.template_kwargs)
    return Episodes(
        environment,
        chat,
        max_context=max_context,
        max_turns=config.env.max_turns,
        timeout_s=config.env.timeout,
        rounds=not remote.num_servers(),
        request_timeout_s=config.rollout.request_timeout,
        at_once=config.rollout.max_concurrent_rollouts or getattr(environment, "at_once", 256),
    )


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def sampling_params(g: Generation) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=g.max_new_tokens,
        min_new_tokens=g.min_new_tokens,
        temperature=g.temperature,
        top_p=g.top_p,
        top_k=g.top_k,
        greedy=g.greedy,
        stop_token_ids=tuple(g.stop_token_ids),
        stop=tuple(g.stop),
        ignore_eos=g.ignore_eos,
    )


def make_data(config: Config, given: Any, given_valid: Any, tokenizer: Any) -> tuple[Data, Data]:
    """Training and held-out problems: the caller's data sets or rows, else those the config names.

    Where nobody names held-out problems they are the training data's held-out part, never its training part: its own
    test split, or a twentieth of the caller's rows. Both are the same object where few rows leave none to hold out.
    """
    data = _one(given, config.train_dataset, "train", tokenizer, config.seed, "train_dataset")
    if given_valid is None and config.valid_dataset is None and given is not None:
        return _divide(data)
    return data, _one(given_valid, held_out(config), "test", tokenizer, config.seed, "valid_dataset")


def held_out(config: Config) -> DatasetSpec:
    """Which held-out problems the config means: valid_dataset, or the whole test split of the training data."""
    train = config.train_dataset
    sources = [replace(source, split="test", size=None) for source in train.mixture]
    return config.valid_dataset or replace(train, split="test", size=None, mixture=sources)


def _one(given: Any, spec: DatasetSpec, split: str, tokenizer: Any, seed: int, key: str) -> Data:
    if isinstance(given, Problems):
        return given
    if given is not None:
        return make_dataset(given, tokenizer=tokenizer, source="the caller's rows", split=split, key=key)
    return load_data(spec, split, tokenizer, seed, key)


def _divide(data: Data) -> tuple[Data, Data]:
    if not isinstance(data, Dataset):
        raise ConfigError("a mixture given as dataset= has no held-out part of its own; give valid=… too")
    sides: tuple[list[Any], list[Any]] = [], []
    for index, row in enumerate(data.rows):
        sides[in_held_out(data.prompt(index).text, 0.05)].append(row)
    if not all(sides):
        return data, data
    train, valid = (replace(data, rows=rows, _prompts={}) for rows in sides)
    return train, replace(valid, split="test", key="valid_dataset")


def context_length(config: Config, policy: PolicyModule) -> int:
    """Longest prompt + completion: the model's context, or less where gconfig.max_tokens says so."""
    own = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    asked = config.gconfig.max_tokens
    if asked is not None and asked > own:
        raise ConfigError(f"gconfig.max_tokens is {asked}, but the context of {config.actor.path} is {own}; set {own}")
    return asked or own


def refuse_long_prompts(data: Data, limit: int, max_new_tokens: int, section: str = "gconfig") -> None:
    """A prompt that leaves no room for its completion is an error now, not in the middle of the night."""
    room = limit - max_new_tokens
    for row in range(len(data)):
        if (length := len(data.prompt(row).tokens)) > room:
            raise DataError(
                f"{data.key}, row {row}: the prompt has {length} tokens; with {section}.max_new_tokens = "
                f"{max_new_tokens} the context of {limit} leaves {max(room, 0)}. Set {section}.max_new_tokens lower, "
                f"or {data.key}.max_length={max(room, 1)} to drop such rows"
            )


def load_data(spec: DatasetSpec, split: str, tokenizer: Any, seed: int, key: str) -> Data:
    """The data set of a section, or its mixture; a source inherits what it leaves unset and all may share."""
    if not spec.mixture:
        return _load_source(spec, spec, split, tokenizer, seed, key)
    sources = [
        _load_source(source, spec, split, tokenizer, seed, f"{key}.mixture[{number}]")
        for number, source in enumerate(spec.mixture)
    ]
    return make_mixture(sources, [s.weight for s in spec.mixture], [s.name for s in spec.mixture], key)


def _load_source(
    source: DatasetSpec | MixtureSource, shared: DatasetSpec, split: str, tokenizer: Any, seed: int, key: str
) -> Dataset:
    return load_dataset(
        source.path,
        source.split or shared.split or split,
        tokenizer=tokenizer,
        max_length=source.max_length or shared.max_length,
        size=source.size,
        seed=seed,
        system_prompt=shared.system_prompt if source.system_prompt is None else source.system_prompt,
        prompt_column=source.prompt_column,
        answer_column=source.answer_column,
        columns=source.columns,
        chat_template=shared.chat_template if source.chat_template is None else source.chat_template,
        template_kwargs=source.chat_template_kwargs or shared.chat_template_kwargs,
        options=source.options,
        key=key,
    )


def make_loggers(config: Config, run: Path, say: Callable[[str], None]) -> Loggers:
    """Where metrics go beside the run directory."""
    stats, named = config.stats_logger, {"project": config.experiment_name, "name": config.trial_name}
    settings: dict[str, dict[str, Any]] = {}
    if stats.tensorboard:
        settings["tensorboard"] = {}
    if stats.wandb.mode != "disabled":
        project = stats.wandb.project or config.experiment_name
        settings["wandb"] = {**named, "project": project, "mode": stats.wandb.mode}
    if stats.trackio:
        settings["trackio"] = named
    return Loggers(run, settings, say)


def make_rewards(config: Config, given: Any, log_path: str | None) -> Rewards:
    """The reward functions of the caller, of the config, or of the task; of a mixture, those of each source."""
    reward = config.reward
    common: RewardSpec | None = None
    if given is not None:
        common = reward_spec(given)
    elif reward.functions:
        common = reward_spec(
            reward.functions, weights=reward.weights, format_regex=reward.format_regex, key="reward.functions"
        )
    train, settings = config.train_dataset, {"workers": reward.workers, "timeout_s": reward.timeout}
    ready = partial(prepare, allow_unsandboxed=reward.allow_unsandboxed_code, timeout_s=reward.timeout)
    if not (train.mixture or held_out(config).mixture):
        spec = common or reward_spec(default_reward(train.path))
        return RewardPool(ready(spec), log_path=log_path, key="reward", **settings)
    specs, others = _rewards_by_source(train, "train_dataset"), _rewards_by_source(held_out(config), "valid_dataset")
    if common is None and (twice := [name for name in specs if others.get(name, specs[name]) != specs[name]]):
        raise ConfigError(
            f"valid_dataset.mixture and train_dataset.mixture give {twice[0]} different rewards; name one of them "
            "otherwise"
        )
    specs |= others
    return RewardRouter({name: ready(common or spec) for name, spec in specs.items()}, log_path=log_path, **settings)


def _rewards_by_source(spec: DatasetSpec, key: str) -> dict[str, RewardSpec]:
    if not spec.mixture:
        return {spec.path: reward_spec(default_reward(spec.path))}
    names = distinct_names([source.path for source in spec.mixture], [source.name for source in spec.mixture])
    return {
        name: reward_spec(source.reward or default_reward(source.path), key=f"{key}.mixture[{number}].reward")
        for number, (name, source) in enumerate(zip(names, spec.mixture, strict=True))
    }


def make_plan(loaded: Loaded) -> Plan:
    """What every update has in common."""
    config, objective = loaded.config, effective_objective(loaded)
    actor = config.actor
    return Plan(
        name=objective["name"],
        settings=objective["settings"],
        num_minibatches=actor.ppo_n_minibatches or 1,
        temperature=_temperature(config),
        max_tokens=actor.mb_spec.max_tokens_per_mb,
        min_micro_batches=actor.mb_spec.n_mbs or 1,
        max_norm=actor.optimizer.gradient_clipping,
        max_new_tokens=actor.max_new_tokens or config.gconfig.max_new_tokens,
        # A sequence without an advantage has a KL all the same.
        skip_zero_advantage=not actor.kl_loss_coef,
        routing_replay=actor.routing_replay,
        sequence_unit=actor.sequence_unit,
    )


def proximal_source(config: Config) -> ProximalSource:
    """Where π_old of mini-batches 2…K comes from at first; `auto` begins with the trainer and measures."""
    method = config.actor.prox_logp_method
    if method == "rollout":
        return "centred" if config.actor.prox_logp_recenter else "rollout"
    return "loglinear" if method == "loglinear" else "recompute"


def narrowest_clip(config: Config, settings: Mapping[str, Any]) -> float | None:
    """The ε that a sampler's noise is held against; None where nothing is clipped.

    `eps_clip: auto` stays above the noise by itself, as far as its bound.
    """
    if "clip_low" not in settings:
        return None
    if config.actor.eps_clip == "auto":
        auto = config.actor.eps_clip_auto
        return auto.eps_max / max(1.0, auto.high_over_low)
    return min(settings["clip_low"], settings["clip_high"])


def _temperature(config: Config) -> float:
    return float(config.actor.temperature or config.gconfig.temperature or 1.0)


def assembly(loaded: Loaded) -> dict[str, Any]:
    """How rewards become advantages (`batch.assemble`), as far as that is decided per sequence."""
    config, actor = loaded.config, loaded.config.actor
    norm = effective_objective(loaded)["advantage"] if actor.reward_norm is None else norm_settings(actor.reward_norm)
    how = {"norm": norm, "shaping": make_shaping(config), "zero_variance": actor.zero_variance_groups or "count"}
    how["turn_discount"] = config.env.turn_discount
    return how if make_credit(loaded) is not None else how | _last(config)


def make_credit(loaded: Loaded) -> Credit | None:
    """How advantages differ from token to token; None where nothing makes them differ."""
    actor, by_critic = loaded.config.actor, effective_objective(loaded)["advantage"] == "gae"
    if not (actor.kl_ctl or by_critic):
        return None
    return Credit(
        kl_coef=actor.kl_ctl,
        kl_estimator=actor.kl_estimator or "k1",
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
        **_last(loaded.config),
    )


def _last(config: Config) -> dict[str, Any]:
    """What is done to advantages at the end, be they of sequences or of tokens."""
    norm = config.actor.adv_norm
    return {
        "adv_norm": None if norm is None else norm_settings(norm),
        "truncated_is_zero": config.actor.mask_no_eos_with_zero,
    }


def make_filter(config: Config, given: Filter | None) -> Keeps | None:
    """Which groups are trained on: the caller's choice or the config's, and where asked only those that teach."""
    checks: list[Keeps] = []
    if given is not None:
        checks.append(partial(filtered, given, "dynamic_filter_fn"))
    elif config.rollout.dynamic_filter_fn is not None:
        key = "rollout.dynamic_filter_fn"
        try:
            checks.append(partial(filtered, find_function(config.rollout.dynamic_filter_fn), key))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    if config.actor.zero_variance_groups == "refill":
        checks.append(partial(_teaches, make_shaping(config)))
    if not checks:
        return None
    return lambda group: next((why for check in checks if (why := check(group)) is not None), None)


def _teaches(shaping: Shaping, group: Group) -> str | None:
    if not is_flat(group, shaping):
        return None
    return "have equal rewards, as the task is too easy or too hard; set actor.zero_variance_groups=count"


def norm_settings(norm: Norm) -> dict[str, Any]:
    return {
        "mean_level": norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": norm.mean_leave1out,
        "unbiased": norm.std_unbiased,
        "eps": norm.eps,
    }


def make_shaping(config: Config) -> Shaping:
    actor, longest = config.actor, config.gconfig.max_new_tokens
    tail = (actor.overlong_tokens or max(longest // 5, 1)) if actor.overlong_reward_penalty else 0
    return Shaping(
        bias=actor.reward_bias,
        scaling=actor.reward_scaling,
        clip=actor.reward_clip,
        overlong_tokens=tail,
        overlong_factor=actor.overlong_penalty_factor,
        max_new_tokens=longest,
    )


def is_due(frequency: Frequency, step: int, steps_per_epoch: int, seconds_since: float) -> bool:
    """Whether something with this frequency happens after `step`."""
    return bool(
        (frequency.freq_steps and step % frequency.freq_steps == 0)
        or (frequency.freq_epochs and step % (frequency.freq_epochs * steps_per_epoch) == 0)
        or (frequency.freq_secs and seconds_since >= frequency.freq_secs)
    )


def make_trained_optimizer(config: Config, policy: PolicyModule) -> torch.optim.Optimizer:
    return _optimizer(config.actor.optimizer, policy)


def _optimizer(o: Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(
        module.parameters(),
        kind=o.type,
        lr=float(o.lr or 0.0),
        weight_decay=o.weight_decay,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )


def learning_rates(o: Optimizer, first: int, count: int, total: int) -> list[float]:
    """The rates of `count` updates from number `first` on."""
    return [
        learning_rate(
            first + k,
            total,
            peak=float(o.lr or 0.0),
            schedule=o.lr_scheduler_type,
            warmup_proportion=o.warmup_steps_proportion,
            min_ratio=o.min_lr_ratio,
        )
        for k in range(count)
    ]


def evaluation_params(config: Config) -> tuple[SamplingParams, int]:
    """How held-out problems are answered, and how often each."""
    how = config.eval_gconfig
    if how is not None:
        return sampling_params(how), how.n_samples
    return replace(sampling_params(config.gconfig), greedy=True, temperature=1.0, top_p=1.0, top_k=0), 1
