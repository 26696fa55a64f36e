"""A weight version leaves the trainer: as a file in shared memory or the run directory, or by broadcast.

The trainer writes it; servers compare its sha256 before they load it (`load.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gspo.errors import ConfigError, WeightSyncError
from gspo.faults import reached
from gspo.sampling.engines.inside_vllm import gspo_collective as collective
from gspo.sampling.remote.discovery import SHM, Address, forget, weight_folders
from gspo.system import sha256

MESSAGE_S = 60.0  # timeout of one message of a broadcast, and of the wait for a process to join it


class Broadcast(NamedTuple):
    """A weight version in memory. It has the methods of `PublishedFile`."""

    version: int
    sha256: str
    tensors: Mapping[str, Tensor]
    store: Any  # torch.distributed.TCPStore
    timeout_s: float
    answered: set[str]  # ids of the calls that were sent the tensors
    wait_s = 0.05  # one /load_weights call waits no longer: the trainer sends between two calls

    def address(self, index: int, boot: str = "") -> str:
        """Put the manifest for this server into the store; the address tells the server where to find it."""
        key, terms = self._key(index, boot), {"timeout_s": self.timeout_s}
        self.store.set(f"{key}/offer", json.dumps({"manifest": collective.manifest(self.tensors), **terms}))
        return f"{collective.SCHEME}{self.store.host}:{self.store.port}/{key}"

    def deliver(self, index: int, boot: str = "") -> None:
        """Send the tensors if the server has called for them. RuntimeError if its processes are gone or late."""
        call = collective.caller(self.store, self._key(index, boot))
        # The server repeats /load_weights while it loads: each of its calls gets the tensors once.
        if call is None or call["call"] in self.answered:
            return
        # Before the send: a failed send is not repeated for the same call. A later load has a new call id.
        self.answered.add(call["call"])
        # A store connection handles one wait at a time. A clone keeps servers from waiting for each other.
        collective.send(self.store.clone(), call, self.tensors, self.timeout_s)

    def forget(self, newer: object = None) -> None:
        """Delete this version's keys from the store. The tensors are freed with the last reference."""
        own = (f"{self._key()}/", *(f"{call}/" for call in self.answered))
        for key in self.store.list_keys():
            if key.startswith(own):
                self.store.delete_key(key)

    def _key(self, *parts: object) -> str:
        """The boot id is part of the key: a restarted server must not join the broadcast of its predecessor."""
        return "/".join(map(str, (f"{self.version}-{self.sha256[:16]}", *parts)))


class Broadcaster:
    """Publishes versions by broadcast. Servers find the trainer at a TCPStore that listens at `host` only.

    A server that is gone or late fails its own broadcast after `timeout_s`; other servers are not affected.
    """

    def __init__(self, host: str, timeout_s: float = MESSAGE_S) -> None:
        self.host, self._store, self._timeout_s = host, collective.open_store(host), timeout_s

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Broadcast:
        # A copy, also on a CPU: training changes the weights in place while servers may still be loading.
        on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        return Broadcast(version, collective.digest(on_cpu), on_cpu, self._store, self._timeout_s, set())


class PublishedFile(NamedTuple):
    """A weight version in a file. `Broadcast` has the same methods."""

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


WeightStore = Path | Broadcaster
Published = PublishedFile | Broadcast
ChooseStore = Callable[[Sequence[Address | None]], WeightStore]  # given the servers' addresses; None: not registered


def weight_store(mode: str, run: Path, num_bytes: int) -> ChooseStore:
    """The store of a run whose weights have `num_bytes`; it is chosen anew for each version."""
    return _Broadcasters().near if mode == "broadcast" else partial(choose_folder, mode, run, num_bytes)


def publish_to(store: WeightStore, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
    return publish(store, version, tensors) if isinstance(store, Path) else store.publish(version, tensors)


class _Broadcasters:
    """Keeps the broadcaster for as long as its address is right."""

    def __init__(self) -> None:
        self._current: Broadcaster | None = None

    def near(self, servers: Sequence[Address | None]) -> Broadcaster:
        """A broadcaster on loopback, or on the address at which a server on another machine reaches this one."""
        remote = [urlsplit(a.url).hostname for a in servers if a is not None and a.host != socket.gethostname()]
        host = "127.0.0.1"
        if remote:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # connect() picks our address; no packet
                route.connect((remote[0], 9))
                host = route.getsockname()[0]
        if self._current is None or self._current.host != host:
            self._current = Broadcaster(host)
        return self._current


def choose_folder(mode: str, run: Path, num_bytes: int, servers: Sequence[Address | None]) -> Path:
    """The folder for published weights: /dev/shm if all servers are on this machine, else the run directory."""
    memory, disk = weight_folders(run)
    remote = [a.host for a in servers if a is not None and a.host != socket.gethostname()]
    if mode == "shm" and remote:
        raise ConfigError(
            f"actor.weight_update_mode is shm, but a sampler server runs on {remote[0]}, which does not share this "
            "machine's memory; set it to disk or auto"
        )
    if mode == "shm":
        return memory
    # Two versions exist while the new one is written.
    has_room = os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 2.5 * num_bytes
    # Memory only if the files fit and every server is known to be on this machine.
    return memory if mode == "auto" and has_room and not remote and None not in servers else disk
