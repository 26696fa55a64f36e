"""A run's policy back in memory, at any of its checkpoints: for evaluation and export, not for going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gspo.config.schema import Config
from gspo.errors import CheckpointError, ConfigError
from gspo.learner.policy.module import PolicyModule
from gspo.models.loading import load_model, load_tokenizer
from gspo.runs import checkpoint
from gspo.runs.export import SHARD, base_name, refuse_used, write_model
from gspo.train.build import setup

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def restore_policy(config: Config, run: Path | None, step: int) -> tuple[PolicyModule, Any]:
    """The policy after `step` and its tokenizer; step 0 is the model the run starts from.

    The checkpoint is verified, and its type is kept: a run trained in bfloat16 on a GPU restores as such on a CPU.
    """
    device, dtype = setup.device_and_dtype(config)
    folder = None
    if step and run is not None:
        folder = run / "checkpoints" / f"step_{step:06d}"
        base = checkpoint.verify(folder).get("base")
        dtype = getattr(torch, base["dtype"]) if base else _dtype(folder / checkpoint.FILES[0], dtype)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    actor = config.actor
    model = load_model(
        actor.path, dtype, device, from_scratch=actor.init_from_scratch, seed=config.seed, tokenizer=tokenizer
    )
    setup.add_configured_adapter(config, model)
    policy = PolicyModule(model)
    if folder is not None:
        checkpoint.load(folder, policy, None)
    return policy, tokenizer


def _dtype(file: Path, default: torch.dtype) -> torch.dtype:
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            return _DTYPES.get(tensors.get_slice(names[0]).get_dtype(), default) if names else default
    except SafetensorError as cause:
        raise CheckpointError(f"{file} cannot be read as safetensors ({cause})") from cause


def export(config: Config, run: Path, step: int, to: Path, *, merge: bool = False, shard: str = SHARD) -> Path:
    """Write the policy after `step` into the new or empty folder `to`: configs, weights, tokenizer."""
    if merge and not config.actor.use_lora:
        raise ConfigError(f"{run} has no adapter to merge (actor.use_lora is false): leave out --merge")
    refuse_used(to)
    policy, tokenizer = restore_policy(config, run, step)
    origin = {"run": str(run), "step": step, "from": config.actor.path, "algorithm": config.algorithm}
    base = base_name(config.actor.path) if config.actor.use_lora and not merge else None
    return write_model(policy, tokenizer, to, origin, adapter_of=base, shard=shard)
