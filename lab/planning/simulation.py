"""The pipeline of a run simulated with the real buffer: hardware, costs, and the time of a step.

The buffer is the real one (`rollout/buffer.py`): it decides which groups may be sampled at which version and which form
the next batch. Everything else is a queue with a service time. Rows of a server advance together, one token per decode
step, and the time of a step depends on how many rows there are. New weights interrupt generation: rows continue after
their tokens have been computed again.

Work is counted in seconds of a component that has what it needs. On a machine whose components share cores
(`SharedCores`), those that are busy on the same core take turns.

The shares (of peak arithmetic and of memory bandwidth) are assumptions, written here in one place. Nothing of this was
measured by us: there was no GPU.

Arithmetic: 2 operations per active parameter and token forward, 4 backward, plus attention over the context. Decoding
reads the weights (of a mixture: the experts that the rows chose) and every row's keys and values once per step.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from gspo import rng
from gspo.errors import ConfigError
from gspo.rollout import Buffer


@dataclass(frozen=True)
class SamplerCost:
    """Seconds of one sampler server."""

    decode: Callable[[int, float], float]  # one step: (rows, mean tokens of context) → seconds
    prefill_token_s: float
    max_rows: int
    load_s: float = 0.0  # to take over new weights
    latency_s: float = 0.0  # from a submission to the first work of a server that was idle


@dataclass(frozen=True)
class TrainerCost:
    """Seconds of all trainer ranks together."""

    token_s: float  # one token of a completion: π_old, forward, backward
    prompt_token_s: float  # one token of a prompt, which is computed once per group
    fixed_s: float = 0.0  # per step: optimizer, metrics, files
    publish_s: float = 0.0  # per version of the weights


@dataclass(frozen=True)
class SerialCost:
    """Seconds of a component that handles samples one after another: the leader's thread, or the rewards."""

    sample_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True)
class SharedCores:
    """The core of each component, and how much slower all are while several cores are busy (memory, caches)."""

    servers: Sequence[int]
    trainer: int  # also of the leader and the rewards
    slowdown: float = 1.0

    def rates(self, is_busy: np.ndarray) -> np.ndarray:
        """Seconds of work per second, for each component in the order of `_Simulation.left`."""
        cores = np.array([*self.servers, self.trainer, self.trainer, self.trainer])
        num_busy = np.bincount(cores[is_busy], minlength=cores.max() + 1)
        slower = self.slowdown if (num_busy > 0).sum() > 1 else 1.0
        return 1.0 / np.maximum(num_busy[cores], 1) / slower


@dataclass(frozen=True)
class Work:
    """What a run has to do. `length(submission, sample)` is the number of tokens of a completion."""

    num_groups: int  # per batch
    group_size: int
    prompt_tokens: int
    length: Callable[[int, int], int]
    max_staleness: int = 0
    num_steps: int = 12


@dataclass
class Result:
    """Means over the steps after the pipeline has filled."""

    step_s: float
    steps_s: list[float]
    busy: dict[str, float]  # share of the time in which sampler, trainer, leader and rewards work
    rows: float  # mean rows of a server, as a share of its most
    staleness: float  # mean weight versions between sampling and training, over tokens
    max_staleness: int
    tokens_per_s: float

    @property
    def limit(self) -> str:
        """The component that is busy for the largest share of the time."""
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(order=True, slots=True)
class _Row:
    finish: float  # the server's progress at which the row has all its tokens
    number: int  # ties: the row that came first
    submission: int = field(compare=False)
    length: int = field(compare=False)
    begin: float = field(compare=False)  # the server's progress at which it joined
    counted: float = field(compare=False, default=0.0)  # tokens whose version is recorded


