"""Several trainers as one: who is there, what they tell each other, and how all of them end when one does.

Every rank holds its part of the weights. Rank 0 leads: tasks, rewards, sampler, run directory and every decision are
its own. The others wait for its commands (`World.commands`): train on this batch, help to save, end. Within a command
all ranks do the same, and what a rank alone knows is exchanged as arrays and JSON.

Ending. A thread on each rank tells the others once a second that it lives and how far it got. The first error is
published and ends all; a rank that is killed breaks its connections; one that is stopped falls silent, and the others
end `stall_timeout` after the last progress of anybody. A signal to any rank is rank 0's to act on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

from gspo.errors import ConfigError, GspoError, TrainingError
from gspo.learner.ranks.signals import StopRequest
from gspo.system import heartbeat as watchdog

Arrays = Mapping[str, NDArray[Any]]

PERIOD = 1.0  # seconds between two signs of life
LOOK = 0.005  # seconds between two looks for the next turn
# Seconds that a rank has to end by itself after another has failed; also what a silent leader gets once the launcher
# has asked this rank to go.
GRACE = 5.0


_num_joined = 0


class Command(NamedTuple):
    """What rank 0 asks of the others."""

    what: str
    content: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


class World:
    """One process: everything is its own, and nothing is exchanged."""

    rank = 0
    size = 1
    local_size = 1  # ranks on this machine
    margin = 0.0  # seconds that a stalled collective has to speak before the watchdog does

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def broadcast_command(
        self, what: str, content: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        """Rank 0 gives the others their next turn."""

    def commands(self) -> Iterator[Command]:
        """What rank 0 asks, in order; the others wait here between turns."""
        return iter(())

    def all_gather(self, arrays: Arrays) -> list[dict[str, NDArray[Any]]]:
        """Everybody's arrays, by rank."""
        return [dict(arrays)]

    def all_reduce_sum(self, value: float) -> float:
        """The sum over ranks, the same number on each."""
        return value

    def union(self, own: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """What all ranks have, by number; each number is some one rank's."""
        parts = self.all_gather({str(i): array for i, array in own.items()})
        return dict(sorted((int(name), array) for part in parts for name, array in part.items()))


ALONE = World()


class Nowhere:
    """The sampler of a rank that has none: takes part in gathering the weights, keeps nothing."""

    def __init__(self, in_process: bool) -> None:
        self.in_process = in_process  # rank 0's

    def publish(self, version: int, tensors: Iterable[Any] | None) -> None:
        for _ in tensors or ():
            pass

    def close(self) -> None: ...


@contextmanager
def joined(num_ranks: int | None, stall_timeout: float, stop: StopRequest) -> Iterator[World]:
    """The world that this process was started in; what ends the block on one rank ends it on all.

    `num_ranks` is what the config asks for; None: as many as there are.
    """
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if num_ranks is not None and num_ranks != size:
        raise ConfigError(
            f"actor.backend asks for {num_ranks} ranks, but {size} of them {'was' if size == 1 else 'were'} started: "
            f"start them with `gspo train`, or `python -m torch.distributed.run --nproc-per-node {num_ranks} -m gspo "
            f"train …`, or set actor.backend=fsdp:d{size}"
        )
    if size == 1:
        yield ALONE
        return
    ranks = Ranks(size, stall_timeout, stop)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)  # raises where another rank's failure explains this one
        raise
    finally:
        ranks.close()


