"""The run directory: the interface between training and every program that reads a run. See docs/run-directory.md.

All JSON is strict (NaN becomes null), one object per line. A killed process may leave an incomplete last line; on
resume every file is cut back to the checkpoint's step.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np

from gspo.errors import ConfigError, DataError, GspoError
from gspo.faults import reached
from gspo.runs.lock import RunLock
from gspo.system.files import read_jsonl, step_name, step_of, to_json, write_errors, write_run_file
from gspo.system.text import inert
from gspo.types import Images

MAX_PICTURES = 4096  # files in images/; each has a few kB


class RunDir:
    """An open run directory, locked for one trainer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            (path / "samples").mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(path)
        except OSError as cause:
            raise ConfigError(f"{path} cannot be written: {cause.strerror}; set cluster.fileroot") from cause
        try:
            _refuse_special_files(path)
        except ConfigError:
            self.lock.close()
            raise
        self._metrics: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        file = self.path / "metrics.jsonl"
        self.lock.check()
        with write_errors(file):
            reached("record.metrics")
            if self._metrics is None:
                self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115
            self._metrics.write(to_json(row) + "\n")
            # Each row is flushed, so that programs that follow a running run see it at once.
            self._metrics.flush()

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], tokens: Mapping[str, np.ndarray]) -> None:
        """Every sample of a step, and the per-token values of the kept ones."""
        from safetensors.numpy import save_file

        self.lock.check()
        name = step_name(step)
        with write_run_file(self.path / "samples" / f"{name}.jsonl") as tmp:
            reached("record.samples")
            tmp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
        if tokens:
            with write_run_file(self.path / "samples" / f"{name}.safetensors") as tmp:
                save_file(dict(tokens), tmp)

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The held-out answers of a step."""
        self.lock.check()
        (self.path / "evals").mkdir(exist_ok=True)
        with write_run_file(self.path / "evals" / f"{step_name(step)}.jsonl") as tmp:
            tmp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")

    def images(self, shown: Iterable[Images | None]) -> None:
        """A small picture of what each prompt shows, by digest; the oldest are deleted above the limit."""
        folder = self.path / "images"
        thumbnails = {i.digest: i.thumbnail for i in shown if i is not None and i.thumbnail is not None}
        missing = {digest: make for digest, make in thumbnails.items() if not (folder / f"{digest}.webp").exists()}
        if not missing:
            return
        self.lock.check()
        with write_errors(folder):
            folder.mkdir(exist_ok=True)
        for digest, make in missing.items():
            # An image file that was deleted meanwhile has no picture: training reports it if it needs the file.
            with contextlib.suppress(DataError), write_run_file(folder / f"{digest}.webp") as tmp:
                tmp.write_bytes(make())
        for file in sorted(folder.glob("*.webp"), key=lambda file: file.stat().st_mtime_ns)[:-MAX_PICTURES]:
            file.unlink()

    def pass_rates(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The pass rate of every visited row of the training data."""
        self.lock.check()
        with write_run_file(self.path / "pass_rates.jsonl") as tmp:
            tmp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")

    def delete_samples(self, up_to: int) -> None:
        """Delete the samples and held-out answers of step `up_to` and of all steps before it."""
        for file in self._step_files():
            if (step := step_of(file.name)) is not None and step <= up_to:
                file.unlink()

    def cut_back(self, step: int) -> None:
        """Delete what was written after `step`: a resumed run writes it again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            # A row without a step counts as step 0.
            kept = [row for row in read_jsonl(file) if row.get("step", 0) <= step]
            with write_run_file(file) as tmp:
                tmp.write_text("".join(to_json(row) + "\n" for row in kept), encoding="utf-8")
        for sample in self._step_files():
            written = step_of(sample.name)
            # Other suffixes are temporary files that a killed process left.
            if written is None or written > step or sample.suffix not in (".jsonl", ".safetensors"):
                sample.unlink()

    def _step_files(self) -> list[Path]:
        return [file for folder in ("samples", "evals") for file in (self.path / folder).glob("step_*")]

    def log(self, line: str) -> None:
        # The display has shown the line already, so a full disk must not hide the error behind another one.
        with (
            contextlib.suppress(OSError),
            open(self.path / "log.txt", "a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {inert(line)}\n")

    def log_error(self, error: BaseException | None) -> None:
        """The error that ends the run, also here: the terminal may be gone. Nothing for None and for signals."""
        if isinstance(error, GspoError):
            self.log(f"error: {error}")
        elif isinstance(error, Exception):
            self.log("error: " + "".join(traceback.format_exception(error)).strip())

    def close(self) -> None:
        if self._metrics is not None:
            # After a failed write the rest of the line is still in the buffer; flushing it fails again.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        # Last: another trainer may open the directory as soon as the lock is released.
        self.lock.close()


# Files that a run opens by name. A directory in their place would be an error of the operating system half way.
_FILES = ("metrics.jsonl", "log.txt", "config.yaml", "origins.json", "environment.json", "rewards.log", "loggers.log")


def _refuse_special_files(run: Path) -> None:
    """ConfigError for a FIFO, socket or device in a run directory: opening a FIFO waits for its other end."""
    for folder in (run, run / "samples"):
        for entry in folder.iterdir():
            is_directory = entry.is_dir()
            if entry.is_file() or (is_directory and folder == run and entry.name not in _FILES):
                continue
            # A broken link is replaced or reported when it is written.
            if entry.exists():
                kind = "a directory" if is_directory else "not a regular file (a FIFO, socket or device)"
                raise ConfigError(f"{entry} is {kind}, but the run needs a file there; move it away")


def versions_and_hardware(device: str, threads: int) -> dict[str, Any]:
    """Versions, commit and hardware of this run."""
    packages = ("gspo", "torch", "transformers", "safetensors", "numpy")
    try:
        root = Path(__file__).resolve().parents[3]
        commit = subprocess.run(  # wait: 5 s, the trainer at its start
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
