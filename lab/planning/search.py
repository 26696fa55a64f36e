"""The best split of GPUs between sampling and training, and the best staleness bound, by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gspo.errors import ConfigError
from lab.planning import simulation
from lab.planning.simulation import (
    MEMORY_SHARE,
    Gpu,
    ModelSize,
    Result,
    SamplerCost,
    SerialCost,
    TrainerParts,
    Work,
    simulate,
)


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
    rewards: SerialCost = simulation.NO_REWARD
    leader: SerialCost = simulation.LEADER
    pipelined: bool = False  # weights by a pipelined broadcast, which is planned and not built

    @property
    def context(self) -> float:
        """Mean tokens before a sampled token."""
        return self.work.prompt_tokens + self.mean_length / 2

    @property
    def batch_tokens(self) -> float:
        """Tokens that are trained in a step; a prompt is computed once per group."""
        return self.work.num_groups * (self.work.prompt_tokens + self.work.group_size * self.mean_length)


@dataclass(frozen=True)
class ClusterPlan:
    """One split and its simulated result."""

    trainers: int
    samplers: int  # servers
    tensor_parallel: int
    staleness: int
    result: Result
    trainer_bytes: float
    parts: TrainerParts

    @property
    def in_turns(self) -> bool:
        """Whether the same GPUs sample and train."""
        return self.staleness == 0

    @property
    def limit(self) -> str:
        """The component that is busy for the largest share of the time; of the trainer, its largest part."""
        found = self.result.limit
        return f"{found}: {self.parts.limit}" if found == "trainer" else found


def plans(job: PlannedJob, stalenesses: Sequence[int] = (0, 1, 2, 4, 8)) -> list[ClusterPlan]:
    """All splits that fit, fastest first; of equal ones, the fresher."""
    found = [_plan(job, *split, eta) for split in _splits(job) for eta in stalenesses if eta]
    if 0 in stalenesses and (turns := _in_turns(job)) is not None:
        found.append(turns)
    if not found:
        raise ConfigError(
            f"{job.model.name} does not fit: training needs {_fewest_trainers(job)} {job.gpu.name} and sampling "
            f"{simulation.smallest_engine(job.model, job.gpu, job.longest)}; there are {job.num_gpus}"
        )
    return sorted(found, key=lambda plan: (round(plan.result.step_s, 2), plan.staleness))


def _fewest_trainers(job: PlannedJob) -> int:
    num, most = 1, 65536
    while simulation.trainer_bytes(job.model, num, job.mb_tokens) > job.gpu.memory * MEMORY_SHARE:
        num *= 2
        if num > most:
            raise ConfigError(
                f"{job.model.name} cannot be trained on {job.gpu.name}: a micro-batch of {job.mb_tokens:,} tokens "
                "alone needs more than its memory; lower actor.mb_spec.max_tokens_per_mb"
            )
    return num


def _splits(job: PlannedJob) -> Iterator[Split]:
    """Eighths of all GPUs, where both sides fit."""
    engine = simulation.smallest_engine(job.model, job.gpu, job.longest)
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
    engine = simulation.smallest_engine(job.model, job.gpu, job.longest)
    if job.num_gpus < max(engine, _fewest_trainers(job)):
        return None
    return _plan(job, job.num_gpus, job.num_gpus // engine, engine, 0)


Split = tuple[int, int, int]  # trainer GPUs, servers, GPUs per server


def bound(job: PlannedJob, split: Split, eta: int) -> tuple[float, str]:
    """Seconds per step if no side ever waits for another, and the slowest component: no simulation."""
    trainers, servers, engine = split
    parts, sampler = _parts(job, trainers, servers), _sampler(job, engine)
    cost = parts.cost(job.batch_tokens)
    samples = job.work.num_groups * job.work.group_size
    rows = max(min(sampler.max_rows, samples * (eta + 1) // servers), 1)
    return max(
        (cost.token_s * job.batch_tokens + cost.fixed_s + cost.publish_s, f"trainer: {parts.limit}"),
        (samples * job.mean_length * sampler.decode(rows, job.context) / rows / servers, "sampler"),
        (samples * (job.leader.sample_s + job.mean_length * job.leader.token_s), "leader"),
    )


def best_bound(job: PlannedJob, eta: int) -> tuple[float, str, Split] | None:
    """The split with the smallest bound; None if nothing fits."""
    return min(((*bound(job, split, eta), split) for split in _splits(job)), default=None)


def best_plan(job: PlannedJob, eta: int, num_simulated: int = 3) -> ClusterPlan | None:
    """The fastest of the splits that have the smallest bounds, for large clusters; None if nothing fits."""
    if eta == 0:
        return _in_turns(job)
    likely = sorted(_splits(job), key=lambda split: bound(job, split, eta))[:num_simulated]
    found = [_plan(job, *split, eta) for split in likely]
    return min(found, key=lambda plan: plan.result.step_s, default=None)


def _parts(job: PlannedJob, trainers: int, servers: int) -> TrainerParts:
    return simulation.trainer_parts(
        job.model, job.gpu, trainers, context=job.context, batch_tokens=job.batch_tokens, num_updates=job.num_updates,
        mb_tokens=job.mb_tokens, weights=simulation.publish_s(job.model, job.gpu, servers, pipelined=job.pipelined),
    )  # fmt: skip


def _sampler(job: PlannedJob, engine: int) -> SamplerCost:
    return simulation.sampler_cost(job.model, job.gpu, engine, context=job.context, longest=job.longest)


def _plan(job: PlannedJob, trainers: int, servers: int, engine: int, eta: int) -> ClusterPlan:
    parts = _parts(job, trainers, servers)
    result = simulate(
        # Steps that fill and empty the pipeline do not count.
        replace(job.work, max_staleness=eta, num_steps=job.work.num_steps + 2 * eta),
        _sampler(job, engine),
        parts.cost(job.batch_tokens),
        num_servers=servers,
        leader=job.leader,
        rewards=job.rewards,
        in_process=eta == 0,
    )
    memory = simulation.trainer_bytes(job.model, trainers, job.mb_tokens)
    return ClusterPlan(trainers, servers, engine, eta, result, memory, parts)
