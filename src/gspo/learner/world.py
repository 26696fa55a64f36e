"""Several ranks: rank 0 decides and broadcasts commands, the other ranks execute them.

Each rank holds a shard of the weights. Rank 0 leads: it owns data, rewards, sampler and run directory, and makes every
decision. The other ranks wait for its commands (`World.commands`): train on this batch, help to save, end. While a
command runs, all ranks execute the same code and exchange results with `all_gather` and `all_reduce_sum`. How they end
together is in `liveness.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

from gspo.errors import ConfigError, TrainingError
from gspo.learner.liveness import GRACE, Liveness
from gspo.system import StopRequest
from gspo.system import heartbeat as watchdog

Arrays = Mapping[str, NDArray[Any]]


class Command(NamedTuple):
    """What the other ranks must do next: train on a batch, help to save, end."""

    what: str
    content: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def pack_message(content: Mapping[str, Any], arrays: Arrays) -> NDArray[np.uint8]:
    """JSON and arrays as bytes.

    >>> unpack_message(pack_message({"step": 3}, {"x": np.array([1.5])}))
    ({'step': 3}, {'x': array([1.5])})
    """
    text = np.frombuffer(json.dumps(content).encode(), dtype=np.uint8)
    # safetensors stores arrays only, so the JSON is a byte array with an empty name.
    whole = {"": text, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
    # frombuffer gives a read-only array; a tensor made from it must be writable.
    return np.frombuffer(_save(whole), dtype=np.uint8).copy()


def unpack_message(message: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    arrays = {name: array.copy() for name, array in _load(message.tobytes()).items()}  # copies are writable
    return json.loads(arrays.pop("").tobytes()), arrays


POLL = 0.005  # seconds between two polls for the next command

_num_joined = 0


class World:
    """One process: the collectives return this process's own values."""

    rank = 0
    size = 1
    local_size = 1  # ranks on this machine

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def broadcast_command(
        self, what: str, content: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        """Rank 0 sends the others their next command."""

    def commands(self) -> Iterator[Command]:
        """Rank 0's commands in order; the other ranks wait here between two of them."""
        return iter(())

    def all_gather(self, arrays: Arrays) -> list[dict[str, NDArray[Any]]]:
        """The arrays of all ranks, by rank."""
        return [dict(arrays)]

    def all_reduce_sum(self, value: float) -> float:
        """The sum over ranks, bit for bit the same on each."""
        return value

    def union(self, own: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """The arrays of all ranks by sequence number; each number belongs to exactly one rank."""
        parts = self.all_gather({str(i): array for i, array in own.items()})
        return dict(sorted((int(name), array) for part in parts for name, array in part.items()))


ALONE = World()


@contextmanager
def joined(num_ranks: int | None, stall_timeout: float, stop: StopRequest) -> Iterator[World]:
    """The world that this process was started in. An error that ends the block on one rank ends it on all.

    In the block, signals go to `stop` and the stall timeout is on. `num_ranks` is the number in the config; None: as
    many as were started.
    """
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if num_ranks is not None and num_ranks != size:
        raise ConfigError(
            f"actor.backend asks for {num_ranks} ranks, but {size} {'was' if size == 1 else 'were'} started: "
            f"start them with `gspo train`, or `python -m torch.distributed.run --nproc-per-node {num_ranks} -m gspo "
            f"train …`, or set actor.backend=fsdp:d{size}"
        )
    stop.listen()
    if size == 1:
        try:
            with watchdog.watched(stall_timeout):
                yield ALONE
        finally:
            stop.restore()
        return
    with watchdog.watched(stall_timeout + Ranks.margin):
        ranks = Ranks(size, stall_timeout, stop)
        try:
            yield ranks
        except BaseException as error:
            ranks.liveness.fail(error)  # raises if another rank's failure is the cause
            raise
        finally:
            ranks.close()


class Ranks(World):
    """This process among several, connected by gloo on CPU and NCCL on CUDA."""

    margin = 3 * GRACE  # seconds that a stalled collective gets to raise its own error before the watchdog acts

    def __init__(self, size: int, stall_timeout: float, stop: StopRequest) -> None:
        from torch import distributed

        self._distributed: Any = distributed  # Any: its type stubs lack the store's names
        self.size, self.rank = size, int(os.environ["RANK"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
        self._stop = stop
        self._num_commands = 0
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
        timeout = timedelta(seconds=stall_timeout)
        global _num_joined
        _num_joined += 1  # a second run in the same processes must not read the keys of the first
        store = next(self._distributed.rendezvous("env://", timeout=timeout))[0]  # wait: stall_timeout, the rank
        self._store: Any = self._distributed.PrefixStore(f"gspo/{_num_joined}", store)
        # Before the process group: the first heartbeat is then stored on every rank when the watch starts.
        self.liveness = Liveness(self._store, self.rank, size, stall_timeout, stop)
        try:
            distributed.init_process_group(  # wait: stall_timeout, the rank
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=self._distributed.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=size,
                timeout=timeout,
            )
        except RuntimeError as cause:
            raise TrainingError(
                f"rank {self.rank} of {size} did not find the others within {stall_timeout:g} s (stall_timeout): "
                f"{cause}"
            ) from cause
        self.liveness.start()

    def broadcast_command(
        self, what: str, content: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        if not self.is_first:
            return
        message = pack_message(content or {}, arrays or {})
        # Announced in the store, which the others poll: they may wait for hours, longer than a collective's timeout.
        self._store.set(f"turn/{self._num_commands}", json.dumps([what, len(message)]))
        self._num_commands += 1
        self._broadcast(torch.from_numpy(message))

    def commands(self) -> Iterator[Command]:
        while True:
            key = f"turn/{self._num_commands}"
            while not self._store.check([key]):
                self.liveness.check_rank_0()
                time.sleep(POLL)  # wait: POLL, stall_timeout without a heartbeat of rank 0
            what, length = json.loads(self._store.get(key))  # wait: none, the key exists
            self._num_commands += 1
            watchdog.beat(f"command {what!r} of rank 0")
            message = torch.zeros(length, dtype=torch.uint8)
            self._broadcast(message)
            yield Command(what, *unpack_message(message.numpy()))

    def all_gather(self, arrays: Arrays) -> list[dict[str, NDArray[Any]]]:
        message = torch.from_numpy(pack_message({}, arrays))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        # Lengths first: messages differ in size between ranks.
        # wait: none, stall_timeout, which is the group's timeout
        self._distributed.all_gather(lengths, torch.tensor([len(message)]))
        longest = max(int(length) for length in lengths)  # the collective needs equal sizes: pad, then cut
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        # wait: none, stall_timeout, which is the group's timeout
        self._distributed.all_gather(parts, torch.nn.functional.pad(message, (0, longest - len(message))))
        return [unpack_message(p[: int(n)].numpy())[1] for p, n in zip(parts, lengths, strict=True)]

    def all_reduce_sum(self, value: float) -> float:
        # Gathered and then summed in rank order, so that the result is the same on every rank.
        parts = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        # wait: none, stall_timeout, which is the group's timeout
        self._distributed.all_gather(parts, torch.tensor([value], dtype=torch.float64))
        return sum(float(part) for part in parts)

    def _broadcast(self, message: torch.Tensor) -> None:
        self._distributed.broadcast(message, src=0)  # wait: none, stall_timeout, which is the group's timeout

    def close(self) -> None:
        self.liveness.close()
        if sys.exc_info()[0] is None:
            self._distributed.destroy_process_group()
            self._stop.restore()
        # After an error the process is about to end. Waiting for collectives that other ranks will not complete is
        # useless, and the signal handlers stay, so that a launcher's SIGTERM does not cut off the error message.
