"""Broadcast of weights from a trainer to the processes of one server, with gloo through the hosts' memory.

The same file runs on both sides: in gspo, and in vLLM's environment, where gspo is not importable. Both connect to the
trainer's TCPStore. An address is tcp://host:port/key, and `#call` after it distinguishes attempts. Values in the store
are JSON. Tensors are sent as bytes in few messages, and their sha256 is compared before any of them is used.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # Any: type checkers have no types for these stores and groups

SCHEME = "tcp://"
MESSAGE = 256 * 2**20  # bytes
MEET_S = 30.0  # timeout of a server process that connects to the store


def open_store(host: str) -> Any:
    """A TCPStore that listens at this address only; torch would listen at all addresses of the machine."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def manifest(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """[name, dtype, shape] of each tensor."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, dtypes, shapes and bytes, in order. The tensors must be on the CPU."""
    total = hashlib.sha256(json.dumps(manifest(tensors)).encode())
    for tensor in tensors.values():
        content: Any = _bytes(tensor).numpy()
        total.update(content)
    return total.hexdigest()


def caller(store: Any, key: str) -> dict[str, Any] | None:
    """The call of the server that waits for `key`, as {call, world}; None if no server has called yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


def send(store: Any, call: Mapping[str, Any], tensors: Mapping[str, Tensor], timeout_s: float) -> None:
    """Send all tensors to the processes of a call. RuntimeError if one of them is gone or late."""
    # The trainer is rank 0 of the group; the server's processes have ranks 1…world.
    group = _group(store, str(call["call"]), 0, 1 + int(call["world"]), timeout_s)
    for names in _messages({name: tensor.nbytes for name, tensor in tensors.items()}):
        _broadcast(group, torch.cat([_bytes(tensors[name]) for name in names]))


def receive(address: str, sha256: str, rank: int, world: int) -> dict[str, Tensor]:
    """Receive the tensors of an address, as process `rank` of a server with `world` processes.

    ValueError if they are not what was published; RuntimeError if the trainer is gone or late.
    """
    where, _, call = address.partition("#")
    url = urlsplit(where)
    key = url.path.removeprefix("/")
    store = dist.TCPStore(str(url.hostname), int(url.port or 0), is_master=False, timeout=timedelta(seconds=MEET_S))
    offer = json.loads(store.get(f"{key}/offer"))
    # Both sides know names, dtypes and shapes from the offer, so messages hold only bytes.
    forms = {name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in offer["manifest"]}
    sizes = {name: dtype.itemsize * shape.numel() for name, (dtype, shape) in forms.items()}
    # One process announces the call; the trainer then joins the group of this call.
    if rank == 0:
        store.set(key, json.dumps({"call": call, "world": world}))
    group = _group(store, call, rank + 1, world + 1, float(offer["timeout_s"]))
    tensors: dict[str, Tensor] = {}
    for names in _messages(sizes):
        message = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8)
        _broadcast(group, message)
        for name, part in zip(names, message.split([sizes[name] for name in names]), strict=True):
            dtype, shape = forms[name]
            # The copy is aligned: a view with a larger dtype cannot begin at an arbitrary byte of the message.
            tensors[name] = part.clone().view(dtype).reshape(shape)
    if (got := digest(tensors)) != sha256:
        raise ValueError(f"{where} did not send what was published: sha256 {got[:12]}… instead of {sha256[:12]}…")
    return tensors


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _messages(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names of tensors that are sent in one message: up to MESSAGE bytes, or one larger tensor."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > MESSAGE:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _group(store: Any, call: str, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of its own, independent of other groups of the process."""
    # The call id as prefix: keys of an earlier attempt cannot be mistaken for those of this one.
    prefixed, timeout = dist.PrefixStore(call, store), timedelta(seconds=timeout_s)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as toward:  # connect() picks our address; nothing is sent
        toward.connect((store.host, store.port))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=toward.getsockname()[0])]
    return dist.ProcessGroupGloo(prefixed, rank, size, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()  # wait: none, the group's timeout, given by the trainer
