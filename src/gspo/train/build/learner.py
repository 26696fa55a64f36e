"""The learner: device and ranks, the objective, optimizers, the policy, the reference and the critic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gspo.algorithms import clip_range_of
from gspo.config import (
    ENVIRONMENT_ROWS,
    TRAINERS,
    Config,
    Loaded,
    Norm,
    Optimizer,
    RewardNorm,
    algorithm_in,
    effective_objective,
    is_supervised,
    parse_backend,
)
from gspo.data import Data
from gspo.errors import ConfigError, DataError
from gspo.learner import (
    ALONE,
    AutoClip,
    Batch,
    Credit,
    Learner,
    Plan,
    PolicyModule,
    ProximalSource,
    Reference,
    Shaping,
    StepReport,
    Teacher,
    World,
    learning_rate,
    make_optimizer,
    probe,
    reference_logp,
    served_teacher,
    shard,
)
from gspo.models import check_replay, embedded, freeze_vision, load_model, load_tokenizer, vision_parameters
from gspo.runs import checkpoint, code_digest
from gspo.sampling import product_name
from gspo.system import Launched, beat, by_name, num_cores, source_file, step_name
from gspo.train.update import Rates, Updater, UpdateSettings

if TYPE_CHECKING:
    from gspo.learner import Critic
    from gspo.models import Processor


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = config.actor.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, name)


def set_threads(config: Config, processes_here: int = 1) -> int:
    """Set the number of threads. It is part of a run's identity, because sums over threads round differently.

    `threads`, else OMP_NUM_THREADS, which PyTorch's users set, else the cores shared by the processes on this machine.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = config.threads or (int(asked) if asked.isdecimal() else 0) or max(num_cores() // processes_here, 1)
    torch.set_num_threads(threads)
    return torch.get_num_threads()


def num_ranks(config: Config) -> int | None:
    """Ranks that actor.backend asks for; None: as many as were started."""
    backend = config.actor.backend
    return parse_backend(backend, TRAINERS).data if ":" in backend or "." in backend else None


def sharding(config: Config) -> dict[str, Any]:
    """Keyword arguments of `learner.policy.sharding.shard`: the dtypes of a run with several ranks."""
    kinds = config.actor.fsdp.model_dump()
    return {name: None if kind is None else getattr(torch, kind) for name, kind in kinds.items()}


def published_dtype(config: Config) -> torch.dtype | None:
    """The dtype of published weights: the dtype in which several ranks compute; None: the model's own."""
    return sharding(config)["param_dtype"] if has_ranks(config) else None


def has_ranks(config: Config) -> bool:
    """Whether several ranks train. The trainer and its sampler servers get the same answer."""
    return (num_ranks(config) or Launched.read().num_ranks) > 1


def make_plan(loaded: Loaded, own: Any = None) -> Plan:
    """The settings that all updates share. `own`: the function of the user, if it was found already."""
    config, actor, preset = loaded.config, loaded.config.actor, effective_objective(loaded)
    if own is None and preset["of_user"]:
        own = by_name("gspo.train.build.own_objective:find_objective")(loaded)
    return Plan(
        name=preset["name"],
        settings=preset["settings"] if own is None else own.settings,
        function=None if own is None else own.function,
        num_minibatches=actor.ppo_n_minibatches or 1,
        num_epochs=actor.ppo_epochs,
        seed=config.seed,
        # The likelihood of given completions is that of the model itself; gconfig is for evaluations.
        temperature=1.0 if is_supervised(config) else temperature(config),
        max_tokens=actor.mb_spec.max_tokens_per_mb,
        max_norm=actor.optimizer.gradient_clipping,
        max_new_tokens=config.gconfig.max_new_tokens,
        # A sequence with advantage 0 still has an entropy and a KL to the reference or the teacher.
        skip_zero_advantage=(own is None or own.skips_zero)
        and not (actor.kl_loss_coef or actor.entropy_coef or (config.teacher and config.teacher.exact_kl is not None)),
        routing_replay=actor.routing_replay,
        sequence_unit=actor.sequence_unit,
    )


