"""Seconds and bytes of each component on given hardware, from the shape of the model.

Arithmetic: 2 operations per active parameter and token forward, 4 backward, plus attention over the context. Decoding
reads the weights (of a mixture: the experts that the rows chose) and every row's keys and values once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo.planner import hardware
from gspo.planner.hardware import Gpu
from gspo.planner.simulate import SamplerCost, SerialCost, TrainerCost

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
    flops = tensor_parallel * gpu.flops * hardware.PREFILL_SHARE
    bandwidth = tensor_parallel * gpu.bandwidth * hardware.BANDWIDTH_SHARE
    overhead = hardware.STEP_S + (2 * model.layers * hardware.REDUCE_S if tensor_parallel > 1 else 0.0)

    def decode(rows: int, tokens: float) -> float:
        read = (model.touched(rows) * WEIGHT + rows * tokens * model.kv_bytes) / bandwidth
        return max(read, 2 * model.active * rows / flops) + overhead

    free = tensor_parallel * gpu.memory * hardware.MEMORY_SHARE - model.parameters * WEIGHT
    rows = int(free // (model.kv_bytes * min(longest, 2 * context)))
    prefill = (2 * model.active + 2 * model.layers * model.hidden * context) / flops
    # A server receives new weights while it samples; only the copy to its GPUs interrupts it.
    load_s = 0.5 + model.parameters * WEIGHT / tensor_parallel / hardware.HOST_COPY
    return SamplerCost(decode, prefill, max(min(rows, most_rows), 1), load_s)


def publish_s(model: ModelSize, gpu: Gpu, num_servers: int, *, pipelined: bool = False) -> float:
    """Seconds until all servers have a new version: rank 0 computes its digest and sends it to each server.

    Everything passes through the network of rank 0. pipelined: each server passes on what it receives, and every rank
    computes the digest of its shard (CONTRIBUTING.md, not built).
    """
    num_bytes = model.parameters * WEIGHT
    if pipelined:
        return 0.5 + num_bytes / gpu.network
    return num_bytes / hardware.DIGEST + num_servers * num_bytes / gpu.network


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
    share = hardware.MOE_TRAIN_SHARE if model.experts else hardware.TRAIN_SHARE
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
    while size * gpu.memory * hardware.MEMORY_SHARE < model.parameters * WEIGHT + 8 * longest * model.kv_bytes:
        size *= 2
    return size
