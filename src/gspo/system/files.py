"""Files: atomic writes, fsync, digests, strict JSON, and the names of files and folders that belong to a step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gspo.errors import CheckpointError
from gspo.system.heartbeat import beat


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yield a temporary file beside `target`, then rename it: readers see the old file or the new one, never half."""
    # Beside the target: a rename is atomic only within one file system.
    tmp = target.with_name(f".{target.name}.tmp")
    try:
        yield tmp
        os.replace(tmp, target)
    finally:
        # After a successful rename the temporary file no longer exists.
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turn a full or missing disk into a CheckpointError with the file's name; safetensors raises its own error."""
    try:
        yield
    except (OSError, SafetensorError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise CheckpointError(
            f"could not write {target}: {why}; earlier files are unchanged. Free disk space, or set cluster.fileroot "
            "to another disk, and run the same command again"
        ) from cause


@contextlib.contextmanager
def write_run_file(target: Path) -> Iterator[Path]:
    """`atomic_write` for a file of a run directory: an error of the disk becomes a CheckpointError."""
    with write_errors(target), atomic_write(target) as tmp:
        yield tmp


def fsync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(file: Path) -> str:
    beat(f"checking {file}")
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def step_name(step: int) -> str:
    """The name of what belongs to a step: a checkpoint folder, a sample file without its suffix.

    >>> step_name(120)
    'step_000120'
    """
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a name that `step_name` made, suffixes ignored; None for other names.

    >>> step_of("step_000120.jsonl"), step_of("step_x"), step_of(".step_000120.tmp")
    (120, None, None)
    """
    number = name.removeprefix("step_").partition(".")[0]
    return int(number) if name.startswith("step_") and number.isdecimal() else None


def to_json(value: Any) -> str:
    """Strict JSON on one line: NaN and infinity become null, and an unknown object becomes its repr.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)})
    '{"loss": null, "steps": [1, 2]}'
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a numpy scalar; numpy is not imported here
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        # Lone surrogates, which UTF-8 cannot encode, become visible escapes.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return repr(value)
