"""Where metrics go beside the run directory: TensorBoard, Weights & Biases, Trackio (stats_logger).

A process of its own follows metrics.jsonl and copies each row. So a logger costs a step one byte through a pipe; one
that hangs, fails or dies cannot touch the run; and one switched on late gets the whole history. It starts from the
first row each time: what a resumed run cut back is cut back there too (online Weights & Biases keeps what it was sent).

    python -m gspo.monitor.loggers RUN FD '{"tensorboard": {}}'     copies until FD ends
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

LOG = "loggers.log"  # what the loggers print
PATIENCE_S = 60.0  # at the end of a run, for rows under way

# The same gspo as this one, installed or not.
_SOURCE = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]

Row = dict[str, Any]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class Loggers:
    """The trainer's end: start the process, nudge it after each row, tell once what goes wrong with it."""

    def __init__(self, run: Path, settings: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> None:
        self._run, self._say, self._names = run, say, ", ".join(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        self._heard = b""
        if not settings:
            return
        read, self._nudge = os.pipe()
        os.set_blocking(self._nudge, False)
        try:
            with open(run / LOG, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(run), str(read), json.dumps(settings)],
                    pass_fds=[read],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # One thread: it shares the machine with the trainer.
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_SOURCE)},
                    start_new_session=True,  # a Ctrl-C in the terminal is the trainer's
                )
                assert self._process.stdout is not None
                os.set_blocking(self._process.stdout.fileno(), False)
        except OSError as cause:
            self._once("start", f"{self._names} could not start: {cause}")
        finally:
            os.close(read)

    def step(self) -> None:
        """A row was written to metrics.jsonl."""
        if self._process is None:
            return
        # A full pipe holds thousands of nudges, and one is enough.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._nudge, b".")
        self._listen()
        if self._process.poll() is not None:
            self._once("dead", f"{self._names} ended early (exit code {self._process.returncode})")

    def close(self) -> None:
        """Wait for rows under way, at most PATIENCE_S."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._nudge)
        try:
            self._wait(process)
        finally:  # also where a person has waited enough
            if process.poll() is None:
                _kill(process)
        self._listen(process)
        if process.returncode not in (0, -signal.SIGKILL):
            self._once("dead", f"{self._names} ended early (exit code {process.returncode})")
        assert process.stdout is not None
        process.stdout.close()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
            return
        self._say(f"waiting for {self._names} to take the last rows, at most {PATIENCE_S:.0f} s")
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._once(
                "late", f"{self._names} had not taken every row {PATIENCE_S:.0f} s after the end, and was stopped"
            )

    def _listen(self, process: subprocess.Popen[bytes] | None = None) -> None:
        """What the process reports, a JSON object per line: failures, and where a logger is to be seen."""
        process = process or self._process
        assert process is not None
        assert process.stdout is not None
        self._heard += process.stdout.read() or b""
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                if "where" in told:
                    self._say(f"stats_logger: {told['logger']} is at {told['where']}")
                else:
                    self._once(told["logger"], f"{told['logger']} failed at step {told['step']}: {told['why']}")

    def _once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            place = self._run / LOG
            self._say(f"stats_logger: {message}. Training goes on; metrics.jsonl has every row, {place} the details")


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Its own session: wandb's service goes with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The process


def follow(run: Path, nudges: int, settings: Mapping[str, Mapping[str, Any]], report: Callable[[Row], None]) -> None:
    """Copy the rows of metrics.jsonl to every logger, now and whenever there are more, until `nudges` ends.

    A logger that fails is reported once and left out; the others go on.
    """
    step, sinks = 0, dict[str, Sink]()

    def attempt(name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # whatever a logger raises, the others and the run go on
            traceback.print_exc()
            sinks.pop(name, None)
            report({"logger": name, "step": step, "why": f"{type(error).__name__}: {error}"})

    with _alone(run):
        for name, values in settings.items():
            if (sink := attempt(name, partial(SINKS[name], run, **values))) is not None:
                sinks[name] = sink
                if where := getattr(sink, "where", None):
                    report({"logger": name, "where": where})
        for row in rows_of(run / "metrics.jsonl", nudges):
            step = row["step"]
            for name, sink in list(sinks.items()):
                attempt(name, partial(sink.write, row))
        for name, sink in list(sinks.items()):
            attempt(name, sink.close)


@contextlib.contextmanager
def _alone(run: Path) -> Iterator[None]:
    """After a kill the last process may still be writing; it sees its pipe end and leaves."""
    with open(run / ".loggers.lock", "w") as lock:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield


def rows_of(file: Path, nudges: int) -> Iterator[Row]:
    """Every whole line of a growing file, each once; ends when the pipe has and all is read."""
    torn, is_open = b"", True
    with open(_waited_for(file, nudges), "rb") as source:
        while True:
            *lines, torn = (torn + source.read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        yield row
            if not is_open:
                return
            is_open = bool(os.read(nudges, 65536))


def _waited_for(file: Path, nudges: int) -> Path:
    """The file, once there is one; where the run ends without a row, an empty one."""
    while not file.exists():
        if not os.read(nudges, 65536):
            return file if file.exists() else Path(os.devnull)
    return file


def numbers(row: Row) -> dict[str, float]:
    """What a chart can show; step is its axis."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


