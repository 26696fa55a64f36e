"""How all ranks end when one of them does: heartbeats and the first failure, in torch's key-value store.

A thread on each rank writes a heartbeat once a second: its progress, and a stop signal that it has received. The first
error of any rank is written to the key `failed` and ends all ranks. A killed rank breaks its connections. A stopped
rank (SIGSTOP) sends no heartbeats, and the others end `stall_timeout` after the last progress of any rank. A stop
signal to any rank is passed on to rank 0, which acts on it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from gspo.errors import GspoError, TrainingError
from gspo.system import StopRequest, program
from gspo.system import heartbeat as watchdog

PERIOD = 1.0  # seconds between two heartbeats
# Seconds that a rank has to end by itself after another one failed. Also the time that a silent rank 0 gets once the
# launcher has asked this rank to stop.
GRACE = 5.0
INTERRUPTED = "a signal stopped it before the first step"  # the failure of a rank that KeyboardInterrupt ended


class Liveness:
    """This rank's heartbeat, those of the others, and the first failure of any rank."""

    def __init__(self, store: Any, rank: int, size: int, stall_timeout: float, stop: StopRequest) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stall_timeout, self._stop = stall_timeout, stop
        self._failure: str | None = None  # JSON [rank, message]
        self._closing = threading.Event()
        self._heard: dict[int, tuple[Any, float]] = {}  # by rank: last heartbeat, when it was read
        self._now = 0.0  # the time of the last read, without the time in which this process was stopped
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        # These keys must exist before any rank reads them: the store's multi_get waits for missing keys.
        store.compare_set("failed", "", "")
        self._send_heartbeat(store)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        # wait: GRACE, the rank
        self._thread.join(GRACE)  # a daemon: it may be blocked in the store of a launcher that was stopped

    def fail(self, error: BaseException) -> None:
        """Publish the error that ends this rank; raises TrainingError if another rank's failure is the cause."""
        if self._failure is None:
            # A lost connection is a symptom: report the rank that is missing, not the collective that failed.
            lost = _is_lost_connection(error)
            what = self._missing_ranks(error) if lost else f"{type(error).__name__}: {error}"
            what = INTERRUPTED if isinstance(error, KeyboardInterrupt) else what
            mine = json.dumps([self._rank, what])
            try:
                # Only the first failure is stored. The result is that one, here or of another rank.
                first = self._store.compare_set("failed", "", mine).decode()
            except RuntimeError:  # the launcher, which holds the store, has ended
                first = mine
            if first == mine:
                if lost:
                    raise TrainingError(f"rank {self._rank}: {what}") from error
                return
            self._failure = first
        rank, what = json.loads(str(self._failure))
        if rank != self._rank and what == INTERRUPTED:
            raise KeyboardInterrupt from None
        if rank != self._rank:
            raise TrainingError(f"rank {self._rank} ends because rank {rank} failed: {what}") from None

    def check_rank_0(self) -> None:
        """While this rank waits for a command: TrainingError if rank 0 has failed or is silent."""
        if self._failure is not None:
            raise TrainingError("rank 0 sent no further command")  # `fail` adds the cause
        # The launcher asks the other ranks to stop when rank 0 is lost; without it, only the timeout detects this.
        limit = GRACE if self._stop.signal is not None else self._stall_timeout
        if 0 in self._silent(limit):
            raise TrainingError(f"rank 0 has sent no heartbeat for {limit:g} s; it was killed or stopped")

    def _missing_ranks(self, error: BaseException) -> str:
        """A message that names the ranks without heartbeats; waits until a rank killed just now has been silent."""
        limit = 3 * PERIOD
        end = time.monotonic() + limit + 2 * PERIOD
        while time.monotonic() < end and not self._silent(limit) and self._failure is None:
            time.sleep(PERIOD / 10)  # wait: PERIOD / 10, the rank after GRACE
        silent = self._silent(limit)
        who = f"rank {', '.join(map(str, silent))} sends no heartbeat" if silent else "another rank has ended"
        why = str(error).strip().splitlines()[0][:200]
        return (
            f"{who}: killed, stopped, or out of memory? ({why}) Run the same command again to resume from the last "
            "checkpoint; if a step takes this long, set stall_timeout higher"
        )

    def _silent(self, seconds: float) -> list[int]:
        """Ranks without a new heartbeat for `seconds`."""
        return [rank for rank, (_, at) in sorted(self._heard.items()) if self._now - at > seconds]

    def _send_heartbeat(self, store: Any) -> None:
        store.set(f"life/{self._rank}", json.dumps([time.time(), *watchdog.count_heartbeats(), self._stop.signal]))

    def _watch(self) -> None:
        store = self._store.clone()  # its own connection: the other one may be blocked in a wait
        others = [rank for rank in range(self._size) if rank != self._rank]
        beats: dict[int, int] = {}
        clock = watchdog.AwakeClock(PERIOD)
        self._heard = dict.fromkeys(others, (None, self._now))
        while not self._closing.wait(PERIOD):  # wait: PERIOD, close()
            self._now = clock.seconds()
            try:
                self._send_heartbeat(store)
                failed, *lives = (
                    value.decode()
                    # wait: none, the store's timeout of 300 s
                    for value in store.multi_get(["failed", *(f"life/{rank}" for rank in others)])
                )
            except RuntimeError:
                if not self._closing.wait(GRACE):  # wait: GRACE, close()
                    self._exit("the launcher that started the ranks has ended")
                return
            for rank, life in zip(others, lives, strict=True):
                # A heartbeat is new if its content is. It is timed by this rank's clock, because machines' clocks can
                # differ.
                _, beat, what, asked = json.loads(life)
                if self._heard[rank][0] != life:
                    self._heard[rank] = life, self._now
                # Progress of another rank counts here, too: this rank may be waiting for it in a collective.
                if beats.get(rank) != beat:
                    beats[rank] = beat
                    watchdog.remote_beat(f"{what} (rank {rank})")
                if asked is not None and self._rank == 0:
                    self._stop.ask(asked, f"rank {rank}")
            if failed:
                self._failure = failed
                # The main thread has GRACE seconds to raise its own error. If it is blocked, the process ends here.
                if not self._closing.wait(GRACE):  # wait: GRACE, close()
                    rank, what = json.loads(failed)
                    code = program.INTERRUPTED if what == INTERRUPTED else watchdog.EXIT_CODE
                    self._exit(f"rank {rank} failed: {what}", code)

    def _exit(self, why: str, code: int = watchdog.EXIT_CODE) -> None:
        """End this process: its main thread is blocked in a collective that will never complete."""
        print(f"gspo: rank {self._rank} ends because {why}", file=sys.stderr, flush=True)
        os._exit(code)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed; torch raises a plain RuntimeError for most of these."""
    from torch import distributed

    if isinstance(error, distributed.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and not isinstance(error, GspoError) and any(w in str(error) for w in words)
