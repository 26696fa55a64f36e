"""Copies of the metrics for other programs: TensorBoard, Weights & Biases, Trackio (stats_logger).

Each sink has a thread and a bounded queue of rows, so a training step never waits for a sink. A sink that raises, or
whose queue is full because it hangs, is dropped with one message; training and the other sinks continue. Each start
writes the whole history of metrics.jsonl again: after a resume no step is logged twice, and a sink that is enabled late
gets all steps. (Online Weights & Biases keeps the rows that it has received before.)
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.system.files import read_jsonl, to_json
from gspo.system.imports import by_name

if TYPE_CHECKING:
    from gspo.monitor.sinks import Row, Sink

MAX_PENDING = 4096  # rows in a sink's queue; a sink that is further behind hangs
LOG = "loggers.log"  # tracebacks of failed sinks, and what sinks print
SINKS: dict[str, str | Callable[..., Sink]] = {
    "tensorboard": "gspo.monitor.sinks:TensorBoard",
    "wandb": "gspo.monitor.sinks:WeightsAndBiases",
    "trackio": "gspo.monitor.sinks:Trackio",
}
PATIENCE_S = 60.0  # at the end of a run, for rows in the queues


def _maker(name: str) -> Callable[..., Sink]:
    maker = SINKS[name]
    return by_name(maker) if isinstance(maker, str) else maker


class Loggers:
    """All sinks of a run. Messages go to `say` in the trainer's thread, because displays are not thread-safe."""

    def __init__(self, run: Path, settings: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        file = run / "metrics.jsonl"
        # After a resume, metrics.jsonl has been cut back to the checkpoint; sinks get this history again.
        history = read_jsonl(file) if settings and file.exists() else []
        self._feeds = [
            _Feed(name, partial(_maker(name), run, **values), history, run / LOG, self._messages.put)
            for name, values in settings.items()
        ]
        for feed in self._feeds:
            feed.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """A row that was written to metrics.jsonl; returns at once."""
        if self._feeds:
            plain = json.loads(to_json(row))  # the same values as in the file
            self._feeds = [feed for feed in self._feeds if feed.put(plain)]
        self._show_messages()

    def close(self) -> None:
        """Wait until the sinks have written all rows, at most PATIENCE_S."""
        feeds, self._feeds = [feed for feed in self._feeds if feed.put(None)], []
        # Most sinks end within 3 s; a message is printed only if one needs longer. The deadline is for all sinks
        # together.
        deadline = time.monotonic() + 3
        for feed in feeds:
            feed.join(max(0.0, deadline - time.monotonic()))  # wait: 3 s for all loggers together, the trainer
        late = [feed for feed in feeds if feed.is_alive()]
        if late:
            self._say(f"waiting for {_names(late)} to write the last rows, at most {PATIENCE_S:.0f} s")
            deadline = time.monotonic() + PATIENCE_S
            for feed in late:
                feed.join(max(0.0, deadline - time.monotonic()))  # wait: 60 s for all loggers together, the trainer
            for feed in late:
                if feed.is_alive():
                    feed.drop(f"{feed.name} did not write all rows within {PATIENCE_S:.0f} s")
        self._show_messages()

    def _show_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._say(f"stats_logger: {self._messages.get_nowait()}")


class _Feed(threading.Thread):
    """One sink, its thread and its queue."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        history: list[Row],
        log: Path,
        report: Callable[[str], None],
    ) -> None:
        # A daemon: a sink that hangs does not keep the process alive.
        super().__init__(name=name, daemon=True)
        self._make, self._history, self._log, self._message = make, history, log, report
        # Bounded: a sink that does not respond must not use more and more memory.
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_PENDING)
        self._dropped = False

    def put(self, row: Row | None) -> bool:
        """Queue a row, or the end (None); False if the sink takes no more rows."""
        if self._dropped or not self.is_alive():
            return False
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.drop(f"{self.name} is {MAX_PENDING} rows behind")
        return not self._dropped

    def drop(self, why: str) -> None:
        self._dropped = True
        self._message(f"{why} and was dropped. Training continues; metrics.jsonl has all rows, {self._log} the details")

    def run(self) -> None:
        step = 0
        try:
            # In this thread: connecting to a service may be slow or hang.
            sink = self._make()
            if where := getattr(sink, "where", None):
                self._message(f"{self.name} is at {where}")
            for row in self._history:
                sink.write(row)
            # wait: none, the trainer sends an end mark
            while (row := self._rows.get()) is not None and not self._dropped:
                step = row["step"]
                sink.write(row)
            sink.close()
        except Exception as error:  # a sink may raise anything; training must continue
            with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            if not self._dropped:
                self.drop(f"{self.name} failed at step {step} ({type(error).__name__}: {error})")


def _names(feeds: list[_Feed]) -> str:
    return ", ".join(feed.name for feed in feeds)
