"""`gspo export`: a run's weights as a model folder that transformers and every engine built on it load.

Of a run with an adapter, the adapter in peft's own format, or with `merge` the plain model that it amounts to.
"""

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

from gspo.errors import CheckpointError, ConfigError
from gspo.learner.policy.module import PolicyModule, weight_names
from gspo.models import embedded
from gspo.models.loading import EMBEDDED, locate
from gspo.models.lora import save_adapter

SHARD = "5GB"


def base_name(path: str) -> str:
    """Where others find the base model of an adapter: an absolute folder, or the hub's name."""
    place = str(embedded.folder(path)) if path.startswith(EMBEDDED) else locate(path)
    return str(Path(place).expanduser().resolve()) if Path(place).expanduser().is_dir() else place


def refuse_used(to: Path) -> None:
    """ConfigError where a folder holds anything: an export never mixes with other files, nor replaces them."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is not an empty folder, and an export replaces nothing; give another one with --to")


def write_model(
    policy: PolicyModule,
    tokenizer: Any,
    to: Path,
    origin: dict[str, Any],
    *,
    adapter_of: str | None = None,
    shard: str = SHARD,
) -> Path:
    """Write aside, then rename: the folder is whole or it is not there. `adapter_of`: only the adapter on that base."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}-"))
    except OSError as cause:
        raise ConfigError(f"{to.parent} cannot be written: {cause.strerror}; give another folder with --to") from cause
    try:
        if adapter_of is not None:
            save_adapter(policy.model, aside, adapter_of)
        else:
            _weights(policy, aside, shard)
            _configs(policy.model, aside)
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


def _configs(model: Any, folder: Path) -> None:
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _weights(policy: PolicyModule, folder: Path, shard: str) -> None:
    """Tensors by their names on disk, tied ones once, in files of at most `shard`."""
    tensors: dict[str, torch.Tensor] = {name: tensor.cpu().contiguous() for name, tensor in weight_names(policy)}
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=shard)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
