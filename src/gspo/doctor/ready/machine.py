"""Processes, GPUs, packages and memory of this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo.config import Loaded
from gspo.config.layout import layout_of
from gspo.config.schema import Config
from gspo.doctor.ready.check import ReadyCheck
from gspo.launcher.plan import make_launch_plan
from gspo.launcher.start import require_machine
from gspo.lint.facts import facts_of
from gspo.system.gpus import visible_gpus
from gspo.system.imports import install_command
from gspo.system.text import human


def look_at_processes(config: Config) -> str:
    """The processes of the run; ConfigError if this machine lacks GPUs or an engine."""
    num_gpus = visible_gpus()
    layout = make_launch_plan(config, [], num_gpus).layout
    if config.scheduler.type in ("ray", "slurm"):
        return f"{layout}, placed by {config.scheduler.type}"
    require_machine(config, layout, num_gpus)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{layout}; this machine has {num_gpus} GPUs and {cores} CPU cores"


def check_packages(config: Config) -> Iterator[ReadyCheck]:
    """Optional dependencies; those of data sets, rewards and models are checked with them."""
    for is_used, key, package, extra in (
        (config.actor.use_lora, "actor.use_lora", "peft", "lora"),
        (config.actor.lora_base_bits == 4, "actor.lora_base_bits", "bitsandbytes", "quantized"),
        (config.scheduler.type == "ray", "scheduler.type", "ray", "ray"),
    ):
        if is_used and importlib.util.find_spec(package) is None:
            yield ReadyCheck(key, "failed", f"{key} needs {package}: {install_command(extra)}")


def check_memory(loaded: Loaded, memory: Mapping[str, Any]) -> ReadyCheck:
    """The estimate against the memory of this machine or of its first GPU."""
    config, facts = loaded.config, facts_of(loaded)
    if config.scheduler.type in ("ray", "slurm"):
        return ReadyCheck("memory", "unknown", "the memory of the cluster's machines is not known here")
    trainer, sampler = (memory.get("totals", {}).get(side) for side in ("trainer", "sampler"))
    if trainer is None or sampler is None:
        return ReadyCheck("memory", "unknown", memory.get("unknown") or "a part of the estimate is unknown")
    layout = layout_of(config, facts.num_gpus)
    # An engine divides the memory that it has among its sequences; the in-process sampler and our servers do not.
    sampler = 0 if facts.external_sampler else sampler
    if facts.num_gpus:
        found, where = _gpu_memory(), "a GPU of this machine"
        needed = trainer + sampler if layout.sampler is None else max(trainer, sampler)
    else:
        found, where = _machine_memory(), "this machine"
        needed = trainer * layout.ranks + sampler * max(layout.num_samplers, 1)
    if found is None:
        return ReadyCheck("memory", "unknown", f"the memory of {where} could not be read")
    parts = f"trainer {human(trainer)}, samples {human(sampler)} at most"
    if needed <= found:
        return ReadyCheck("memory", "ok", f"needs {human(needed)} ({parts}); {where} has {human(found)}")
    # The difference is activations of the longest completions that are allowed.
    if needed - (trainer - memory["least"]) * (layout.ranks if not facts.num_gpus else 1) <= found:
        return ReadyCheck(
            "memory",
            "unknown",
            f"may need {human(needed)} with completions of full length ({parts}), and {where} has {human(found)}; "
            "actor.gradient_checkpointing: true or a smaller actor.mb_spec.max_tokens_per_mb needs less",
        )
    remedy = (
        "use a smaller model, actor.use_lora: true, or actor.dtype: bfloat16"
        if trainer > found
        else "lower gconfig.max_new_tokens, rollout.max_concurrent_rollouts or train_dataset.batch_size"
    )
    return ReadyCheck("memory", "failed", f"needs {human(needed)} ({parts}), but {where} has {human(found)}; {remedy}")


def _machine_memory() -> int | None:
    """Bytes of memory that processes of this machine or container may use."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _gpu_memory() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