@dataclass
class _Server:
    cost: SamplerCost
    prompt_tokens: int
    progress: float = 0.0  # tokens that a row would have if it had been here from the start
    debt_s: float = 0.0  # prefill and loading before rows advance again
    rows: list[_Row] = field(default_factory=list)  # a heap
    begins: float = 0.0  # Σ of the rows' begin
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (submission, length)
    assigned_s: float = math.inf  # the work that was scheduled last
    token_s: float = math.inf  # seconds per token at that time

    def schedule(self) -> float:
        """Seconds of work until the next event: the end of a prefill, or a row that finishes."""
        if self.debt_s > 0:
            self.assigned_s = self.debt_s
        elif self.rows:
            context = self.prompt_tokens + self.progress - self.begins / len(self.rows)
            # The context grows until the next row finishes: the mean of both ends.
            ahead = self.rows[0].finish - self.progress
            self.token_s = self.cost.decode(len(self.rows), context + ahead / 2)
            self.assigned_s = ahead * self.token_s
        else:
            self.assigned_s = math.inf
        return self.assigned_s

    def settle(self, left_s: float) -> None:
        """Account for the work done since `schedule`, of which `left_s` is left."""
        done = self.assigned_s - left_s
        if math.isinf(self.assigned_s) or done <= 0:
            return
        if self.debt_s > 0:
            self.debt_s = max(self.debt_s - done, 0.0)
        else:
            self.progress += done / self.token_s

    def admit(self, numbers: Iterator[int]) -> int:
        """Move waiting samples into free rows, and return how many. The prompt of a group is computed once."""
        last, before = None, len(self.rows)
        while self.waiting and len(self.rows) < self.cost.max_rows:
            submission, length = self.waiting.popleft()
            if submission != last:
                self.debt_s += self.prompt_tokens * self.cost.prefill_token_s
            last = submission
            heapq.heappush(self.rows, _Row(self.progress + length, next(numbers), submission, length, self.progress))
            self.begins += self.progress
        return len(self.rows) - before

    def interrupt(self) -> None:
        """New weights: load them, then compute the tokens of all rows again (a group's prompt once)."""
        prompts = len({row.submission for row in self.rows}) * self.prompt_tokens
        tokens = prompts + sum(self.progress - row.begin for row in self.rows)
        self.debt_s = self.cost.load_s + tokens * self.cost.prefill_token_s


class _Serial:
    """A queue of groups with one worker."""

    def __init__(self, cost: SerialCost, group_size: int) -> None:
        self.cost, self._group_size = cost, group_size
        self.queue: deque[tuple[int, int]] = deque()  # (submission, tokens)

    def schedule(self) -> float:
        if not self.queue:
            return math.inf
        return self._group_size * self.cost.sample_s + self.queue[0][1] * self.cost.token_s


