"""Number of GPUs of this machine, counted without CUDA. Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that a process started here would see, from the driver's device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [entry for entry in _names(Path("/dev")) if re.fullmatch(r"nvidia\d+", entry)]
    if chosen is None:
        return len(devices)
    # CUDA ignores everything from the first invalid id on; -1 is the usual way to hide all GPUs.
    ids = [word.strip() for word in chosen.split(",")]
    usable = next((index for index, word in enumerate(ids) if word in ("", "-1")), len(ids))
    # CUDA_VISIBLE_DEVICES may list more GPUs than this machine has.
    return min(usable, len(devices))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
