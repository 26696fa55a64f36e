"""`gspo plan`: a config as a job for the simulation, and its answer as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gspo.cli.common import console, load_config
from gspo.config import Config
from gspo.doctor import ModelFields, Unknown, find_source, shape_of
from gspo.errors import ConfigError
from lab.planning.search import ClusterPlan, PlannedJob, plans
from lab.planning.simulation import (
    MODELS,
    WEIGHT,
    Gpu,
    ModelSize,
    SerialCost,
    Work,
    lognormal_lengths,
    parse_gpus,
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
    import json

    found = []
    for file in sorted((run / "samples").glob("step_*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            length = json.loads(line).get("length")
            if isinstance(length, int) and length > 0:
                found.append(length)
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


def plan(args: argparse.Namespace) -> int:
    """The verb."""
    gpu, num_gpus = parse_gpus(args.gpus)
    if args.length is not None and args.run is not None:
        raise ConfigError("--length and --run are two sources of the same lengths: give one of them")
    job = job_of(
        load_config(args).config,
        gpu,
        num_gpus,
        model=args.model,
        mean_length=args.length,
        prompt_tokens=args.prompt,
        recorded=lengths_of_run(args.run) if args.run else (),
        reward_s=args.reward_s,
    )
    found = [row_of(job, one) for one in plans(job)]
    if args.json:
        print(json.dumps({"simulated": True, "model": job.model.name, "gpus": args.gpus, "plans": found[: args.top]}))
        return 0
    table = Table(title=f"Simulated, not measured: {job.model.name} on {num_gpus} × {gpu.name}", title_justify="left")
    for name in ("train", "sample", "η", "s/step", "tokens/s/GPU", "busy: sampler, trainer", "limit", "staleness"):
        table.add_column(name)
    for row in found[: args.top]:
        servers = f"{row['servers']} × {row['gpus_per_server']}"
        table.add_row(
            f"{row['trainer_gpus']}{' (same GPUs)' if row['in_turns'] else ''}",
            servers,
            str(row["max_head_offpolicyness"]),
            f"{row['step_s']:.1f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['busy']['sampler']:.0%}, {row['busy']['trainer']:.0%}",
            row["limit"],
            f"{row['staleness']:.1f}",
        )
    console().print(table)
    print(
        "train: trainer GPUs; sample: servers × GPUs each; η: rollout.max_head_offpolicyness.\n"
        "docs/planning.md lists what is assumed."
    )
    return 0
