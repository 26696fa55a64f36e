"""A weight version in the trainer's memory, broadcast to each server that requests it (actor.weight_update_mode)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gspo.sampling.engines.inside_vllm import gspo_collective as collective

MESSAGE_S = 60.0  # timeout of one message of a broadcast, and of the wait for a process to join it


class Broadcast(NamedTuple):
    """A weight version in memory. It has the methods of `publish.PublishedFile`."""

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
