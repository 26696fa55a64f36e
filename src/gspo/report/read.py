"""Reading a run directory: metrics, config, checkpoints; also while the run writes. See docs/run-directory.md."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.stats import wilson
from gspo.system import objects_of, read_regular, read_yaml

Row = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, from its folder; only `gspo checkpoints --verify` reads its files.

    >>> Checkpoint(Path("runs/a/b/checkpoints/step_000060"), 60, 4_000_000, 1.7e9, True).step
    60
    """

    path: Path
    step: int
    bytes: int
    written: float  # seconds since 1970
    best: bool  # best held-out score of the run


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: a model folder has config.json, a run has config.yaml."""
    return (path / "config.yaml").is_file()


def open_run(path: str | Path) -> Path:
    """The folder, if it is a run directory; else a ConfigError that lists runs nearby."""
    path = Path(path)
    if is_run(path):
        return path
    nearby = runs_below(path)
    hint = f"; runs nearby: {', '.join(nearby[:4])}" if nearby else ""
    what = "has no config.yaml" if path.is_dir() else "does not exist"
    place = "<cluster.fileroot>/<experiment_name>/<trial_name>"
    raise ConfigError(f"{path} is not a run directory: it {what}{hint}. A run directory is {place}")


def runs_below(folder: Path) -> list[str]:
    """Run directories in a folder and in its folders: <experiment_name>/<trial_name> below a file root."""
    found = [file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml")]
    return sorted(str(run) for run in found if not is_run(run.parent))  # a run's own folder launch/ has a config, too


def read_metrics(run: Path) -> list[Row]:
    """The rows of metrics.jsonl by step, without a last line that is still being written."""
    file = run / "metrics.jsonl"
    try:
        # Bytes, because the last line may end inside a UTF-8 character.
        content = read_regular(file)
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise ConfigError(f"{file} cannot be read: {cause.strerror}") from cause
    return [row for row in objects_of(content) if isinstance(row.get("step"), int)]


def read_config(run: Path) -> Row:
    """config.yaml as plain values."""
    return read_yaml(run / "config.yaml", ConfigError)


def is_graded(rows: Iterable[Row]) -> bool:
    """Whether held-out rewards other than 0 and 1 were seen: then the reward is the score of the run, not accuracy."""
    return any(isinstance(share := row.get("eval/graded"), int | float) and share > 0 for row in rows)


def evaluations(rows: Iterable[Row], graded: bool) -> list[Row]:
    """The rows that have the held-out score."""
    name = "eval/reward" if graded else "eval/accuracy"
    return [row for row in rows if isinstance(row.get(name), int | float)]


def score_interval(row: Row, graded: bool, prefix: str = "eval/") -> tuple[float, float, float]:
    """Held-out score of a row with one, and the ends of its 95 % interval: reward if `graded`, else accuracy.

    Accuracy with one sample per problem is a share of n trials: Wilson's interval. Several samples of one problem are
    not independent: the interval is the one that the row has. `prefix`: `eval/<source>/` for a source of a mixture.

    >>> [round(x, 3) for x in score_interval({"eval/accuracy": 1.0, "eval/k": 1, "eval/problems": 512}, False)]
    [1.0, 0.993, 1.0]
    >>> score_interval({"eval/reward": -0.5, "eval/reward_ci": 0.25}, True)
    (-0.5, -0.75, -0.25)
    """
    if graded:
        reward, half = row[f"{prefix}reward"], row.get(f"{prefix}reward_ci") or 0.0
        return reward, reward - half, reward + half
    share, n = row[f"{prefix}accuracy"], row.get(f"{prefix}problems") or 0
    if row.get(f"{prefix}k") != 1 or not n:
        half = row.get(f"{prefix}accuracy_ci") or 0.0
        return share, max(share - half, 0.0), min(share + half, 1.0)
    return share, *wilson(share, n)


def score_text(score: float, graded: bool) -> str:
    """A held-out score as text.

    >>> score_text(0.25, False), score_text(0.25, True)
    ('25.0%', '0.250')
    """
    return f"{score:.3f}" if graded else f"{score:.1%}"


def sources_of(rows: Iterable[Row]) -> list[str]:
    """The sources of a mixture that were evaluated, from `eval/<source>/problems`."""
    names = dict.fromkeys(name for row in rows for name in row)
    head, tail = "eval/", "/problems"
    return [name[len(head) : -len(tail)] for name in names if name.startswith(head) and name.endswith(tail)]


def has_sequence_ratio(run: Path) -> bool:
    """Whether the objective has one ratio per sequence (GSPO), not one per token; True if unknown."""
    with contextlib.suppress(ConfigError):
        return is_by_sequence(read_config(run))
    return True


def is_by_sequence(config: Row) -> bool:
    """`has_sequence_ratio` of a config that is already read."""
    actor = config.get("actor")
    return not isinstance(actor, dict) or actor.get("importance_sampling_level") != "token"


def best_step(run: Path) -> int | None:
    """The step with the best held-out score; 0 is the model before training."""
    return best_of(read_metrics(run))


def best_of(rows: Sequence[Row]) -> int | None:
    """`best_step` of rows that are already read: the trainer's choice, which every evaluation records."""
    chosen = [row["eval/best_step"] for row in rows if isinstance(row.get("eval/best_step"), int)]
    if chosen:
        return chosen[-1]
    # Runs from before `eval/best_step`: the earliest step of the highest accuracy.
    seen = [(row["eval/accuracy"], -row["step"]) for row in evaluations(rows, False)]
    return -max(seen)[1] if seen else None


