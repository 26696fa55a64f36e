"""How a trainer finds sampler servers: a folder with one file per server, `sampler_<index>.json`. And weight folders.

On a cluster the folder is on the shared file system; no other service is needed. A server that restarts rewrites its
file. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from gspo.system import SHM, parse_json, read_regular


class Address(NamedTuple):
    url: str
    pid: int
    host: str  # the machine's name; weights go through /dev/shm if trainer and server are on the same machine
    started: float


def sampler_file(folder: Path, index: int) -> Path:
    return folder / f"sampler_{index}.json"


def register(folder: Path, index: int, url: str) -> None:
    """Write where this process serves, atomically, to a file that only its owner can read."""
    folder.mkdir(parents=True, exist_ok=True)
    tmp = folder / f".sampler_{index}.json.{os.getpid()}"
    address = Address(url, os.getpid(), socket.gethostname(), time.time())
    # The mode is given at creation, so the file is never readable by others.
    with os.fdopen(os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(address._asdict(), file)
    tmp.replace(sampler_file(folder, index))


def registered(folder: Path, index: int) -> Address | None:
    """The address of server `index`; None if it has not registered, or if another user wrote the file."""
    path = sampler_file(folder, index)
    try:
        # The token is sent to this address, so the file must be our own.
        if os.stat(path).st_uid != os.getuid():
            return None
        body: Any = parse_json(read_regular(path, 10_000))
        address = Address(str(body["url"]), int(body["pid"]), str(body["host"]), float(body["started"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return address if address.url.startswith("http://") else None


def unregister(folder: Path, index: int) -> None:
    """Remove the file if this process wrote it."""
    address = registered(folder, index)
    # A successor may have registered already: its file must stay.
    if address is not None and (address.pid, address.host) == (os.getpid(), socket.gethostname()):
        sampler_file(folder, index).unlink(missing_ok=True)


def give_up(folder: Path, index: int, why: str) -> None:
    """Record that server `index` will not be restarted, so that the trainer does not wait for it."""
    with contextlib.suppress(OSError):  # then the trainer waits until its timeout
        folder.mkdir(parents=True, exist_ok=True)
        sampler_file(folder, index).with_suffix(".gone").write_text(why, encoding="utf-8")


def given_up(folder: Path, index: int) -> str | None:
    try:
        return read_regular(sampler_file(folder, index).with_suffix(".gone")).decode("utf-8", "replace")
    except OSError:
        return None


def weight_folders(run: Path) -> tuple[Path, Path]:
    """Where a run publishes weights: in /dev/shm, or in its run directory."""
    # The digest of the run's path: one folder per run, and the same one after a restart.
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return SHM / f"gspo-{os.getuid()}-{digest}", run / "weights"


def forget(folder: Path, keep: Path | None = None) -> None:
    """Remove published files except `keep`, and files of a killed writer. Without `keep`, remove the folder, too."""
    if not folder.is_dir():
        return
    for file in folder.glob("*weights_*.safetensors*"):
        if file != keep:
            file.unlink(missing_ok=True)
    if keep is None:
        with contextlib.suppress(OSError):  # not empty: other files are not ours
            folder.rmdir()