def first_proximal_source(config: Config) -> ProximalSource:
    """Where π_old of mini-batches 2…K comes from in the first step; `auto` starts with `recompute` and measures."""
    method = config.actor.prox_logp_method
    return method if method in ("rollout", "loglinear") else "recompute"


def narrowest_clip(config: Config, settings: Mapping[str, Any]) -> float | None:
    """The ε that the sampler's noise is compared with; None if the objective does not clip.

    With `eps_clip: auto` it is the widest range that auto may choose, because auto stays above the noise by itself.
    """
    names = clip_range_of(settings)
    if names is None:
        return None
    if config.actor.eps_clip == "auto":
        return AutoClip.eps_max / AutoClip.high_over_low
    return min(settings[name] for name in names)


def temperature(config: Config) -> float:
    return config.gconfig.temperature or 1.0


def assembly(loaded: Loaded) -> dict[str, Any]:
    """How rewards become advantages per sequence: keywords of `learner.credit.batch_with_advantages`."""
    config, actor = loaded.config, loaded.config.actor
    if is_supervised(config):
        return {"norm": "one", "shaping": Shaping()}
    norm = effective_objective(loaded)["advantage"] if actor.reward_norm is None else norm_settings(actor.reward_norm)
    if effective_objective(loaded)["advantage"] == "teacher":
        # A reward that the user configured is added to the teacher's advantage; the default of a task is only shown.
        norm = "teacher" if not config.reward.functions else norm if actor.reward_norm is not None else "group_std"
    return {
        "norm": norm,
        "shaping": make_shaping(config),
        "zero_variance": actor.zero_variance_groups or "count",
        "turn_discount": config.env.turn_discount,
        "truncated_is_zero": actor.mask_no_eos_with_zero == "reward",
    }


def make_credit(config: Config) -> Credit:
    """The last steps from advantages per sequence to the final ones."""
    actor = config.actor
    if is_supervised(config):
        return Credit()
    return Credit(
        kl_coef=actor.kl_ctl,
        kl_estimator=actor.kl_estimator or "k1",
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
        adv_norm=None if actor.adv_norm is None else norm_settings(actor.adv_norm),
        truncated_is_zero=actor.mask_no_eos_with_zero is True,
    )


def norm_settings(norm: Norm | RewardNorm) -> dict[str, Any]:
    leave_one_out = norm.mean_level == "leave1out"
    return {
        "mean_level": "group" if leave_one_out else norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": leave_one_out,
    }


