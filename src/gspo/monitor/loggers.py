"""Where metrics go: metrics.jsonl, samples, and TensorBoard, W&B or Trackio.

Each sink has a thread and a bounded queue of rows, so a training step never waits for a sink. A sink that raises, or
whose queue is full because it hangs, is dropped with one message; training and the other sinks continue. Each start
writes the whole history of metrics.jsonl again: after a resume no step is logged twice, and a sink that is enabled late
gets all steps. (Online Weights & Biases keeps the rows that it has received before.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gspo.errors import ConfigError
from gspo.system import by_name, read_jsonl, to_json

Row = dict[str, Any]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


def numbers(row: Row) -> dict[str, float]:
    """The values that a chart can show; the step is its axis."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


class TensorBoard:
    """Events in RUN/tensorboard, one per row."""

    def __init__(self, run: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(run / "tensorboard", ignore_errors=True)  # the history is written again
        self._writer = EventFileWriter(str(run / "tensorboard"), flush_secs=5)

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto import event_pb2

        event: Any = event_pb2.Event(wall_time=time.time(), step=row["step"])  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in numbers(row).items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run with one id in RUN/wandb, over all resumptions. WANDB_* environment variables set the rest."""

    def __init__(self, run: Path, mode: str, project: str, name: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # errors go to our log, not to wandb's server
        import wandb

        # The id is stored in the run directory, so that a resumed run continues the same W&B run.
        folder = run.resolve() / "wandb"
        file = folder / "run_id"
        if mode == "offline" and folder.exists():
            for past in folder.glob("offline-run-*"):  # the history is written again
                shutil.rmtree(past, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            mode="offline" if mode == "offline" else "online",
            project=project,
            name=os.environ.get("WANDB_NAME", name),
            id=os.environ.get("WANDB_RUN_ID", file.read_text().strip()),
            dir=str(folder.parent),
            resume="allow" if mode == "online" else None,
            config=_config(run),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                x_disable_stats=mode == "offline",
                x_disable_machine_info=mode == "offline",  # it would query a cloud metadata address
                x_save_requirements=False,
            ),
        )
        # wandb uses a temporary folder if it cannot write to `dir`.
        if not Path(self._run.dir).is_relative_to(folder):
            raise OSError(f"{folder} cannot be written; wandb chose {self._run.dir}")
        self.where = self._run.url if mode == "online" else None
        self._next = self._run.step  # of a resumed online run: the server rejects steps that it has

    def write(self, row: Row) -> None:
        if row["step"] >= self._next:
            self._run.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in the database of RUN/trackio, or of TRACKIO_DIR if that is set."""

    def __init__(self, run: Path, project: str, name: str) -> None:
        import trackio

        self._warned: list[str] = []
        _redirect_trackio(run, self._warned)
        with contextlib.suppress(ValueError):  # the project does not exist yet
            for past in [r for r in trackio.Api().runs(project) if r.name == name]:
                past.delete()  # the history is written again
        self._run = trackio.init(
            project, name, config=_config(run), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=row["step"])
        self._check()

    def close(self) -> None:
        self._run.finish()
        self._check()

    def _check(self) -> None:
        if self._warned:
            raise OSError(self._warned[0])


def _redirect_trackio(run: Path, warned: list[str]) -> None:
    """Trackio's data go to the run directory, its prints to the log, and its warnings to `warned`.

    Trackio has no settings for these: it reads TRACKIO_DIR once, when it is imported, although a process can train
    several runs; and it reports a row that its writer thread could not store as a warning only. So its modules' names
    are replaced.
    """

    def print_to_log(*words: Any, **_: Any) -> None:
        with contextlib.suppress(OSError), open(run / LOG, "a", encoding="utf-8") as log:
            print(*words, file=log)

    replaced: dict[str, Any] = {"_emit_nonfatal_warning": lambda message, *_, **__: warned.append(str(message))}
    if not os.environ.get("TRACKIO_DIR"):
        replaced["TRACKIO_DIR"] = run / "trackio"
    # A copy: `list(sys.modules.items())` can be interrupted by an import in the thread of another sink.
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] == "trackio":
            known = vars(module)
            known |= {key: value for key, value in replaced.items() if key in known} | {"print": print_to_log}


def _config(run: Path) -> dict[str, Any]:
    from gspo.system import read_yaml

    with contextlib.suppress(ConfigError):
        return read_yaml(run / "config.yaml", ConfigError)
    return {}


MAX_PENDING = 4096  # rows in a sink's queue; a sink that is further behind hangs
LOG = "loggers.log"  # tracebacks of failed sinks, and what sinks print
SINKS: dict[str, str | Callable[..., Sink]] = {
    "tensorboard": "gspo.monitor.loggers:TensorBoard",
    "wandb": "gspo.monitor.loggers:WeightsAndBiases",
    "trackio": "gspo.monitor.loggers:Trackio",
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
