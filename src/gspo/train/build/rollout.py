"""The rollout: the sampler, its parameters and weights, the producer and the filter of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo.config import OWN, Config, engine_of, flags_of, is_supervised
from gspo.learner import PolicyModule, Shaping, full_parameters, image_prompts, is_flat
from gspo.models import end_tokens
from gspo.rewards import Rewards
from gspo.rollout import (
    Buffer,
    Filter,
    GroupAssembler,
    NullProducer,
    RejectReason,
    RolloutProducer,
    Snapshot,
    Workflow,
    from_data,
    reject_by_filter,
    single_turn,
    unpack_groups,
)
from gspo.runs import RunDir, State, checkpoint
from gspo.sampling import LocalSampler, Sampler, rows_at_once
from gspo.system import Launched, by_name, step_name
from gspo.train.build.learner import has_ranks, make_shaping, whole_model
from gspo.types import Group, Prompt, SamplingParams

ENGINE_START_S = 900.0  # an engine loads, compiles and captures for minutes before it serves


def make_sampler(
    config: Config,
    policy: PolicyModule,
    tokenizer: Any,
    version: int,
    run: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Sampler:
    """The sampler servers that the launcher started for this run, else the in-process one on the policy's weights."""
    # Sampling in this process. One rank samples from the policy's own tensors; with several ranks the policy is
    # sharded, so the sampler needs a whole copy of the model.
    if run is None or not Launched.read().num_samplers:
        if policy.world.size == 1:
            return local_sampler(config, policy.model, tokenizer, version, say, policy)
        model = whole_model(config, tokenizer, policy.compute_dtype, with_adapter=True)
        local = local_sampler(config, model, tokenizer, version, say)
        local.load_weights(version, weights_for(config, local, policy))
        return local
    connect = by_name("gspo.train.build.sampler_client:connect")
    # Sampler servers load the weights of `version` before the first request.
    sampler = connect(
        policy,
        tokenizer,
        run,
        seed=config.seed,
        max_tokens=config.gconfig.max_tokens,
        mode=config.actor.weight_update_mode,
        timeout_s=config.rollout.request_timeout,
        needs_routes=config.actor.routing_replay == "rollout",
        join_s=ENGINE_START_S if engine_of(config).is_external else None,
        sampler_dtype=sampler_dtype(config),
        say=say,
    )
    try:
        sampler.load_weights(version, weights_for(config, sampler, policy))
    except BaseException:
        sampler.close()
        raise
    return sampler


def samples_in_process() -> bool:
    """Whether the launcher started no sampler servers for this run."""
    return not Launched.read().num_samplers