def make_shaping(config: Config) -> Shaping:
    actor, longest = config.actor, config.gconfig.max_new_tokens
    tail = (actor.overlong_tokens or max(longest // 5, 1)) if actor.overlong_reward_penalty else 0
    return Shaping(
        bias=actor.reward_bias,
        scaling=actor.reward_scaling,
        clip=actor.reward_clip,
        overlong_tokens=tail,
        overlong_factor=float(actor.overlong_reward_penalty or 0),
        max_new_tokens=longest,
        normalize_each=config.reward.normalize == "each",
    )


def critic_optimizer(config: Config) -> Optimizer:
    """The actor's optimizer with the critic's learning rate."""
    assert config.critic is not None
    return config.actor.optimizer.model_copy(update={"lr": config.critic.optimizer.lr})


def optimizer_of(o: Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(
        module.parameters(),
        kind=o.type,
        lr=float(o.lr or 0.0),
        weight_decay=o.weight_decay,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        offload=o.offload,
    )


def make_rates(o: Optimizer, count: int, total_steps: int) -> Rates:
    """The learning rates of a step's `count` updates, from the number of its first update in the run."""
    return lambda first: [
        learning_rate(
            first + k,
            total_steps * count,
            peak=float(o.lr or 0.0),
            schedule=o.lr_scheduler_type,
            warmup_proportion=o.warmup_steps_proportion,
        )
        for k in range(count)
    ]


def make_updater(
    config: Config,
    learner: Learner,
    total_steps: int,
    say: Callable[[str], None],
    save_samples: Callable[[Batch, StepReport, int], None] | None = None,
) -> Updater:
    """`save_samples` None: a rank other than 0, which does not check updates."""
    actor = config.actor
    settings = UpdateSettings(
        auto_clip=AutoClip() if actor.eps_clip == "auto" else None,
        choose_proximal=actor.prox_logp_method == "auto",
        narrowest_clip=partial(narrowest_clip, config),
        allow_noise=actor.prox_logp_force,
        keeps_token_values=bool(config.rollout.dump_to_file),
        entropy_target=actor.entropy_target,
    )
    rates = make_rates(actor.optimizer, learner.plan.num_updates, total_steps)
    critic_rates = rates
    if learner.critic is not None:
        critic_rates = make_rates(critic_optimizer(config), learner.critic.num_minibatches, total_steps)
    return Updater(
        learner,
        settings,
        rates=rates,
        critic_rates=critic_rates,
        say=say,
        checkpoints=config.run_path / "checkpoints",
        save_samples=save_samples,
    )


PROCESSOR = "gspo.models.vision.processor:load_processor"


def _load(
    config: Config, dtype: torch.dtype, device: torch.device, tokenizer: Any, *, with_adapter: bool = True
) -> Any:
    """The model of actor.path; only the part that is trained requires gradients."""
    quantised = with_adapter and config.actor.lora_base_bits is not None
    model: Any = load_model(
        config.actor.path,
        dtype,
        # What is to be quantised is read into the host's memory.
        "cpu" if quantised else device,
        from_scratch=config.actor.init_from_scratch,
        seed=config.seed,
        tokenizer=tokenizer,
        images=with_tower(config),
    )
    if with_adapter:
        set_trained_part(config, model)
    return model.to(device) if quantised else model


def make_policy(config: Config, sequence_level: bool, world: World = ALONE) -> tuple[PolicyModule, Any]:
    """The policy and its tokenizer, checked against a plain forward pass."""
    actor = config.actor
    device, dtype = device_and_dtype(config)
    tokenizer = make_tokenizer(config)
    # What is to be cut is read into the host's memory, and placed layer by layer.
    at_first = device if world.size == 1 else torch.device("cpu")
    model = _load(config, dtype, at_first, tokenizer)
    policy = PolicyModule(
        model,
        fp32_head=sequence_level if actor.fp32_lm_head is None else actor.fp32_lm_head,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    if world.size > 1:
        # Hash the frozen weights while every tensor is whole; `checkpoint.save` uses the stored digest.
        checkpoint.base(policy)
        shard(policy, policy, world, **sharding(config))
    # After sharding, so that the check covers the model in the form in which it trains.
    policy.processor = processor_of(policy, actor.path, tokenizer)
    probe(policy, share_prefix=actor.share_prefix, processor=policy.processor)
    if actor.routing_replay != "none":
        check_replay(policy.model)
    return policy, tokenizer


def make_tokenizer(config: Config) -> Any:
    """The tokenizer of the run; an error names the key that was set."""
    # The config fills tokenizer_path from actor.path: the error names the key that the user set.
    if config.tokenizer_path in (None, config.actor.path):
        return load_tokenizer(config.actor.path, "actor.path")
    return load_tokenizer(config.tokenizer_path, "tokenizer_path")


def with_tower(config: Config) -> bool:
    """Whether a model that transformers can load with or without its vision tower is loaded with it."""
    return config.actor.freeze_vision is not None


def make_reader(config: Config, tokenizer: Any) -> Any:
    """What makes tokens of a row: the processor of a vision-language model, or the tokenizer."""
    return by_name(PROCESSOR)(config.actor.path, tokenizer) or tokenizer


def processor_of(policy: PolicyModule, path: str, tokenizer: Any, key: str = "actor.path") -> Processor | None:
    """The processor of a vision-language model; None: the model takes text alone, for `policy.images_refused`."""
    if policy.vision is None:
        return None
    found, reason = None, "its folder has no image processor (preprocessor_config.json)"
    try:
        found = by_name(PROCESSOR)(path, tokenizer, key)
    except DataError as cause:
        reason = str(cause)
    if found is None:
        policy.vision, policy.images_refused = None, reason
    return found


def alphabet_warning(config: Config, prompt: str) -> list[str]:
    """A line if an embedded model has no token for some characters of a prompt."""
    path = config.actor.path
    if config.train_dataset.path == ENVIRONMENT_ROWS:
        return []  # the environment decides what the model reads
    if path not in embedded.RECIPES or not (unknown := embedded.unknown_characters(path, prompt)):
        return []
    return [
        f"warning: {path} has no token for some characters of the first prompt: {unknown[:40]!r}; "
        f"set actor.path to a language model, for example smollm2-135m"
    ]


def load_policy(config: Config, run: Path | None, step: int) -> tuple[PolicyModule, Any]:
    """The policy after `step` and its tokenizer; step 0 is the model that training started from.

    The checkpoint is verified and keeps its dtype: a run trained in bfloat16 on a GPU loads as bfloat16 on a CPU.
    """
    beat("loading the model (actor.path)")
    device, dtype = device_and_dtype(config)
    folder = None
    if step and run is not None:
        folder = run / "checkpoints" / step_name(step)
        dtype = checkpoint.stored_dtype(folder, dtype)
    tokenizer = make_tokenizer(config)
    model = _load(config, dtype, device, tokenizer)
    policy = PolicyModule(model)
    policy.processor = processor_of(policy, config.actor.path, tokenizer)
    # No optimizer: the weights are loaded to evaluate or export, not to train.
    if folder is not None:
        checkpoint.load_checkpoint(folder, policy, None)
    return policy, tokenizer


def set_trained_part(config: Config, model: Any) -> None:
    """With actor.freeze_vision the tower is frozen; with actor.use_lora the model is frozen, quantised if
    actor.lora_base_bits is set, and gets its adapter."""
    actor = config.actor
    if actor.freeze_vision:
        if not vision_parameters(model):
            raise ConfigError(
                f"actor.freeze_vision is true, but {actor.path} ({type(model).__name__}) has no vision tower; remove it"
            )
        freeze_vision(model)
    if actor.lora_base_bits is not None:
        by_name("gspo.models.lora:quantize_linears")(model, actor.lora_base_bits)
    if actor.use_lora:
        by_name("gspo.models.lora:add_adapter")(
            model,
            rank=actor.lora_rank,
            alpha=actor.lora_alpha,
            target_modules=actor.target_modules,
            seed=config.seed,
        )


def whole_model(config: Config, tokenizer: Any, compute_dtype: torch.dtype | None, *, with_adapter: bool) -> Any:
    """The policy's model, unsharded, for a sampler in one process; the trained weights are loaded later."""
    device, dtype = device_and_dtype(config)
    model = _load(config, compute_dtype or dtype, device, tokenizer, with_adapter=with_adapter)
    if compute_dtype is not None:
        # An adapter is float32 on a half-precision model, but computes in what all of the policy does. Buffers stay:
        # the frequencies of rotary positions are float32 in every model.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype)
    return model


def context_length(config: Config, policy: PolicyModule) -> int:
    """Longest prompt + completion: the model's context, or gconfig.max_tokens if that is set."""
    return limit_context(config, getattr(policy.model.config.get_text_config(), "max_position_embeddings", None))


def limit_context(config: Config, own: int | None) -> int:
    """gconfig.max_tokens, else the model's own context; None: it has no limit."""
    own, asked = own or 2**31, config.gconfig.max_tokens
    if asked is not None and asked > own:
        raise ConfigError(f"gconfig.max_tokens is {asked}, but the context of {config.actor.path} is {own}; set {own}")
    return asked or own


def make_learner(loaded: Loaded, world: World, objective: Any = None) -> Learner:
    """The models of this rank, loaded and sharded, and how batches train them."""
    config = loaded.config
    # Before a model is loaded, because the probe of the policy computes already.
    threads = set_threads(config, world.local_size)
    plan, credit = make_plan(loaded, objective), make_credit(config)
    policy, tokenizer = make_policy(config, plan.settings["level"] != "token", world)
    return Learner(
        policy,
        tokenizer,
        optimizer_of(config.actor.optimizer, policy),
        make_reference(config, policy, tokenizer),
        make_critic(config, tokenizer, world),
        make_teacher(config, policy, tokenizer),
        plan,
        credit,
        assembly(loaded),
        threads,
    )


def make_reference(config: Config, policy: PolicyModule, tokenizer: Any) -> Reference | None:
    """The reference policy of KL terms; None if no KL coefficient is set.

    With an adapter on the same model it is the policy itself with the adapter off, which costs no memory.
    """
    actor, ref = config.actor, config.ref
    if ref is None or not (actor.kl_loss_coef or actor.kl_ctl):
        return None
    how = temperature(config), actor.mb_spec.max_tokens_per_mb
    own = ref.path in (None, actor.path)
    if actor.use_lora and own:
        return Reference(policy, *how, context=partial(by_name("gspo.models.lora:adapter_off"), policy.model))
    return Reference(_frozen_model(config, ref.path, tokenizer, "ref.path", policy.world), *how)


def make_teacher(config: Config, policy: PolicyModule, tokenizer: Any) -> Teacher | None:
    """The teacher of distillation, frozen; None: the algorithm has none."""
    how, actor = config.teacher, config.actor
    if how is None or algorithm_in(config).advantage != "teacher":
        return None
    if how.is_server:
        timeout_s = config.rollout.request_timeout
        return served_teacher(how.path, tokenizer, policy.world, timeout_s=timeout_s, coef=how.coef)
    other = _frozen_model(config, how.path, tokenizer, "teacher.path", policy.world)
    if how.exact_kl is not None and other.layout != policy.layout:
        raise ConfigError(
            f"teacher.exact_kl computes both models on the same micro-batches, but the layout of {actor.path} is "
            f"{policy.layout} and that of {how.path} {other.layout}; remove teacher.exact_kl"
        )
    if how.exact_kl is not None:
        policy.forks = other.forks = policy.forks and other.forks
    reference = Reference(other, temperature(config), actor.mb_spec.max_tokens_per_mb)
    return Teacher(partial(reference_logp, reference), how.coef, how.exact_kl, other)


def make_critic(config: Config, tokenizer: Any, world: World = ALONE) -> Critic | None:
    """The value model of PPO with its optimizer; None where advantages come from groups."""
    how, actor = config.critic, config.actor
    if how is None or algorithm_in(config).advantage != "gae":
        return None
    from gspo.learner import Critic, ValueModule

    # A second model from critic.path; ValueModule replaces its language-model head by a scalar one.
    trunk = _other_model(config, how.path, tokenizer, "critic.path")
    module = ValueModule(trunk)
    if world.size > 1:
        shard(module, trunk, world, **sharding(config))
    return Critic(
        module,
        optimizer_of(critic_optimizer(config), module),
        num_minibatches=actor.ppo_n_minibatches or 1,
        max_tokens=actor.mb_spec.max_tokens_per_mb,
        max_norm=actor.optimizer.gradient_clipping,
        eps_clip=how.value_eps_clip,
    )


def _frozen_model(config: Config, path: str | None, tokenizer: Any, key: str, world: World) -> PolicyModule:
    other = _other_model(config, path, tokenizer, key).requires_grad_(False)
    if world.size > 1:
        shard(other, other, world, **sharding(config))
    return other


def _other_model(config: Config, path: str | None, tokenizer: Any, key: str) -> PolicyModule:
    """Another model, from its own path or the policy's; random weights only if the policy has them too."""
    actor = config.actor
    device, dtype = device_and_dtype(config)
    own = path in (None, actor.path)
    model = load_model(
        path or actor.path,
        dtype,
        device,
        from_scratch=actor.init_from_scratch and own,
        seed=config.seed,
        tokenizer=tokenizer,
        key=key,
        adapters=True,
        images=with_tower(config),
    )
    module = PolicyModule(
        model,
        fp32_head=bool(actor.fp32_lm_head),
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    probe(
        module,
        share_prefix=actor.share_prefix,
        processor=processor_of(module, path or actor.path, tokenizer, key),
    )
    return module


def run_identity(learner: Learner, data: Data, world: World) -> dict[str, Any]:
    """What a resumed run must have in common with the run that it continues."""
    num_parameters = sum(p.numel() for p in learner.policy.parameters())
    function = learner.plan.function
    return {
        **({} if function is None else {"objective": code_digest(source_file(function))}),
        "threads": learner.threads,
        "data": data.digest(),
        "parameters": num_parameters,
        "ranks": world.size,
        "products": product_name(learner.policy.model),  # of the in-process sampler
    }