class Ranks(World):
    """This process among several, connected by gloo on CPU and NCCL on CUDA."""

    margin = 3 * GRACE

    def __init__(self, size: int, stall_timeout: float, stop: StopRequest) -> None:
        from torch import distributed

        self.size, self.rank = size, int(os.environ["RANK"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
        self._stall_timeout, self._stop = stall_timeout, stop
        self._turn = 0
        self._failure: str | None = None
        self._closing = threading.Event()
        self._heard: dict[int, tuple[Any, float]] = {}
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
        timeout = timedelta(seconds=stall_timeout)
        global _num_joined
        _num_joined += 1  # a second run of the same processes must not read what the first has left
        torch_distributed: Any = distributed  # its stubs leave out the store's names
        store = next(torch_distributed.rendezvous("env://", timeout=timeout))[0]
        self._store: Any = torch_distributed.PrefixStore(f"gspo/{_num_joined}", store)
        self._store.compare_set("failed", "", "")
        self._sign_of_life(self._store)
        try:
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=torch_distributed.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=size,
                timeout=timeout,
            )
        except RuntimeError as cause:
            raise TrainingError(
                f"rank {self.rank} of {size} did not find the others in {stall_timeout:g} s (stall_timeout): {cause}"
            ) from cause
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    # Turns and exchanges

    def broadcast_command(
        self, what: str, content: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        if not self.is_first:
            return
        message = pack_message(content or {}, arrays or {})
        # Through the store, because the others may have to wait for hours, which no collective should.
        self._store.set(f"turn/{self._turn}", json.dumps([what, len(message)]))
        self._turn += 1
        self._broadcast(torch.from_numpy(message))

    def commands(self) -> Iterator[Command]:
        while True:
            key = f"turn/{self._turn}"
            while not self._store.check([key]):
                self._refuse_silence()
                time.sleep(LOOK)
            what, length = json.loads(self._store.get(key))
            self._turn += 1
            watchdog.beat(f"turn {what!r} of rank 0")
            message = torch.zeros(length, dtype=torch.uint8)
            self._broadcast(message)
            yield Command(what, *unpack_message(message.numpy()))

    def all_gather(self, arrays: Arrays) -> list[dict[str, NDArray[Any]]]:
        from torch import distributed

        message = torch.from_numpy(pack_message({}, arrays))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([len(message)]))
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        distributed.all_gather(parts, torch.nn.functional.pad(message, (0, longest - len(message))))
        return [unpack_message(p[: int(n)].numpy())[1] for p, n in zip(parts, lengths, strict=True)]

    def all_reduce_sum(self, value: float) -> float:
        from torch import distributed

        # Gathered and summed here: the same order, so the same number, on every rank.
        parts = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        distributed.all_gather(parts, torch.tensor([value], dtype=torch.float64))
        return sum(float(part) for part in parts)

    def _broadcast(self, message: torch.Tensor) -> None:
        from torch import distributed

        distributed.broadcast(message, src=0)

    # Life and death

    def fail(self, error: BaseException) -> None:
        """Publish why this rank ends; raises if it ends because of another."""
        if self._failure is None:
            lost = _is_lost_connection(error)
            what = self._who_is_missing(error) if lost else f"{type(error).__name__}: {error}"
            mine = json.dumps([self.rank, what])
            try:
                first = self._store.compare_set("failed", "", mine).decode()
            except RuntimeError:  # the launcher, and its store with it, has gone: nobody is left to be told
                first = mine
            if first == mine:
                if lost:
                    raise TrainingError(f"rank {self.rank}: {what}") from error
                return
            self._failure = first
        rank, what = json.loads(str(self._failure))
        if rank != self.rank:
            raise TrainingError(f"rank {self.rank} ends because rank {rank} failed: {what}") from None

    def close(self) -> None:
        from torch import distributed

        self._closing.set()
        self._thread.join()
        if sys.exc_info()[0] is None:
            distributed.destroy_process_group()
            self._stop.restore()
        # After an error the process is about to end. To wait for operations that nobody will answer helps no one, and
        # a launcher that asks it to end must not keep it from saying why.

    def _who_is_missing(self, error: BaseException) -> str:
        """Whoever gave no sign of life for a while; a rank that was killed a moment ago needs that while to be told."""
        limit = 3 * PERIOD
        end = time.monotonic() + limit + 2 * PERIOD
        while time.monotonic() < end and not self._silent(limit) and self._failure is None:
            time.sleep(PERIOD / 10)
        silent = self._silent(limit)
        who = f"rank {', '.join(map(str, silent))} gives no sign of life" if silent else "another rank has gone"
        why = str(error).strip().splitlines()[0][:200]
        return (
            f"{who}: killed, stopped, or out of memory? ({why}) The same command goes on from the last checkpoint; "
            "if a step is this slow, set stall_timeout higher"
        )

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [rank for rank, (_, at) in sorted(self._heard.items()) if now - at > seconds]

    def _refuse_silence(self) -> None:
        """While this rank waits for rank 0: is there still somebody to wait for?"""
        if self._failure is not None:
            raise TrainingError("rank 0 did not give the next turn")  # `fail` says why
        # A launcher that lost rank 0 asks the rest to go; without that, only time tells.
        limit = GRACE if self._stop.signal is not None else self._stall_timeout
        if 0 in self._silent(limit):
            raise TrainingError(f"rank 0 has given no sign of life for {limit:g} s; it was killed, or stopped")

    def _sign_of_life(self, store: Any) -> None:
        store.set(f"life/{self.rank}", json.dumps([time.time(), *watchdog.progress(), self._stop.signal]))

    def _watch(self) -> None:
        store = self._store.clone()  # a connection of its own: the other may be busy waiting
        others = [rank for rank in range(self.size) if rank != self.rank]
        beats: dict[int, int] = {}
        self._heard = {rank: (None, time.monotonic()) for rank in others}
        while not self._closing.wait(PERIOD):
            try:
                self._sign_of_life(store)
                failed, *lives = (
                    value.decode() for value in store.multi_get(["failed", *(f"life/{rank}" for rank in others)])
                )
            except RuntimeError:
                if not self._closing.wait(GRACE):
                    self._leave("the launcher that started the ranks has gone")
                return
            for rank, life in zip(others, lives, strict=True):
                _, beat, what, asked = json.loads(life)
                if self._heard[rank][0] != life:
                    self._heard[rank] = life, time.monotonic()
                if beats.get(rank) != beat:
                    beats[rank] = beat
                    watchdog.heard(f"{what} (rank {rank})")
                if asked is not None and self.is_first:
                    self._stop.ask(asked, f"rank {rank}")
            if failed:
                self._failure = failed
                if not self._closing.wait(GRACE):
                    rank, what = json.loads(failed)
                    self._leave(f"rank {rank} failed: {what}")

    def _leave(self, why: str) -> None:
        """End this process from beside the thread that is stuck."""
        print(f"gspo: rank {self.rank} ends because {why}", file=sys.stderr, flush=True)
        os._exit(watchdog.EXIT_CODE)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed, which torch says in plain RuntimeErrors."""
    from torch import distributed

    if isinstance(error, distributed.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and not isinstance(error, GspoError) and any(w in str(error) for w in words)


def pack_message(content: Mapping[str, Any], arrays: Arrays) -> NDArray[np.uint8]:
    """Arrays and JSON as bytes.

    >>> unpack_message(pack_message({"step": 3}, {"x": np.array([1.5])}))
    ({'step': 3}, {'x': array([1.5])})
    """
    text = np.frombuffer(json.dumps(content).encode(), dtype=np.uint8)
    whole = {"": text, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
    return np.frombuffer(_save(whole), dtype=np.uint8).copy()


def unpack_message(message: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    arrays = {name: array.copy() for name, array in _load(message.tobytes()).items()}  # writable
    return json.loads(arrays.pop("").tobytes()), arrays
