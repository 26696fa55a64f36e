"""The cache of models made on this machine: $GSPO_CACHE, or ~/.cache/gspo. Torch-free.

A model is written to a temporary folder with the sha256 of every file, and then renamed: incomplete folders are never
used. One process builds a model; others that need it wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo.errors import DataError
from gspo.system import sha256

SUMS = "SHA256.json"
_WAIT_S = 300.0  # for another process that builds the same model; it may be stopped, so after that we build it, too


def root() -> Path:
    return Path(os.environ.get("GSPO_CACHE") or Path.home() / ".cache" / "gspo")


def is_whole(folder: Path) -> bool:
    """Whether every file has the sha256 that was recorded when it was written."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        return bool(sums) and all(sha256(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a temporary folder, which is then renamed: a killed build leaves no folder that looks complete.

    If another process writes the same folder, wait for it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.parent / f".{folder.name}.lock"):
            if not is_whole(folder):
                _publish(folder, write)
    except OSError as cause:
        raise DataError(
            f"{folder} could not be written: {cause.strerror or cause}; free space, or set GSPO_CACHE to another folder"
        ) from cause


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    tmp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        write(tmp)
        sums = {file.name: sha256(file) for file in sorted(tmp.iterdir())}
        (tmp / SUMS).write_text(json.dumps(sums, indent=1))
        if is_whole(folder):
            return  # a process that we did not wait for was faster, and its model may be in use
        if folder.exists():
            shutil.rmtree(folder)
        try:
            tmp.rename(folder)
        except OSError:
            if not is_whole(folder):
                raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """A lock that the kernel releases when its process ends. It saves work and guards nothing."""
    deadline = time.monotonic() + _WAIT_S
    with open(path, "w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)  # wait: 300 s, the caller
            except OSError:  # a file system without locks
                break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and log messages during a load: problems are reported by our own errors."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