class _Simulation:
    def __init__(
        self,
        work: Work,
        sampler: SamplerCost,
        trainer: TrainerCost,
        leader: SerialCost,
        rewards: SerialCost,
        num_servers: int,
        cores: SharedCores | None,
        in_process: bool,
    ) -> None:
        self.work, self.trainer_cost, self.cores, self.in_process = work, trainer, cores, in_process
        self.servers = [_Server(sampler, work.prompt_tokens) for _ in range(num_servers)]
        # The samples of a group are handled together, when its last one is there: far fewer events.
        self.serial = {"leader": _Serial(leader, work.group_size), "rewards": _Serial(rewards, work.group_size)}
        # The order of components in `left`: servers, leader, rewards, trainer.
        self.leader_at, self.rewards_at, self.trainer_at = num_servers, num_servers + 1, num_servers + 2
        self.left = np.full(num_servers + 3, math.inf)  # seconds of work until each component's next event
        self.buffer = Buffer(work.num_groups, work.max_staleness, num_batches=work.num_steps)
        self.open: Counter[int] = Counter()  # samples of a group that are being sampled
        self.tokens: dict[int, int] = {}  # of a group's completions
        self.versions: dict[int, float] = {}  # of a group: Σ tokens × version at which they were sampled
        self.oldest: dict[int, int] = {}
        self.numbers = iter(range(2**62))
        self.now, self.version = 0.0, 0
        self.phase = "wait"  # of the trainer: wait, train, publish
        self.is_changed = False  # whether a batch may have become complete
        self.batch: list[int] = []
        self.ends: list[float] = []
        self.stale: list[tuple[float, int, int]] = []  # per step: Σ token staleness, largest, tokens
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.loads = np.zeros(num_servers, dtype=np.int64)  # samples of each server, waiting or in a row
        self.num_rows = 0
        self.rows_s = 0.0

    def run(self) -> Result:
        self._submit()
        while len(self.ends) < self.work.num_steps:
            self._advance()
        return self._result()

    def _advance(self) -> None:
        is_busy = np.isfinite(self.left)
        rates = self.cores.rates(is_busy) if self.cores else 1.0
        until = self.left / rates
        at = int(until.argmin())
        elapsed = float(until[at])
        assert math.isfinite(elapsed), "nothing can happen, and the run is not at its end"
        self.now += elapsed
        self._account(is_busy, elapsed)
        self.left -= elapsed * rates
        if at < len(self.servers):
            self._server_event(at)
        elif at == self.trainer_at:
            self._trainer_event()
        else:
            self._serial_event(at)
        if self.phase == "wait" and self.is_changed:
            self.is_changed = False
            self._begin_training()

    def _account(self, is_busy: np.ndarray, elapsed: float) -> None:
        num_servers = len(self.servers)
        self.busy_s["sampler"] += elapsed * float(is_busy[:num_servers].mean())
        for name, at in (("leader", self.leader_at), ("rewards", self.rewards_at), ("trainer", self.trainer_at)):
            self.busy_s[name] += elapsed * bool(is_busy[at])
        self.rows_s += elapsed * self.num_rows / num_servers

    def _submit(self) -> None:
        """Groups that the buffer admits go to the least loaded servers, each with all its samples."""
        touched: set[int] = set()
        for submission in self.buffer.submit(self.version):
            lengths = [self.work.length(submission, sample) for sample in range(self.work.group_size)]
            self.open[submission], self.tokens[submission] = len(lengths), sum(lengths)
            self.versions[submission], self.oldest[submission] = 0.0, self.version
            at = int(self.loads.argmin())
            if not self.loads[at]:
                self.servers[at].debt_s += self.servers[at].cost.latency_s
            self.loads[at] += len(lengths)
            self.servers[at].waiting.extend((submission, length) for length in lengths)
            touched.add(at)
        for at in touched:
            self._reschedule(at)

    def _reschedule(self, at: int) -> None:
        server = self.servers[at]
        server.settle(float(self.left[at]))
        self.num_rows += server.admit(self.numbers)
        self.left[at] = server.schedule()

    def _server_event(self, at: int) -> None:
        server = self.servers[at]
        if server.debt_s > 0:
            server.debt_s = 0.0
        else:
            server.progress = server.rows[0].finish
            while server.rows and server.rows[0].finish <= server.progress + 1e-9:
                row = heapq.heappop(server.rows)
                server.begins -= row.begin
                self._record(row, row.finish)
                self.num_rows -= 1
                self.loads[at] -= 1
                self.open[row.submission] -= 1
                if not self.open[row.submission]:
                    del self.open[row.submission]
                    self._queue("leader", self.leader_at, row.submission)
        self.num_rows += server.admit(self.numbers)
        self.left[at] = server.schedule()

    def _record(self, row: _Row, progress: float) -> None:
        """Count the tokens that a row got from this version of the weights."""
        tokens = progress - row.begin
        self.versions[row.submission] += (tokens - row.counted) * self.version
        row.counted = tokens

    def _queue(self, name: str, at: int, submission: int) -> None:
        queue = self.serial[name]
        queue.queue.append((submission, self.tokens[submission]))
        if len(queue.queue) == 1:
            self.left[at] = queue.schedule()

    def _serial_event(self, at: int) -> None:
        name = "leader" if at == self.leader_at else "rewards"
        queue = self.serial[name]
        submission, _ = queue.queue.popleft()
        self.left[at] = queue.schedule()
        if name == "leader" and self.serial["rewards"].cost != SerialCost():
            self._queue("rewards", self.rewards_at, submission)
            return
        self.buffer.accept(_Scored(submission))  # pyright: ignore[reportArgumentType]
        self.is_changed = True

    def _begin_training(self) -> None:
        # In one process the trainer does not train while something is being sampled.
        if not self.buffer.ready or (self.in_process and self.buffer.in_flight):
            return
        groups, _ = self.buffer.take()
        self.batch = [group.submission for group in groups]
        num_tokens = sum(self.tokens[i] for i in self.batch)
        prompts = len(self.batch) * self.work.prompt_tokens
        cost = self.trainer_cost
        self.phase = "train"
        self.left[self.trainer_at] = cost.token_s * num_tokens + cost.prompt_token_s * prompts + cost.fixed_s
        stale = self.version * num_tokens - sum(self.versions[i] for i in self.batch)
        oldest = max(self.version - self.oldest[i] for i in self.batch)
        self.stale.append((stale, oldest, num_tokens))
        for i in self.batch:
            del self.tokens[i], self.versions[i], self.oldest[i]

    def _trainer_event(self) -> None:
        if self.phase == "train":
            self.phase = "publish"
            self.left[self.trainer_at] = self.trainer_cost.publish_s
            return
        self.phase, self.is_changed = "wait", True
        self.left[self.trainer_at] = math.inf
        self.ends.append(self.now)
        for at, server in enumerate(self.servers):
            server.settle(float(self.left[at]))
            for row in server.rows:
                self._record(row, server.progress)
            server.interrupt()
        self.version += 1
        for at, server in enumerate(self.servers):
            self.num_rows += server.admit(self.numbers)
            self.left[at] = server.schedule()
        self._submit()

    def _result(self) -> Result:
        steps = np.diff([0.0, *self.ends])
        # The first steps fill the pipeline, and at the end nothing is sampled ahead.
        first = min(self.work.max_staleness + 1, len(steps) - 1)
        last = max(len(steps) - self.work.max_staleness, first + 1)
        kept, stale = steps[first:last], self.stale[first:last]
        tokens = sum(n for _, _, n in stale)
        return Result(
            step_s=float(kept.mean()),
            steps_s=[float(s) for s in steps],
            busy={name: seconds / self.now for name, seconds in self.busy_s.items()},
            rows=self.rows_s / self.now / self.servers[0].cost.max_rows,
            staleness=sum(s for s, _, _ in stale) / tokens,
            max_staleness=max(m for _, m, _ in stale),
            tokens_per_s=tokens / float(kept.sum()),
        )


