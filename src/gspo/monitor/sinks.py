"""The programs that can receive metrics: TensorBoard, Weights & Biases, Trackio. `loggers.py` runs them in threads."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import yaml

from gspo.monitor.loggers import LOG
from gspo.system.files import parse_yaml

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
    with contextlib.suppress(OSError, yaml.YAMLError):
        found = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
