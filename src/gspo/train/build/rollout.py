"""The rollout producer and the filter of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gspo.config.objective import is_supervised
from gspo.config.schema import Config
from gspo.learner.credit import Shaping, is_flat
from gspo.rewards.route import Rewards
from gspo.rollout.buffer import Buffer, Snapshot
from gspo.rollout.groups import GroupAssembler
from gspo.rollout.producer import RolloutProducer
from gspo.rollout.storage import unpack_groups
from gspo.rollout.workflow import Filter, RejectReason, Workflow, from_data, reject_by_filter, single_turn
from gspo.runs import checkpoint
from gspo.runs.directory import RunDir
from gspo.runs.state import State
from gspo.sampling.api import Sampler
from gspo.sampling.local.engine import LocalSampler
from gspo.system.files import step_name
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
    reject_reason: RejectReason | None,
    step: int,
    total_steps: int,
) -> RolloutProducer:
    """The producer of scored groups, ahead of the trainer as far as rollout.max_head_offpolicyness allows."""
    rollout, num_samples = config.rollout, config.gconfig.n_samples
    # Rows of a data set do not get old.
    max_staleness = 0 if is_supervised(config) else rollout.max_head_offpolicyness
    # A sampler in the trainer's process cannot run in the background.
    background = max_staleness > 0 and not isinstance(sampler, LocalSampler)
    # The config counts samples; the buffer counts groups of `num_samples`.
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
