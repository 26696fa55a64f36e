"""The best split of GPUs between sampling and training, and the best staleness bound, by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gspo.errors import ConfigError
from gspo.planner import costs
from gspo.planner.costs import ModelSize
from gspo.planner.hardware import MEMORY_SHARE, Gpu
from gspo.planner.simulate import Result, SerialCost, Work, simulate


@dataclass(frozen=True)
class PlannedJob:
    """A run to be planned."""

    model: ModelSize
    gpu: Gpu
    num_gpus: int
    work: Work  # its max_staleness is varied
    mean_length: float
    longest: int  # prompt and completion
    num_updates: int = 4
    mb_tokens: int = 16384
    rewards: SerialCost = costs.NO_REWARD
    leader: SerialCost = costs.LEADER


@dataclass(frozen=True)
class ClusterPlan:
    """One split and its simulated result."""

    trainers: int
    samplers: int  # servers
    tensor_parallel: int
    staleness: int
    result: Result
    trainer_bytes: float

    @property
    def in_turns(self) -> bool:
        """Whether the same GPUs sample and train."""
        return self.staleness == 0


def plans(job: PlannedJob, stalenesses: Sequence[int] = (0, 1, 2, 4, 8)) -> list[ClusterPlan]:
    """All splits that fit, fastest first; of equal ones, the fresher."""
    found = [_plan(job, *split, eta) for split in _splits(job) for eta in stalenesses if eta]
    if 0 in stalenesses and (turns := _in_turns(job)) is not None:
        found.append(turns)
    if not found:
        raise ConfigError(
            f"{job.model.name} does not fit: training needs {_fewest_trainers(job)} {job.gpu.name} and sampling "
            f"{costs.smallest_engine(job.model, job.gpu, job.longest)}; there are {job.num_gpus}"
        )
    return sorted(found, key=lambda plan: (round(plan.result.step_s, 2), plan.staleness))


def _fewest_trainers(job: PlannedJob) -> int:
    num, most = 1, 65536
    while costs.trainer_bytes(job.model, num, job.mb_tokens) > job.gpu.memory * MEMORY_SHARE:
        num *= 2
        if num > most:
            raise ConfigError(
                f"{job.model.name} cannot be trained on {job.gpu.name}: a micro-batch of {job.mb_tokens:,} tokens "
                "alone needs more than its memory; lower actor.mb_spec.max_tokens_per_mb"
            )
    return num


def _splits(job: PlannedJob) -> Iterator[tuple[int, int, int]]:
    """(trainer GPUs, servers, GPUs per server): eighths of all GPUs, where both sides fit."""
    engine = costs.smallest_engine(job.model, job.gpu, job.longest)
    fewest = _fewest_trainers(job)
    seen = set()
    for eighths in range(1, 8):
        trainers = max(job.num_gpus * eighths // 8, 1)
        servers = (job.num_gpus - trainers) // engine
        if trainers >= fewest and servers >= 1 and trainers not in seen:
            seen.add(trainers)
            yield trainers, servers, engine


def _in_turns(job: PlannedJob) -> ClusterPlan | None:
    """Without staleness all GPUs sample, then all train: neither side waits for the other's GPUs."""
    engine = costs.smallest_engine(job.model, job.gpu, job.longest)
    if job.num_gpus < max(engine, _fewest_trainers(job)):
        return None
    return _plan(job, job.num_gpus, job.num_gpus // engine, engine, 0)


def _plan(job: PlannedJob, trainers: int, servers: int, engine: int, eta: int) -> ClusterPlan:
    work, model = job.work, job.model
    context = work.prompt_tokens + job.mean_length / 2
    tokens = work.num_groups * (work.prompt_tokens + work.group_size * job.mean_length)
    result = simulate(
        replace(work, max_staleness=eta, num_steps=work.num_steps + 2 * eta),  # filling and emptying do not count
        costs.sampler_cost(model, job.gpu, engine, context=context, longest=job.longest),
        costs.trainer_cost(
            model, job.gpu, trainers, context=context, batch_tokens=tokens, num_updates=job.num_updates,
            mb_tokens=job.mb_tokens,
        ),
        num_servers=servers,
        leader=job.leader,
        rewards=job.rewards,
        in_process=eta == 0,
    )  # fmt: skip
    return ClusterPlan(trainers, servers, engine, eta, result, costs.trainer_bytes(model, trainers, job.mb_tokens))
