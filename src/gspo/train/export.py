"""`gspo export`: a run's weights as a model folder that transformers and every engine built on it load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from gspo.config.schema import Config
from gspo.errors import CheckpointError, ConfigError
from gspo.train.policy import PolicyModule, weight_names
from gspo.train.restore import restore_policy

SHARD = "5GB"


def export(config: Config, run: Path, step: int, to: Path, *, shard: str = SHARD) -> Path:
    """Write the policy after `step` into the new or empty folder `to`: configs, weights, tokenizer."""
    refuse_used(to)
    policy, tokenizer = restore_policy(config, run, step)
    origin = {"run": str(run), "step": step, "from": config.actor.path, "algorithm": config.algorithm}
    return write_model(policy, tokenizer, to, origin, shard=shard)


def refuse_used(to: Path) -> None:
    """ConfigError where a folder holds anything: an export never mixes with other files, nor replaces them."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not an empty folder, and an export replaces nothing; give another one with --to")


def write_model(policy: PolicyModule, tokenizer: Any, to: Path, origin: dict[str, Any], *, shard: str = SHARD) -> Path:
    """Write aside, then rename: the folder is whole or it is not there."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}-"))
    except OSError as cause:
        raise ConfigError(f"{to.parent} cannot be written: {cause.strerror}; give another folder with --to") from cause
    try:
        _weights(policy, aside, shard)
        model = policy.model
        config = model.config
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        config.save_pretrained(aside)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(aside)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        tokenizer.save_pretrained(aside)
        (aside / "gspo.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        os.chmod(aside, 0o755)  # mkdtemp's folders are private, and so are safetensors' files
        for file in aside.iterdir():
            os.chmod(file, 0o644)
        if to.exists():
            to.rmdir()  # empty, or it is an error
        aside.rename(to)
    except OSError as cause:
        raise CheckpointError(f"could not write {to}: {cause.strerror or cause}; nothing was left there") from cause
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def _weights(policy: PolicyModule, folder: Path, shard: str) -> None:
    """Tensors by their names on disk, tied ones once, in files of at most `shard`."""
    tensors: dict[str, torch.Tensor] = {name: tensor.cpu().contiguous() for name, tensor in weight_names(policy)}
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=shard)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
