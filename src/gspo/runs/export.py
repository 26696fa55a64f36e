"""Write a policy as a model folder that transformers can load; push it to a hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import torch
from huggingface_hub import HfApi, constants, get_token, split_torch_state_dict_into_shards
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from safetensors.torch import save_file

from gspo.errors import CheckpointError, ConfigError
from gspo.learner import PolicyModule, weight_names
from gspo.models import EMBEDDED, embedded, is_hub_name, locate, save_adapter


def open_repository(name: str, *, public: bool) -> None:
    """Make the repository if it does not exist. Before the export, so that a wrong name or token costs no work."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name!r}: {error}") from error
    if name.count("/") != 1:
        raise ConfigError(f"--push {name!r}: give owner/name, for example my-name/my-model")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push needs the hub, but HF_HUB_OFFLINE is set; remove it")
    if not get_token():
        raise ConfigError("--push needs a token of the hub: run `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().create_repo(name, private=not public, exist_ok=True)
    except (HfHubHTTPError, httpx.HTTPError) as error:
        raise ConfigError(f"--push {name}: {constants.ENDPOINT} refused it: {_first_line(error)}") from error


def push(folder: Path, name: str, message: str) -> str:
    """Upload all files of a folder as one commit; returns its address."""
    disable_progress_bars()
    try:
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url)
    except (HfHubHTTPError, httpx.HTTPError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{folder} is written, but could not be pushed to {name}: {_first_line(error)}; to push it again: "
            f"hf upload {name} {folder}"
        ) from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


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
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
