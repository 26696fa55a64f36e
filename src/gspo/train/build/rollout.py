"""The rollout producer and the filter of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gspo.config.schema import Config
from gspo.errors import ConfigError
from gspo.learner.credit import Shaping, is_flat
from gspo.rewards.route import Rewards
from gspo.rollout.buffer import Buffer, Snapshot
from gspo.rollout.groups import Arrivals, Filter, Keeps, Workflow, filtered
from gspo.rollout.producer import Ahead
from gspo.sampling.api import Sampler
from gspo.sampling.local.engine import LocalSampler
from gspo.system.imports import find_function
from gspo.train.build.objective import make_shaping
from gspo.train.build.sampler import sampling_params
from gspo.types import Group, Prompt


def make_producer(
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
        config.train_dataset.batch_size,
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
