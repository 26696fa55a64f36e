"""Where the trainer publishes weights: /dev/shm, the run directory, or a broadcast (actor.weight_update_mode)."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from torch import Tensor

from gspo.errors import ConfigError
from gspo.sampling.remote.discovery import SHM, Address, weight_folders
from gspo.sampling.weights.broadcast import Broadcast, Broadcaster
from gspo.sampling.weights.publish import PublishedFile, publish

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
                # Any port will do, as nothing is sent.
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