class _Scored(NamedTuple):
    submission: int


def simulate(
    work: Work,
    sampler: SamplerCost,
    trainer: TrainerCost,
    *,
    num_servers: int = 1,
    leader: SerialCost = SerialCost(),  # noqa: B008
    rewards: SerialCost = SerialCost(),  # noqa: B008
    cores: SharedCores | None = None,
    in_process: bool = False,
) -> Result:
    """Simulate `work.num_steps` steps. in_process: one process samples and trains in turn."""
    return _Simulation(work, sampler, trainer, leader, rewards, num_servers, cores, in_process).run()


def lognormal_lengths(mean: float, spread: float, most: int, seed: int = 1) -> Callable[[int, int], int]:
    """Log-normal lengths with this mean and standard deviation of the logarithm, cut at `most`."""
    middle, normal = math.log(mean) - spread**2 / 2, NormalDist()

    def length(submission: int, sample: int) -> int:
        u = min(max(float(rng.uniform(seed, "plan", submission, sample)), 1e-12), 1 - 1e-12)
        return int(min(max(math.exp(middle + spread * normal.inv_cdf(u)), 1), most))

    return length


def recorded_lengths(found: list[int], seed: int = 1) -> Callable[[int, int], int]:
    """Lengths drawn from those of a run."""
    return lambda submission, sample: found[int(float(rng.uniform(seed, "plan", submission, sample)) * len(found))]