def sampler_dtype(config: Config) -> torch.dtype | None:
    """The dtype of sampler servers if an engine flag sets one; None: the trainer's dtype.

    A quantised engine gets the tolerance of the coarsest dtype.
    """
    options = flags_of(config)
    if options.get("quantization") is not None:
        return torch.bfloat16
    dtype = getattr(torch, str(options.get("dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def local_sampler(
    config: Config,
    model: Any,
    tokenizer: Any,
    version: int,
    say: Callable[[str], None] = lambda _: None,
    policy: PolicyModule | None = None,
) -> LocalSampler:
    """The in-process sampler on this model; `say` gets one line about the engine that was chosen for it.

    `policy` is given if it has the same model.
    """
    precision = config.rollout.sampler_precision
    images: dict[str, Any] = {}
    if policy is not None and policy.vision is not None and policy.processor is not None:
        images["image_prompts"] = image_prompts(policy.processor)
        if precision == "none":
            images["vision"] = policy.vision
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    engine = engine_of(config)
    make: type[LocalSampler] = by_name((engine if engine.in_process else OWN).sampler)
    if precision != "none":
        make = partial(by_name("gspo.sampling.rounded:RoundedSampler"), precision=precision)  # pyright: ignore[reportAssignmentType]
    return make(
        model,
        seed=config.seed,
        eos_token_ids=end_tokens(model, tokenizer),
        decode=decoder(tokenizer),
        max_rows=config.rollout.max_concurrent_rollouts
        or rows_at_once(num_weights, config.gconfig.max_new_tokens, config.rollout.max_head_offpolicyness),
        max_context=config.gconfig.max_tokens,
        version=version,
        say=say,
        **images,
    )


def weights_for(
    config: Config, sampler: Sampler | NullProducer, policy: PolicyModule
) -> Iterable[tuple[str, torch.Tensor]] | None:
    """The tensors for `load_weights`; None if the sampler reads the policy's own tensors.

    A sampler with the same layers gets the trained tensors by their parameter names. Other samplers get all weights by
    their names on disk, with an adapter merged into them.
    """
    in_process = getattr(sampler, "in_process", False)  # a client of servers has no such attribute
    # See make_sampler: an in-process sampler of several ranks has a copy of the model.
    if in_process and policy.world.size == 1:
        return None
    if in_process or sends_adapter(config):
        return full_parameters(policy.model, policy.compute_dtype)
    return policy.full_weights()


def sends_adapter(config: Config) -> bool:
    """Whether sampler servers get only the adapter; they have loaded the base model themselves.

    Not with several ranks: servers are then compared with each other, not with the trainer; a wrong base would pass.
    """
    takes_adapter, actor = engine_of(config).takes_adapter, config.actor
    if not actor.use_lora or has_ranks(config):
        return False
    on_experts = "experts" in actor.target_modules
    return not takes_adapter or by_name(takes_adapter)(flags_of(config), actor.lora_rank, on_experts)


def sampling_params(config: Config) -> SamplingParams:
    """How training samples are drawn, and whether the sampler records what truncation keeps."""
    g = config.gconfig
    params = SamplingParams(
        max_new_tokens=g.max_new_tokens,
        min_new_tokens=g.min_new_tokens,
        temperature=g.temperature,
        top_p=g.top_p,
        top_k=g.top_k,
        min_p=g.min_p,
        stop_token_ids=tuple(stop for stop in g.stop if isinstance(stop, int)),
        stop=tuple(stop for stop in g.stop if isinstance(stop, str)),
        ignore_eos=g.ignore_eos,
    )
    return replace(params, record_kept=params.is_truncated and config.actor.sampling_mask_replay)


def evaluation_params(config: Config) -> tuple[SamplingParams, int]:
    """The sampling parameters of an evaluation, and the samples per problem. Stop rules are those of training."""
    how = config.eval_gconfig
    assert how is not None, "config.resolve fills it in"
    own = {name: getattr(how, name) for name in ("max_new_tokens", "top_p", "top_k", "min_p")}
    # Log-probs of greedy samples are of the distribution that training samples from.
    own |= {"temperature": how.temperature} if how.temperature else {"greedy": True}
    # Nothing is trained on these samples, so no kept sets are needed.
    return replace(sampling_params(config), **own, record_kept=False), how.n_samples


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def make_producer(
    config: Config,
    begin: Snapshot,
    *,
    sampler: Sampler,
    rewards: Rewards,
    prompt_of: Callable[[int], Prompt],
    decode: Callable[[Sequence[int]], str],
    workflow: Workflow,
    reject_reason: RejectReason | None,
    step: int,
    total_steps: int,
) -> RolloutProducer:
    """The producer of scored groups, ahead of the trainer as far as rollout.max_head_offpolicyness allows."""
    rollout, num_samples = config.rollout, config.gconfig.n_samples
    max_staleness = 0 if is_supervised(config) else rollout.max_head_offpolicyness
    # A sampler in the trainer's process cannot run in the background.
    background = max_staleness > 0 and not isinstance(sampler, LocalSampler)
    concurrent = rollout.max_concurrent_rollouts if background else None
    buffer = Buffer(
        config.train_dataset.batch_size,
        max_staleness,
        max_in_flight=None if concurrent is None else max(concurrent // num_samples, 1),
        num_batches=total_steps,
        taken=step,
        begin=begin,
    )
    return RolloutProducer(
        buffer,
        sampler=sampler,
        rewards=rewards,
        prompt_of=prompt_of,
        assembler=GroupAssembler(num_samples, sampling_params(config), decode),
        workflow=workflow,
        background=background,
        reject_reason=reject_reason,
        max_refills=config.actor.max_refills,
        max_failure_fraction=config.reward.max_failure_fraction,
        timeout_s=rollout.request_timeout,
    )


def resumed_snapshot(run: RunDir, state: State, prompt_of: Callable[[int], Prompt]) -> Snapshot:
    """Where the buffer starts: the checkpoint of this step may hold groups that were sampled ahead of it."""
    stored = checkpoint.load_pending_groups(run.checkpoints / step_name(state.step))
    groups = () if stored is None else unpack_groups(*stored, prompt_of)
    return Snapshot(state.submission, tuple(state.resubmit), groups)


def make_workflow(config: Config) -> Workflow:
    """The workflow of a run without an environment: one completion per prompt, or in SFT the data set's own."""
    return from_data if is_supervised(config) else make_single_turn(config)


def make_single_turn(config: Config) -> Workflow:
    """One sampled completion per prompt."""
    return partial(single_turn, deadline_s=config.rollout.request_timeout)


def make_filter(config: Config, given: Filter | None) -> RejectReason | None:
    """Why a group is rejected: by the filter (`given.find_filter`), or for equal rewards (if refilled)."""
    # The user's filter runs first; the first reason that a check returns is reported.
    checks: list[RejectReason] = []
    if is_supervised(config):
        return None
    if given is not None:
        key = "rollout.dynamic_filter_fn" if config.rollout.dynamic_filter_fn else "dynamic_filter_fn"
        checks.append(partial(reject_by_filter, given, key))
    if config.actor.zero_variance_groups == "refill":
        checks.append(partial(_equal_rewards, make_shaping(config)))
    if not checks:
        return None
    return lambda group: next((why for check in checks if (why := check(group)) is not None), None)


def _equal_rewards(shaping: Shaping, group: Group) -> str | None:
    if not is_flat(group, shaping):
        return None
    return (
        "have equal rewards and teach nothing; `gspo report RUN --samples` shows them; set "
        "actor.zero_variance_groups=count"
    )
