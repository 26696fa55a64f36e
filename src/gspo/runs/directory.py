"""A run directory while it is trained: files, lock, state, when to save, and how to resume.

All JSON is strict (NaN becomes null), one object per line. A killed process may leave an incomplete last line; on
resume every file is cut back to the checkpoint's step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import stat
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from gspo.errors import CheckpointError, ConfigError, DataError, GspoError
from gspo.faults import reached
from gspo.learner import ProximalSource
from gspo.rollout import Snapshot, pack_groups
from gspo.runs import checkpoint
from gspo.system import Every, inert, read_json, read_jsonl, step_name, step_of, to_json, write_errors, write_run_file
from gspo.types import Images

MAX_PICTURES = 4096  # files in images/; each has a few kB


class RunDir:
    """An open run directory, locked for one trainer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            (path / "samples").mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(path)
        except OSError as cause:
            raise ConfigError(f"{path} cannot be written: {cause.strerror}; set cluster.fileroot") from cause
        try:
            _refuse_special_files(path)
        except ConfigError:
            self.lock.close()
            raise
        self._metrics: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one step's metrics."""
        file = self.path / "metrics.jsonl"
        self.lock.check()
        with write_errors(file):
            reached("record.metrics")
            if self._metrics is None:
                self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115
            self._metrics.write(to_json(row) + "\n")
            # Each row is flushed, so that programs that follow a running run see it at once.
            self._metrics.flush()

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]], tokens: Mapping[str, np.ndarray]) -> None:
        """Every sample of a step, and the per-token values of the kept ones."""
        from safetensors.numpy import save_file

        self.lock.check()
        name = step_name(step)
        with write_run_file(self.path / "samples" / f"{name}.jsonl") as tmp:
            reached("record.samples")
            tmp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
        if tokens:
            with write_run_file(self.path / "samples" / f"{name}.safetensors") as tmp:
                save_file(dict(tokens), tmp)

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The held-out answers of a step."""
        self.lock.check()
        (self.path / "evals").mkdir(exist_ok=True)
        _write_rows(self.path / "evals" / f"{step_name(step)}.jsonl", rows)

    def images(self, shown: Iterable[Images | None]) -> None:
        """A small picture of what each prompt shows, by digest; the oldest are deleted above the limit."""
        folder = self.path / "images"
        thumbnails = {i.digest: i.thumbnail for i in shown if i is not None and i.thumbnail is not None}
        missing = {digest: make for digest, make in thumbnails.items() if not (folder / f"{digest}.webp").exists()}
        if not missing:
            return
        self.lock.check()
        with write_errors(folder):
            folder.mkdir(exist_ok=True)
        for digest, make in missing.items():
            # An image file that was deleted meanwhile has no picture: training reports it if it needs the file.
            with contextlib.suppress(DataError), write_run_file(folder / f"{digest}.webp") as tmp:
                tmp.write_bytes(make())
        for file in sorted(folder.glob("*.webp"), key=lambda file: file.stat().st_mtime_ns)[:-MAX_PICTURES]:
            file.unlink()

    def pass_rates(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The pass rate of every visited row of the training data."""
        self.lock.check()
        _write_rows(self.path / "pass_rates.jsonl", rows)

    def delete_samples(self, up_to: int) -> None:
        """Delete the samples and held-out answers of step `up_to` and of all steps before it."""
        for file in self._step_files():
            if (step := step_of(file.name)) is not None and step <= up_to:
                file.unlink()

    def cut_back(self, step: int) -> None:
        """Delete what was written after `step`: a resumed run writes it again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            _write_rows(file, [row for row in read_jsonl(file) if row.get("step", 0) <= step])
        for sample in self._step_files():
            written = step_of(sample.name)
            # Other suffixes are temporary files that a killed process left.
            if written is None or written > step or sample.suffix not in (".jsonl", ".safetensors"):
                sample.unlink()

    def _step_files(self) -> list[Path]:
        return [file for folder in ("samples", "evals") for file in (self.path / folder).glob("step_*")]

    def log(self, line: str) -> None:
        # The display has shown the line already, so a full disk must not hide the error behind another one.
        with (
            contextlib.suppress(OSError),
            open(self.path / "log.txt", "a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {inert(line)}\n")

    def log_error(self, error: BaseException | None) -> None:
        """The error that ends the run, also here: the terminal may be gone. Nothing for None and for signals."""
        if isinstance(error, GspoError):
            self.log(f"error: {error}")
        elif isinstance(error, Exception):
            self.log("error: " + "".join(traceback.format_exception(error)).strip())

    def close(self) -> None:
        if self._metrics is not None:
            # After a failed write the rest of the line is still in the buffer; flushing it fails again.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        # Last: another trainer may open the directory as soon as the lock is released.
        self.lock.close()


def _write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with write_run_file(file) as tmp:
        tmp.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")


# Files that a run opens by name. A directory in their place would be an error of the operating system half way.
_FILES = ("metrics.jsonl", "log.txt", "config.yaml", "origins.json", "environment.json", "rewards.log", "loggers.log")


def _refuse_special_files(run: Path) -> None:
    """ConfigError for a FIFO, socket or device in a run directory: opening a FIFO waits for its other end."""
    for folder in (run, run / "samples"):
        for entry in folder.iterdir():
            is_directory = entry.is_dir()
            if entry.is_file() or (is_directory and folder == run and entry.name not in _FILES):
                continue
            # A broken link is replaced or reported when it is written.
            if entry.exists():
                kind = "a directory" if is_directory else "not a regular file (a FIFO, socket or device)"
                raise ConfigError(f"{entry} is {kind}, but the run needs a file there; move it away")


class RunLock:
    """Locks on a directory and on its file `.lock`. The kernel releases them when the process ends, even by SIGKILL.

    The lock on the directory holds if somebody deletes `.lock`. Some network file systems have no locks on directories;
    there `check` notices that `.lock` is another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._has_folder = _lock(self._folder)
            self._lock_file()
        except BaseException as cause:
            self.close()
            if isinstance(cause, BlockingIOError):
                raise ConfigError(
                    f"{path} is in use by another trainer; wait for it, or set trial_name to start another run"
                ) from cause
            raise

    def check(self) -> None:
        """CheckpointError if the directory does not belong to this trainer any more; call it before a write."""
        if not _is_same(self._path, self._folder):
            raise CheckpointError(
                f"{self._path} was moved, removed or replaced while the trainer was running; nothing more was written. "
                "Move it back (or set experiment_name and trial_name to its new name) and run the same command again"
            )
        if self._has_folder or (self._file is not None and _is_same(self._path / ".lock", self._file)):
            return
        try:
            self._lock_file()
        except OSError as cause:
            raise CheckpointError(
                f"{self._path / '.lock'} was deleted, and another trainer uses the directory now; nothing more was "
                "written. Wait for the other trainer, or set trial_name to start another run"
            ) from cause

    def close(self) -> None:
        """Release the locks: another trainer may open the directory from now on."""
        for handle in (self._file, self._folder):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._file = None

    def _lock_file(self) -> None:
        # O_NONBLOCK: opening a FIFO would wait for a reader.
        handle = os.open(self._path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{self._path / '.lock'} is not a regular file; remove it")
            _lock(handle)
        except BaseException:
            os.close(handle)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = handle


def _lock(handle: int) -> bool:
    """Lock a file or directory; False if the file system cannot. BlockingIOError if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_same(path: Path, handle: int) -> bool:
    try:
        here, there = os.stat(path), os.fstat(handle)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def changed_code(run: Path, files: Mapping[str, Path]) -> list[str]:
    """What to say about files that have changed since the run was last started; records the files as they are now.

    files: name of the function → file that defines it. Other files that it imports are not compared.
    """
    record = run / "code.json"
    try:
        known = read_json(record, CheckpointError)
    except CheckpointError:
        known = {}
    now = {name: {"file": str(file), "sha256": code_digest(file)} for name, file in files.items()}
    if now != known:
        with write_run_file(record) as tmp:
            tmp.write_text(to_json(now) + "\n", encoding="utf-8")
    return [
        f"warning: {name} has changed since this run was last started ({now[name]['file']}); it continues with the "
        "new code. Set trial_name to start another run"
        for name in now
        if isinstance(before := known.get(name), dict) and before.get("sha256") != now[name]["sha256"]
    ]


def code_digest(file: Path | None) -> str | None:
    """The sha256 of a file; None if there is none."""
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


# Names in state.json that differ from the fields: the format of checkpoints stays.
_STORED = {"resubmit": "again"}


@dataclass
class State:
    """Plain numbers, saved with every checkpoint.

    >>> State.from_json(State(step=3, resubmit=[7]).to_json()).resubmit
    [7]
    """

    step: int = 0  # finished steps; also the version of the weights
    submission: int = 0  # next prompt of the stream
    resubmit: list[int] = field(default_factory=list)  # earlier prompts that must be sampled again
    update: int = 0  # optimizer updates
    proximal: ProximalSource = "recompute"  # where π_old of mini-batches 2…K comes from
    noise: float | None = None  # last measured p95 |log s|, sampler against trainer at the same weights
    auto_eps: float | None = None  # ε_low of `eps_clip: auto`, before its bounds
    entropy_coef: float | None = None  # of `entropy_target`, for the next step; None: the first one
    curriculum: dict[str, Any] | None = None  # of `shuffle: pass_rate`; only in a checkpoint
    nonfinite_in_row: dict[str, int] = field(default_factory=dict)  # skipped updates in a row, by model
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)  # the held-out scores of that step, by metric
    graded: bool = False  # an evaluation had rewards other than 0 and 1
    seconds: float = 0.0  # spent training, over all sessions

    def compare_best(self, scores: Mapping[str, float], metric: str | None) -> None:
        """Compare the current step with the best step so far; of equal ones the later is the best.

        scores: metrics of an evaluation; metric: the one to compare, None: accuracy while all rewards were 0 or 1, else
        reward; without either, the loss, of which the lowest is the best. The best step's scores are all kept, so that
        the metric may change during a run.

        >>> state = State(step=5, best_step=0, best={"eval/accuracy": 0.0, "eval/reward": 0.4})
        >>> state.compare_best({"eval/accuracy": 0.0, "eval/reward": 0.3, "eval/graded": 1.0}, None)
        >>> state.best_step
        0
        """
        self.graded = self.graded or scores.get("eval/graded", 0.0) > 0
        own = "eval/reward" if self.graded else "eval/accuracy"
        metric = metric or (own if own in scores else "eval/loss")
        sign = -1 if metric.endswith("/loss") else 1
        now, before = scores.get(metric, math.nan), self.best.get(metric)
        # A source whose rewards all failed has no score: it is never the best.
        if self.best_step is None or (math.isfinite(now) and (before is None or sign * now >= sign * before)):
            self.best_step, self.best = self.step, {k: v for k, v in scores.items() if math.isfinite(v)}

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        # Only runs that use them store these.
        for name in ("entropy_coef", "curriculum"):
            if fields[name] is None:
                del fields[name]
        return {_STORED.get(name, name): value for name, value in fields.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> State:
        names = {theirs: ours for ours, theirs in _STORED.items()}
        fields = {names.get(name, name): value for name, value in stored.items()}
        fields.pop("alarm_counts", None)  # until 0.2: findings are now a function of metrics.jsonl
        # Checkpoints from before there was `best` have the accuracy alone.
        if (accuracy := fields.pop("best_accuracy", None)) is not None:
            fields["best"] = {"eval/accuracy": accuracy}
        return cls(**fields)


class Saver:
    """Saves checkpoints of one run; holds the last saved step and its time.

    identity: what a resumed run must agree on; config: the digest of the resolved config; keep: checkpoints to keep
    beside the best; keep_sample_steps: steps whose sample files are kept (None: all); every: when to save.
    """

    def __init__(
        self,
        run: RunDir,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        critic: tuple[nn.Module, torch.optim.Optimizer] | None,
        *,
        identity: Mapping[str, Any],
        config: str,
        keep: int,
        keep_sample_steps: int | None,
        every: Every,
        last_step: int,
    ) -> None:
        self._run, self._trained, self._critic = run, (policy, optimizer), critic
        self._identity, self._config = identity, config
        self._keep, self._keep_sample_steps, self._every = keep, keep_sample_steps, every
        self.last_step, self._last_time = last_step, time.monotonic()

    def is_due(self, step: int) -> bool:
        return self._every.is_due(step, time.monotonic() - self._last_time)

    def save(self, state: State, pending: Snapshot, curriculum: dict[str, Any] | None = None) -> None:
        """Publish a checkpoint of this state, then delete those that are no longer needed."""
        state.submission, state.resubmit = pending.submission, list(pending.resubmit)
        stored = {**replace(state, curriculum=curriculum).to_json(), "identity": self._identity}
        groups = pack_groups(pending.groups) if pending.groups else None
        folder = self._run.checkpoints
        self._run.lock.check()
        checkpoint.save(folder, state.step, *self._trained, stored, self._config, self._critic, groups)
        # After the new checkpoint is published: a failed save never reduces the number of valid checkpoints.
        checkpoint.prune(folder, state.step, self._keep, state.best_step)
        # Only here: samples that are deleted before a checkpoint could be missing after a resume.
        if self._keep_sample_steps is not None:
            self._run.delete_samples(state.step - self._keep_sample_steps)
        self.last_step, self._last_time = state.step, time.monotonic()


def resume(
    run: RunDir,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic: tuple[nn.Module, torch.optim.Optimizer] | None,
    *,
    identity: Mapping[str, Any],
    say: Callable[[str], None],
    allowed: bool = True,
    changed_settings: Callable[[Path], list[str]],
) -> State | None:
    """The state of the newest valid checkpoint, after loading its weights and moments; None in a new directory.

    identity: what must be equal to the checkpoint's; changed_settings: given the run's config.yaml, the settings that
    differ from this run's, as `key: before → after`.
    """
    # A run that ended before its first checkpoint has metrics only, and still counts as used.
    found = checkpoint.steps(run.checkpoints)
    used = bool(found) or (run.path / "metrics.jsonl").exists()
    if used and not allowed:
        raise ConfigError(
            f"{run.path} already holds a run; set recover.mode=auto to resume it, trial_name to start another run, "
            "or remove the folder"
        )
    if not found:
        if used:
            say(f"{run.path} has no checkpoint (the run ended before its first one): starting again from step 0")
        # Also deletes the rows and samples of step 0, because training starts again there.
        run.cut_back(-1)
        return None
    for folder, manifest in checkpoint.latest(run.checkpoints):
        if isinstance(manifest, CheckpointError):
            say(f"ignored: {manifest}")
            continue
        # Before the load: a changed setting gives a clearer message than tensors that do not match.
        _refuse_other_settings(run, changed_settings)
        stored = checkpoint.load_checkpoint(folder, policy, optimizer, critic)
        # The identity is stored beside the fields of State, which does not have it.
        theirs = {"products": "torch", **stored.pop("identity")}  # checkpoints of 0.1 have no products
        before, now = theirs.pop("ranks", 1), identity.get("ranks", 1)
        # Threads decide how sums round, and so do ranks: with other ranks the threads need not be equal either.
        free = ("ranks",) if before == now else ("ranks", "threads")
        if odd := {k: (theirs.get(k), v) for k, v in identity.items() if k not in free and theirs.get(k) != v}:
            raise ConfigError(_other_identity(folder, odd))
        state = State.from_json(stored)
        # The steps after the checkpoint are trained again, so their metrics and samples would appear twice.
        run.cut_back(state.step)
        say(f"resumed from {folder} at step {state.step}")
        if before != now:
            say(f"ranks changed from {before} to {now}: the run continues up to rounding, not bit for bit")
        return state
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {run.checkpoints} is valid; move them away to start again"
    )


def _other_identity(folder: Path, odd: Mapping[str, tuple[Any, Any]]) -> str:
    changes = "; ".join(f"{name}: {before} → {now}" for name, (before, now) in odd.items())
    if odd.keys() == {"products"}:
        before, now = odd["products"]
        remedy = "install the version of gspo that began the run (environment.json)"
        if before == "torch":
            remedy = "set the environment variable GSPO_NATIVE=0"
        elif now == "torch":
            remedy = "install a C compiler (gcc) and unset GSPO_NATIVE"
        return (
            f"{folder} was sampled with other compiled operators ({changes}), which round differently; {remedy} to "
            "resume, or set trial_name to start a new run"
        )
    if odd.keys() == {"objective"}:
        return (
            f"the file that defines the objective (algorithm) has changed since {folder} was written: it is another "
            "objective. Undo the change to resume, or set trial_name to start a new run"
        )
    same = f"threads={odd['threads'][0]} to continue this one, or " if odd.keys() == {"threads"} else ""
    return f"{folder} belongs to another run ({changes}); set {same}trial_name to start a new one"


def _refuse_other_settings(run: RunDir, changed_settings: Callable[[Path], list[str]]) -> None:
    file = run.path / "config.yaml"
    if file.exists() and (changes := changed_settings(file)):
        raise ConfigError(
            f"{run.path} was started with other settings:\n  "
            + "\n  ".join(changes)
            + "\nset trial_name (or pass --new to gspo train) to start another run, or undo the change"
        )
