"""Push an exported folder to the Hugging Face hub (HF_ENDPOINT: another server with its HTTP interface)."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from gspo.errors import CheckpointError, ConfigError


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
