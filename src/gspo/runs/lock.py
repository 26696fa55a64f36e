"""One trainer per run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from gspo.errors import CheckpointError, ConfigError


class RunLock:
    """Locks on a directory and on its file `.lock`. The kernel releases them when the process ends, even by SIGKILL.

    The lock on the directory holds if somebody deletes `.lock`. Some network file systems have no locks on directories;
    there `check` notices that `.lock` is another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._has_folder = _lock(self._folder)
            self._lock_file()
        except BaseException as cause:
            self.close()
            if isinstance(cause, BlockingIOError):
                raise ConfigError(
                    f"{path} is in use by another trainer; wait for it, or set trial_name to start another run"
                ) from cause
            raise

    def check(self) -> None:
        """CheckpointError if the directory does not belong to this trainer any more; call it before a write."""
        if not _is_same(self._path, self._folder):
            raise CheckpointError(
                f"{self._path} was moved, removed or replaced while the trainer was running; nothing more was written. "
                "Move it back (or set experiment_name and trial_name to its new name) and run the same command again"
            )
        if self._has_folder or (self._file is not None and _is_same(self._path / ".lock", self._file)):
            return
        try:
            self._lock_file()
        except OSError as cause:
            raise CheckpointError(
                f"{self._path / '.lock'} was deleted, and another trainer uses the directory now; nothing more was "
                "written. Wait for the other trainer, or set trial_name to start another run"
            ) from cause

    def close(self) -> None:
        """Release the locks: another trainer may open the directory from now on."""
        for handle in (self._file, self._folder):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._file = None

    def _lock_file(self) -> None:
        # O_NONBLOCK: opening a FIFO would wait for a reader.
        handle = os.open(self._path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{self._path / '.lock'} is not a regular file; remove it")
            _lock(handle)
        except BaseException:
            os.close(handle)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = handle


def _lock(handle: int) -> bool:
    """Lock a file or directory; False if the file system cannot. BlockingIOError if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_same(path: Path, handle: int) -> bool:
    try:
        here, there = os.stat(path), os.fstat(handle)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
