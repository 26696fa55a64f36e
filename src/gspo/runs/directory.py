"""The run directory, the contract between training and everything that looks at it. See docs/run-directory.md.

Only strict JSON is written (NaN becomes null), one line per object. A torn last line is what a kill leaves; on resume
every file is cut back to the checkpoint's step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError

from gspo.errors import CheckpointError, ConfigError
from gspo.faults import reached
from gspo.system.text import inert


class RunDir:
    """An open, locked run directory; one trainer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            (path / "samples").mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115 - held until close
        except OSError as cause:
            raise ConfigError(f"{path} cannot be written: {cause.strerror}; set cluster.fileroot") from cause
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            self._lock.close()
            raise ConfigError(
                f"{path} is in use by another trainer; wait for it, or set trial_name to start another run"
            ) from cause
        self._metrics: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        with writing(self.path / "metrics.jsonl") as file:
            reached("record.metrics")
            if self._metrics is None:
                self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115
            self._metrics.write(to_json(row) + "\n")
            self._metrics.flush()

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], tokens: Mapping[str, np.ndarray]) -> None:
        """Every sample of a step, and the per-token values of the kept ones."""
        from safetensors.numpy import save_file

        name = f"step_{step:06d}"
        with atomic(self.path / "samples" / f"{name}.jsonl") as aside:
            reached("record.samples")
            aside.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
        if tokens:
            with atomic(self.path / "samples" / f"{name}.safetensors") as aside:
                save_file(dict(tokens), aside)

    def forget_samples(self, step: int) -> None:
        """Delete the samples of `step` and of all before it."""
        for file in (self.path / "samples").glob("step_*"):
            number = file.name.removeprefix("step_").partition(".")[0]
            if number.isdigit() and int(number) <= step:
                file.unlink()

    def cut_back(self, step: int) -> None:
        """Forget everything after `step`: a resumed run writes it again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            kept = [row for row in read_jsonl(file) if row.get("step", 0) <= step]
            with atomic(file) as aside:
                aside.write_text("".join(to_json(row) + "\n" for row in kept), encoding="utf-8")
        for sample in (self.path / "samples").glob("step_*"):
            number = sample.name.removeprefix("step_").partition(".")[0]
            if not number.isdigit() or int(number) > step or sample.suffix not in (".jsonl", ".safetensors"):
                sample.unlink()

    def log(self, line: str) -> None:
        # The display has shown the line already; a full disk must not replace the error that is being told.
        with (
            contextlib.suppress(OSError),
            open(self.path / "log.txt", "a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {inert(line)}\n")

    def close(self) -> None:
        if self._metrics is not None:
            # After a failed write the rest of the line is still in the buffer, and fails again.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        self._lock.close()


@contextlib.contextmanager
def writing(file: Path) -> Iterator[Path]:
    """A disk that is full or gone is an error that says so, whoever writes: Python, or safetensors' own writer."""
    try:
        yield file
    except (OSError, SafetensorError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise CheckpointError(
            f"could not write {file}: {why}; what was written before is untouched. Free space, or set "
            "cluster.fileroot to another disk, and run the same command again"
        ) from cause


@contextlib.contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Write beside the place, then rename: readers see the old file or the new one, never half."""
    aside = target.with_name(f".{target.name}.tmp")
    try:
        with writing(target):
            yield aside
            os.replace(aside, target)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what a kill tore off the last one is left out."""
    rows = []
    for line in file.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def environment(device: str, threads: int) -> dict[str, Any]:
    """Versions, commit and hardware of this run."""
    packages = ("gspo", "torch", "transformers", "safetensors", "numpy")
    try:
        root = Path(__file__).resolve().parents[3]
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "packages": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "device": device,
        "threads": threads,
        "commit": commit or None,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's; what JSON has no number for as null; text that is no Unicode made visible."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return repr(value)
