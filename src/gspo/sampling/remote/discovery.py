"""Where sampler servers are: a folder with one small file per server, `sampler_<index>.json`; and a run's weights.

On a cluster the folder is on the shared file system; no other service is needed. A server that has started anew
rewrites its file, so a changed file is news. Torch-free.
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

SHM = Path("/dev/shm")


class Address(NamedTuple):
    url: str
    pid: int
    host: str  # the machine's name: weights travel by its memory where trainer and server share it
    started: float


def file_of(folder: Path, index: int) -> Path:
    return folder / f"sampler_{index}.json"


def register(folder: Path, index: int, url: str) -> None:
    """Say where this process serves; whole or not at all, and for its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".sampler_{index}.json.{os.getpid()}"
    address = Address(url, os.getpid(), socket.gethostname(), time.time())
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(address._asdict(), file)
    aside.replace(file_of(folder, index))


def registered(folder: Path, index: int) -> Address | None:
    """Where server `index` said it is; None where it has not, or somebody else did."""
    path = file_of(folder, index)
    try:
        with open(path) as file:
            # The token goes to whoever is named here: only our own word counts.
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            body: Any = json.load(file)
        address = Address(str(body["url"]), int(body["pid"]), str(body["host"]), float(body["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if address.url.startswith("http://") else None


def unregister(folder: Path, index: int) -> None:
    """Remove the file, if it is still this process's."""
    address = registered(folder, index)
    if address is not None and (address.pid, address.host) == (os.getpid(), socket.gethostname()):
        file_of(folder, index).unlink(missing_ok=True)


def give_up(folder: Path, index: int, why: str) -> None:
    """Whoever starts server `index` will not do so again: nobody need wait for it."""
    with contextlib.suppress(OSError):  # then they wait as long as they would have
        folder.mkdir(parents=True, exist_ok=True)
        file_of(folder, index).with_suffix(".gone").write_text(why, encoding="utf-8")


def given_up(folder: Path, index: int) -> str | None:
    try:
        return file_of(folder, index).with_suffix(".gone").read_text(encoding="utf-8")
    except OSError:
        return None


def weight_folders(run: Path) -> tuple[Path, Path]:
    """Where a run's weights are published: in its machine's memory, or in its own directory."""
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return SHM / f"gspo-{os.getuid()}-{digest}", run / "weights"


def forget(folder: Path, keep: Path | None = None) -> None:
    """Remove published files but one; also what a killed writer left. The folder goes with the last of them."""
    if not folder.is_dir():
        return
    for file in folder.glob("*weights_*.safetensors*"):
        if file != keep:
            file.unlink(missing_ok=True)
    if keep is None:
        with contextlib.suppress(OSError):  # not empty: not ours
            folder.rmdir()