TRAIN_SHARE = 0.40  # of peak arithmetic in training; published figures of dense models are between 0.3 and 0.5
MOE_TRAIN_SHARE = 0.20  # mixtures of experts
PREFILL_SHARE = 0.50  # of peak arithmetic in prefill and large decode batches
BANDWIDTH_SHARE = 0.70  # of memory bandwidth in decoding
MEMORY_SHARE = 0.90  # of a GPU's memory that an engine may use
STEP_S = 0.004  # of a decode step outside kernels: scheduling, launches, sampling
REDUCE_S = 15e-6  # one all-reduce of a decode step, for tensor parallelism; two per layer
DIGEST = 1.7e9  # bytes/s of sha256 on one core; measured on an AMD EPYC
HOST_COPY = 25e9  # bytes/s from host memory to a GPU


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # bfloat16, dense, per second
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes
    link: float  # bytes/s between the GPUs of a machine, one direction
    network: float  # bytes/s of a GPU's share of the network between machines
    per_machine: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312e12, 2.04e12, 80e9, 300e9, 25e9),
        Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9),
        Gpu("H800", 989e12, 3.35e12, 80e9, 200e9, 50e9),
        Gpu("H20", 148e12, 4.0e12, 96e9, 450e9, 50e9),
        Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9),
        Gpu("B200", 2250e12, 8.0e12, 180e9, 900e9, 50e9),
        Gpu("L40S", 362e12, 0.864e12, 48e9, 32e9, 12.5e9),
    )
}


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """`H100:64` as a GPU and a number.

    >>> gpu, count = parse_gpus("H100:64")
    >>> gpu.name, count
    ('H100', 64)
    """
    found = re.fullmatch(r"([A-Za-z0-9]+):(\d+)", text)
    if not found or found[1].upper() not in GPUS or not 2 <= int(found[2]) <= 65536:
        raise ConfigError(
            f"--gpus {text}: expected NAME:NUMBER with a name of {', '.join(GPUS)} and a number from 2 to 65536, "
            "for example H100:64"
        )
    return GPUS[found[1].upper()], int(found[2])


WEIGHT = 2  # bytes of a bfloat16 weight
STATE = 16  # bytes per parameter in training: weight, gradient, float32 copy, two moments (2 + 2 + 4 + 4 + 4)

