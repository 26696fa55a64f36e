"""Weights from a trainer to the processes of one server by a broadcast through the hosts' memory, by gloo.

The same file runs on both sides: in gspo, and in vLLM's own environment, where gspo is not importable. They meet at the
trainer's TCPStore; an address reads tcp://host:port/key, and `#call` behind it tells one attempt from the next. What is
told there is JSON. Tensors travel as bytes in few messages, and are compared with their sha256 in the host's memory
before anybody sees one.
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

dist: Any = torch.distributed  # a checker knows its stores and groups by other names

SCHEME = "tcp://"
MESSAGE = 256 * 2**20  # bytes
MEET_S = 30.0  # until a process of the server finds the store


def open_store(host: str) -> Any:
    """A store that listens at this address of the machine alone; torch's own choice would be all of them."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def manifest(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """[name, dtype, shape] of each."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, forms and bytes, in their order; tensors in the host's memory."""
    total = hashlib.sha256(json.dumps(manifest(tensors)).encode())
    for tensor in tensors.values():
        content: Any = _bytes(tensor).numpy()
        total.update(content)
    return total.hexdigest()


def caller(store: Any, key: str) -> dict[str, Any] | None:
    """Who waits to be sent `key`: {call, world}; None: nobody has come yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


def send(store: Any, call: Mapping[str, Any], tensors: Mapping[str, Tensor], timeout_s: float) -> None:
    """Give all tensors to the processes of a call; RuntimeError where one of them is gone or late."""
    group = _group(store, str(call["call"]), 0, 1 + int(call["world"]), timeout_s)
    for names in _messages({name: tensor.nbytes for name, tensor in tensors.items()}):
        _broadcast(group, torch.cat([_bytes(tensors[name]) for name in names]))


def receive(address: str, sha256: str, rank: int, world: int) -> dict[str, Tensor]:
    """The tensors of an address, for process `rank` of a server's `world`.

    ValueError where they are not what was published; RuntimeError where the trainer is gone or late.
    """
    where, _, call = address.partition("#")
    url = urlsplit(where)
    key = url.path.removeprefix("/")
    store = dist.TCPStore(str(url.hostname), int(url.port or 0), is_master=False, timeout=timedelta(seconds=MEET_S))
    offer = json.loads(store.get(f"{key}/offer"))
    forms = {name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in offer["manifest"]}
    sizes = {name: dtype.itemsize * shape.numel() for name, (dtype, shape) in forms.items()}
    if rank == 0:
        store.set(key, json.dumps({"call": call, "world": world}))
    group = _group(store, call, rank + 1, world + 1, float(offer["timeout_s"]))
    tensors: dict[str, Tensor] = {}
    for names in _messages(sizes):
        message = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8)
        _broadcast(group, message)
        for name, part in zip(names, message.split([sizes[name] for name in names]), strict=True):
            dtype, shape = forms[name]
            tensors[name] = part.clone().view(dtype).reshape(shape)
    if (got := digest(tensors)) != sha256:
        raise ValueError(f"{where} did not send what was published: sha256 {got[:12]}… instead of {sha256[:12]}…")
    return tensors


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _messages(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names that travel together: up to MESSAGE bytes, or one tensor that has more."""
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
    """A group of its own, beside whatever groups the process has."""
    meeting, patience = dist.PrefixStore(call, store), timedelta(seconds=timeout_s)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as toward:  # nothing is sent: it tells our own address
        toward.connect((store.host, store.port))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=toward.getsockname()[0])]
    return dist.ProcessGroupGloo(meeting, rank, size, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()