class TensorBoard:
    """Events in RUN/tensorboard, one per row."""

    def __init__(self, run: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        shutil.rmtree(run / "tensorboard", ignore_errors=True)  # written again from the first row
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
    """One run of one id in RUN/wandb, over any number of resumptions. WANDB_* in the environment says the rest."""

    def __init__(self, run: Path, mode: str, project: str, name: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its errors go to our log, not to a server of others
        import wandb

        folder = run / "wandb"
        file = folder / "run_id"
        if mode == "offline" and folder.exists():
            for past in folder.glob("offline-run-*"):  # written again from the first row
                shutil.rmtree(past, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            mode="offline" if mode == "offline" else "online",
            project=project,
            name=os.environ.get("WANDB_NAME", name),
            id=os.environ.get("WANDB_RUN_ID", file.read_text().strip()),
            dir=str(run),
            resume="allow" if mode == "online" else None,
            config=_config(run),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                x_stats_pid=os.getppid(),  # the trainer's load, not this process's
                x_disable_stats=mode == "offline",
                x_disable_machine_info=mode == "offline",  # asks a cloud's address for it
                x_save_requirements=False,
            ),
        )
        if not Path(self._run.dir).is_relative_to(run):
            raise OSError(f"{folder} cannot be written; wandb went to {self._run.dir}")
        self.where = self._run.url if mode == "online" else None
        self._next = self._run.step  # of a resumed online run: the server refuses what it has

    def write(self, row: Row) -> None:
        if row["step"] >= self._next:
            self._run.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in the database of RUN/trackio, or of TRACKIO_DIR where that is set."""

    def __init__(self, run: Path, project: str, name: str) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run / "trackio"))
        import trackio

        with contextlib.suppress(ValueError):  # there is no such project yet
            for past in [r for r in trackio.Api().runs(project) if r.name == name]:
                past.delete()  # written again from the first row
        self._run = trackio.init(
            project, name, config=_config(run), embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        # Its own thread writes, and only warns of what it could not write.
        self._warned: list[str] = []
        warnings.showwarning = lambda message, *_: self._warned.append(str(message))

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=row["step"])
        self._check()

    def close(self) -> None:
        self._run.finish()
        self._check()

    def _check(self) -> None:
        if self._warned:
            raise OSError(self._warned[0])


SINKS: dict[str, Callable[..., Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


def _config(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, yaml.YAMLError):
        found = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def main() -> None:
    run, nudges, settings = Path(sys.argv[1]).resolve(), int(sys.argv[2]), json.loads(sys.argv[3])
    # Loggers print as they like; the trainer reads this one.
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(failure: Row) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(failure), file=told, flush=True)

    follow(run, nudges, settings, report)


if __name__ == "__main__":
    main()
