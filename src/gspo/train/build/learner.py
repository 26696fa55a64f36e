"""The learner: policy and optimizer, the reference policy of KL terms, and the critic of PPO."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gspo.config import Loaded, algorithm_in
from gspo.config.schema import Config
from gspo.data.mixture import Data
from gspo.errors import ConfigError
from gspo.learner.learner import Learner
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import probe
from gspo.learner.policy.sharding import shard
from gspo.learner.ranks.world import ALONE, World
from gspo.learner.reference import Reference, Teacher, reference_logp, served_teacher
from gspo.models.loading import load_model
from gspo.runs.code import code_digest
from gspo.sampling.native.few_rows import product_name
from gspo.system.imports import by_name, source_file
from gspo.train.build.compute import device_and_dtype, set_threads, sharding
from gspo.train.build.objective import assembly, make_credit, make_plan, temperature
from gspo.train.build.optim import critic_optimizer, make_trained_optimizer, optimizer_of
from gspo.train.build.policy import make_policy, processor_of, with_tower

if TYPE_CHECKING:
    from gspo.learner.critic import Critic


def make_learner(loaded: Loaded, world: World, objective: Any = None) -> Learner:
    """The models of this rank, loaded and sharded, and how batches train them."""
    config = loaded.config
    # Before a model is loaded, because the probe of the policy computes already.
    threads = set_threads(config, world.local_size)
    plan, credit = make_plan(loaded, objective), make_credit(loaded)
    policy, tokenizer = make_policy(config, plan.settings["level"] != "token", world)
    return Learner(
        policy,
        tokenizer,
        make_trained_optimizer(config, policy),
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
    # The frozen weights under the adapter are the reference.
    if actor.use_lora and own:
        return Reference(policy, *how, context=partial(by_name("gspo.models.lora:adapter_off"), policy.model))
    other = _other_model(config, ref.path, tokenizer, "ref.path").requires_grad_(False)
    if policy.world.size > 1:
        shard(other, other, policy.world, **sharding(config))
    return Reference(other, *how)


def make_teacher(config: Config, policy: PolicyModule, tokenizer: Any) -> Teacher | None:
    """The teacher of distillation, frozen; None: the algorithm has none."""
    how, actor = config.teacher, config.actor
    if how is None or algorithm_in(config).advantage != "teacher":
        return None
    if how.is_server:
        timeout_s = config.rollout.request_timeout
        return served_teacher(how.path, tokenizer, policy.world, timeout_s=timeout_s, coef=how.coef)
    other = _other_model(config, how.path, tokenizer, "teacher.path").requires_grad_(False)
    if how.exact_kl is not None and other.layout != policy.layout:
        raise ConfigError(
            f"teacher.exact_kl computes both models on the same micro-batches, but the layout of {actor.path} is "
            f"{policy.layout} and that of {how.path} {other.layout}; remove teacher.exact_kl"
        )
    if how.exact_kl is not None:
        policy.forks = other.forks = policy.forks and other.forks
    if policy.world.size > 1:
        shard(other, other, policy.world, **sharding(config))
    reference = Reference(other, temperature(config), actor.mb_spec.max_tokens_per_mb)
    return Teacher(partial(reference_logp, reference), how.coef, how.exact_kl, other)


def make_critic(config: Config, tokenizer: Any, world: World = ALONE) -> Critic | None:
    """The value model of PPO with its optimizer; None where advantages come from groups."""
    how, actor = config.critic, config.actor
    if how is None or algorithm_in(config).advantage != "gae":
        return None
    from gspo.learner.critic import Critic
    from gspo.learner.policy.value import ValueModule

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
