"""Write a policy as a model folder that transformers, and every engine built on it, can load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from gspo.errors import CheckpointError, ConfigError
from gspo.learner.policy.module import PolicyModule, weight_names
from gspo.models import embedded
from gspo.models.locate import EMBEDDED, is_hub_name, locate
from gspo.models.lora import save_adapter

SHARD = "5GB"


def base_name(path: str) -> str:
    """Where a reader of the adapter finds its base model: an absolute folder, or a name on the hub."""
    if is_hub_name(path):
        return path
    found = str(embedded.embedded_folder(path)) if path.startswith(EMBEDDED) else locate(path)
    return str(Path(found).expanduser().resolve()) if Path(found).expanduser().is_dir() else found


def refuse_used(to: Path) -> None:
    """Raise ConfigError if the folder is not empty: an export never overwrites files."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            f"{to} is not an empty folder, and an export never overwrites files; give another folder with --to"
        )


def write_model(
    policy: PolicyModule,
    tokenizer: Any,
    to: Path,
    origin: dict[str, Any],
    *,
    adapter_of: str | None = None,
    shard: str = SHARD,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a temporary folder, then rename it: the result is complete or absent.

    adapter_of: write only the adapter, on the base model of this name.
    """
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        # In the same parent folder: a rename is atomic only within one file system.
        tmp = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}-"))
    except OSError as cause:
        raise ConfigError(f"{to.parent} cannot be written: {cause.strerror}; give another folder with --to") from cause
    try:
        if adapter_of is not None:
            save_adapter(policy.model, tmp, adapter_of)
        else:
            _weights(policy, tmp, shard)
            _configs(policy.model, tmp)
        tokenizer.save_pretrained(tmp)
        if policy.processor is not None:
            policy.processor.save(tmp)
        for name, text in {"gspo.json": json.dumps(origin, indent=1) + "\n", **texts}.items():
            (tmp / name).write_text(text, encoding="utf-8")
        os.chmod(tmp, 0o755)  # mkdtemp makes private folders, and safetensors private files
        for file in tmp.iterdir():
            os.chmod(file, 0o644)
        if to.exists():
            to.rmdir()  # fails unless it is empty
        tmp.rename(to)
    except OSError as cause:
        raise CheckpointError(f"could not write {to}: {cause.strerror or cause}; no file was left there") from cause
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return to


def _configs(model: Any, folder: Path) -> None:
    config = model.config
    # transformers selects the model class by this entry.
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _weights(policy: PolicyModule, folder: Path, shard: str) -> None:
    """Write tensors by their names on disk, tied ones once, into files of at most `shard`."""
    tensors: dict[str, torch.Tensor] = {name: tensor.cpu().contiguous() for name, tensor in weight_names(policy)}
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=shard)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    # Readers need an index only if there are several files.
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