def status_of(run: Path, steps: int, config: Row) -> str:
    """running, finished, stopped (by a signal; it can be resumed) or failed (ended without a word)."""
    if _is_locked(run):
        return "running"
    tail = ""
    with contextlib.suppress(OSError), open(run / "log.txt", "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        tail = file.read().decode("utf-8", "replace").rstrip("\n").rpartition("\n")[2]
    # Runs from before the message "finished" have as many steps as were planned.
    planned = config.get("total_train_steps")
    if " finished after step" in tail or (isinstance(planned, int) and 0 < planned <= steps):
        return "finished"
    return "stopped" if " stopped after step" in tail else "failed"


def _is_locked(run: Path) -> bool:
    """Whether a trainer holds the lock of a run. /proc/locks is read: a lock of our own could refuse a trainer."""
    try:
        if not os.path.exists("/proc/locks"):  # macOS: a shared lock, which is released at once
            with open(run / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        inodes = {str(run.stat().st_ino), str((run / ".lock").stat().st_ino)}
        # A line is `3: FLOCK ADVISORY WRITE 812 08:01:1312 0 EOF`, with the inode after the device.
        fields = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any("FLOCK" in words and words[-3].rpartition(":")[2] in inodes for words in fields if len(words) > 3)
    except OSError as error:
        return isinstance(error, BlockingIOError)


def read_checkpoints(run: Path) -> list[Checkpoint]:
    """Published checkpoints, oldest first."""
    best = best_step(run)
    found = []
    for folder in (run / "checkpoints").glob("step_*"):
        number = folder.name.removeprefix("step_")
        # The trainer may delete an old checkpoint while we read.
        with contextlib.suppress(FileNotFoundError):
            if number.isdecimal() and folder.is_dir():
                size = sum(file.stat().st_size for file in folder.iterdir())
                found.append(Checkpoint(folder, int(number), size, folder.stat().st_mtime, int(number) == best))
    return sorted(found, key=lambda c: c.step)


def choose_step(run: Path, which: str) -> int:
    """The step that `best`, `last` or a number means; 0 is the model before training. Else ConfigError."""
    steps = [c.step for c in read_checkpoints(run)]
    best = best_step(run)
    if which == "best" and best is not None:
        which = str(best)
    elif which in ("best", "last"):  # without an evaluation there is no best step
        which = str(steps[-1]) if steps else "none"
    if which.isdecimal() and (int(which) == 0 or int(which) in steps):
        return int(which)
    there = f"available: {', '.join(map(str, steps))}" if steps else "it has no checkpoint yet"
    raise ConfigError(f"{run} has no checkpoint of step {which}; {there}. --step takes best, last or a number")
