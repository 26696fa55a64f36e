"""A weight version as one safetensors file, with the names of the model's checkpoint on disk.

The trainer writes it; servers compare its sha256 before they load it (`load.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gspo.errors import WeightSyncError
from gspo.faults import reached
from gspo.sampling.remote.discovery import forget
from gspo.system.files import sha256


class PublishedFile(NamedTuple):
    """A weight version in a file. `broadcast.Broadcast` has the same methods."""

    version: int
    path: Path
    sha256: str
    wait_s = 1.0  # how long one /load_weights call may wait for the load to finish

    def address(self, index: int, boot: str = "") -> str:
        """Where server `index`, whose process is `boot`, finds this version."""
        return str(self.path.resolve())

    def deliver(self, index: int, boot: str = "") -> None:
        """Nothing to send: the server reads the file."""

    def forget(self, newer: object = None) -> None:
        """Remove the file and its folder; a newer version in the same folder stays."""
        keep = newer.path if isinstance(newer, PublishedFile) and newer.path.parent == self.path.parent else None
        forget(self.path.parent, keep=keep)


def publish(folder: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> PublishedFile:
    """Write a version into `folder`. The file is written under a temporary name and renamed, so it is never partial."""
    path = folder / f"weights_{version:08d}.safetensors"
    # The process id keeps two writers apart.
    tmp = folder / f".{path.name}.{os.getpid()}"
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # every user may write to /dev/shm
            raise PermissionError("the folder belongs to another user")
        with _private_files():
            save_file(on_cpu, tmp, metadata={"version": str(version)})
        # The digest is of the complete file. Only then does the file get its final name.
        digest = sha256(tmp)
        reached("weights.publish")
        tmp.replace(path)
    except (OSError, SafetensorError) as cause:
        tmp.unlink(missing_ok=True)
        raise WeightSyncError(
            f"weight version {version} could not be written to {folder} ({cause}); free space there, or choose another "
            "place with actor.weight_update_mode (disk, shm)"
        ) from cause
    return PublishedFile(version, path, digest)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """New files are readable by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