# The leader's thread, measured on one core of an AMD EPYC (docs/planning.md): writing a request, parsing and checking
# its reply 1.3e-4 s + 7.8e-8 s per token; the HTTP exchange 1.5e-4 s.
LEADER = SerialCost(sample_s=2.8e-4, token_s=7.8e-8)
NO_REWARD = SerialCost()


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that time and memory depend on."""

    name: str
    parameters: float
    active: float  # parameters that one token uses
    layers: int
    hidden: int
    kv_bytes: int  # keys and values of one token
    experts: int = 0
    experts_per_token: int = 0

    def touched(self, rows: float) -> float:
        """Parameters that a decode step of `rows` tokens reads: of a mixture, the experts that at least one row chose.

        >>> dense = ModelSize("7B", 7e9, 7e9, 28, 3584, 57344)
        >>> dense.touched(1) == dense.touched(100) == 7e9
        True
        """
        if not self.experts:
            return self.parameters
        share = self.experts_per_token / self.experts
        in_experts = (self.parameters - self.active) / (1 - share)
        return self.parameters - in_experts + in_experts * (1 - (1 - share) ** rows)


MODELS = {
    # Qwen2.5-7B: 28 layers, 4 key-value heads of 128. Qwen3-30B-A3B: 48 layers, 4 of 128, 128 experts, 8 per token.
    "7B": ModelSize("7B dense", 7.6e9, 7.6e9, 28, 3584, 28 * 2 * 4 * 128 * 2),
    "30B-A3B": ModelSize("30B-A3B mixture", 30.5e9, 3.3e9, 48, 2048, 48 * 2 * 4 * 128 * 2, 128, 8),
}


def sampler_cost(
    model: ModelSize, gpu: Gpu, tensor_parallel: int, *, context: float, longest: int, most_rows: int = 256
) -> SamplerCost:
    """One engine on `tensor_parallel` GPUs; `context` is the mean and `longest` the most tokens of a sequence."""
    flops = tensor_parallel * gpu.flops * PREFILL_SHARE
    bandwidth = tensor_parallel * gpu.bandwidth * BANDWIDTH_SHARE
    overhead = STEP_S + (2 * model.layers * REDUCE_S if tensor_parallel > 1 else 0.0)

    def decode(rows: int, tokens: float) -> float:
        read = (model.touched(rows) * WEIGHT + rows * tokens * model.kv_bytes) / bandwidth
        return max(read, 2 * model.active * rows / flops) + overhead

    free = tensor_parallel * gpu.memory * MEMORY_SHARE - model.parameters * WEIGHT
    rows = int(free // (model.kv_bytes * min(longest, 2 * context)))
    prefill = (2 * model.active + 2 * model.layers * model.hidden * context) / flops
    # A server receives new weights while it samples; only the copy to its GPUs interrupts it.
    load_s = 0.5 + model.parameters * WEIGHT / tensor_parallel / HOST_COPY
    return SamplerCost(decode, prefill, max(min(rows, most_rows), 1), load_s)


def publish_s(model: ModelSize, gpu: Gpu, num_servers: int, *, pipelined: bool = False) -> float:
    """Seconds until all servers have a new version: rank 0 computes its digest and sends it to each server.

    Everything passes through the network of rank 0. pipelined: each server passes on what it receives, and every rank
    computes the digest of its shard (docs/scaling.md, not built).
    """
    num_bytes = model.parameters * WEIGHT
    if pipelined:
        return 0.5 + num_bytes / gpu.network
    return num_bytes / DIGEST + num_servers * num_bytes / gpu.network


@dataclass(frozen=True)
class TrainerParts:
    """Seconds of one step of FSDP2 by kind of work. All-gathers overlap with arithmetic, the rest does not."""

    arithmetic: float
    all_gathers: float
    fixed: float  # optimizer, metrics, files
    weights: float  # to all servers

    @property
    def limit(self) -> str:
        """The largest of them."""
        seconds = {"arithmetic": self.arithmetic, "all-gathers": self.all_gathers, "weights": self.weights}
        return max({**seconds, "fixed": self.fixed}.items(), key=lambda item: item[1])[0]

    def cost(self, batch_tokens: float) -> TrainerCost:
        token_s = max(self.arithmetic, self.all_gathers) / batch_tokens
        return TrainerCost(token_s, token_s, fixed_s=self.fixed, publish_s=self.weights)


def trainer_parts(
    model: ModelSize, gpu: Gpu, num_gpus: int, *, context: float, batch_tokens: float, num_updates: int, mb_tokens: int,
    weights: float = 0.0,
) -> TrainerParts:  # fmt: skip
    """FSDP2 over `num_gpus`: π_old, forward and backward with recomputed activations, and the all-gathers."""
    share = MOE_TRAIN_SHARE if model.experts else TRAIN_SHARE
    forward = 2 * model.active + 2 * model.layers * model.hidden * context  # of one token; attention is causal
    # π_old 1, forward 1, forward again 1, backward 2.
    arithmetic = 5 * forward * batch_tokens / (num_gpus * gpu.flops * share)
    link = gpu.link if num_gpus <= gpu.per_machine else gpu.network
    # Each micro-batch of a rank gathers the weights three times and scatters the gradients once. Every update has at
    # least one micro-batch, so that more ranks do not reduce this below a floor.
    gathers = max(batch_tokens / (num_gpus * mb_tokens), num_updates)
    all_gathers = 4 * gathers * model.parameters * WEIGHT / link
    optimizer = num_updates * 3 * STATE * model.parameters / num_gpus / gpu.bandwidth
    return TrainerParts(arithmetic, all_gathers, optimizer + 1.0, weights)


def trainer_bytes(model: ModelSize, num_gpus: int, mb_tokens: int) -> float:
    """Bytes of one trainer GPU: sharded state, one layer's full weights, the inputs of all layers."""
    sharded = STATE * model.parameters / num_gpus
    gathered = 2 * WEIGHT * model.parameters / model.layers
    return sharded + gathered + mb_tokens * model.hidden * WEIGHT * (model.layers + 30)


def smallest_engine(model: ModelSize, gpu: Gpu, longest: int) -> int:
    """The smallest power of two of GPUs that holds the weights and 8 of the longest sequences."""
    size = 1
    while size * gpu.memory * MEMORY_SHARE < model.parameters * WEIGHT + 8 * longest * model.kv_bytes:
        size *= 2
    return size
