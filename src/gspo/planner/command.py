"""`gspo plan`: a config as a job for the simulation, and its answer as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.doctor import ModelFields, Unknown, find_source, shape_of
from gspo.errors import ConfigError
from gspo.planner.search import ClusterPlan, PlannedJob
from gspo.planner.simulation import (
    MODELS,
    WEIGHT,
    Gpu,
    ModelSize,
    SerialCost,
    Work,
    lognormal_lengths,
    recorded_lengths,
)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def job_of(
    config: Config,
    gpu: Gpu,
    num_gpus: int,
    *,
    model: str | None = None,
    mean_length: float | None = None,
    spread: float = 0.6,
    prompt_tokens: int = 256,
    recorded: Sequence[int] = (),
    reward_s: float = 0.0,
) -> PlannedJob:
    """A run of this config on these GPUs. recorded: lengths of another run's completions."""
    most = config.gconfig.max_new_tokens
    mean = sum(recorded) / len(recorded) if recorded else mean_length or most / 2
    if not 1 <= mean <= most:
        raise ConfigError(f"--length {mean:g} must be between 1 and gconfig.max_new_tokens, which is {most}")
    draw = recorded_lengths(list(recorded)) if recorded else lognormal_lengths(mean, spread, most)
    work = Work(config.train_dataset.batch_size, config.gconfig.n_samples, prompt_tokens, draw, num_steps=14)
    return PlannedJob(
        model_size(model or config.actor.path),
        gpu,
        num_gpus,
        work,
        mean,
        prompt_tokens + most,
        num_updates=config.actor.ppo_n_minibatches or 1,
        mb_tokens=config.actor.mb_spec.max_tokens_per_mb,
        rewards=SerialCost(sample_s=reward_s),
    )


def model_size(name: str) -> ModelSize:
    """A model of the table, or any model whose config.json is on this machine."""
    if name in MODELS:
        return MODELS[name]
    source = find_source(name)
    shape = shape_of(source) if isinstance(source, ModelFields) else source
    if isinstance(source, Unknown) or isinstance(shape, Unknown):
        reason = source.reason if isinstance(source, Unknown) else shape.reason  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(f"{reason}; pass --model with {' or '.join(MODELS)}, or a folder with a config.json")
    fields = {**source.fields, **(source.fields.get("text_config") or {})}
    experts = next((int(fields[key]) for key in _EXPERTS if fields.get(key)), 0)
    per_token = int(fields.get("num_experts_per_tok") or 0)
    # gate, up and down projections
    expert = 3 * shape.hidden * int(fields.get("moe_intermediate_size") or fields.get("intermediate_size") or 0)
    idle = (experts - per_token) * expert * shape.layers if experts and per_token else 0
    kv_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * WEIGHT
    return ModelSize(
        name, shape.parameters, shape.parameters - idle, shape.layers, shape.hidden, kv_bytes, experts, per_token
    )


def lengths_of_run(run: Path) -> list[int]:
    """The lengths of all completions in a run's sample files."""
    from gspo.system import read_jsonl, reading

    found = []
    for file in sorted((run / "samples").glob("step_*.jsonl")):
        with reading(file, ConfigError):
            found += [n for row in read_jsonl(file) if isinstance(n := row.get("length"), int) and 0 < n < 2**31]
    if not found:
        raise ConfigError(f"{run} has no sample files with lengths; give --length instead of --run")
    return found


def row_of(job: PlannedJob, plan: ClusterPlan) -> dict[str, Any]:
    """One line of the answer, as values."""
    found = plan.result
    return {
        "trainer_gpus": plan.trainers,
        "servers": plan.samplers,
        "gpus_per_server": plan.tensor_parallel,
        "in_turns": plan.in_turns,
        "max_head_offpolicyness": plan.staleness,
        "step_s": found.step_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / job.num_gpus,
        "busy": found.busy,
        "limit": plan.limit,
        "staleness": found.staleness,
        "trainer_gb": plan.trainer_bytes / 1e9,
    }
