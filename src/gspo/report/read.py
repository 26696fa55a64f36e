"""Reading a run directory: metrics, config, checkpoints; also while the run writes. See docs/run-directory.md."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import ConfigError
from gspo.stats import wilson

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
    best: bool  # highest held-out accuracy of the run


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: a model folder has config.json, a run has config.yaml."""
    return (path / "config.yaml").is_file()


def open_run(path: str | Path) -> Path:
    """The folder, if it is a run directory; else a ConfigError that lists runs nearby."""
    path = Path(path)
    if is_run(path):
        return path
    nearby = sorted(str(file.parent) for depth in ("*", "*/*") for file in path.glob(f"{depth}/config.yaml"))
    hint = f"; runs nearby: {', '.join(nearby[:4])}" if nearby else ""
    what = "has no config.yaml" if path.is_dir() else "does not exist"
    place = "<cluster.fileroot>/<experiment_name>/<trial_name>"
    raise ConfigError(f"{path} is not a run directory: it {what}{hint}. A run directory is {place}")


def read_metrics(run: Path) -> list[Row]:
    """The rows of metrics.jsonl by step, without a last line that is still being written."""
    rows: list[Row] = []
    with contextlib.suppress(FileNotFoundError):
        # Bytes, because the last line may end inside a UTF-8 character.
        for line in (run / "metrics.jsonl").read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    return rows


def read_config(run: Path) -> Row:
    """config.yaml as plain values."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as cause:
        raise ConfigError(f"{run / 'config.yaml'} cannot be read: {cause}") from cause
    return config if isinstance(config, dict) else {}


def accuracy_interval(row: Row) -> tuple[float, float, float]:
    """Held-out accuracy of a row with one, and the ends of its 95 % interval.

    With one sample per problem it is a share of n trials: Wilson's interval. Several samples of one problem are not
    independent: the interval is the one that the row has.

    >>> [round(x, 3) for x in accuracy_interval({"eval/accuracy": 1.0, "eval/k": 1, "eval/problems": 512})]
    [1.0, 0.993, 1.0]
    """
    share, n = row["eval/accuracy"], row.get("eval/problems") or 0
    if row.get("eval/k") != 1 or not n:
        half = row.get("eval/accuracy_ci") or 0.0
        return share, max(share - half, 0.0), min(share + half, 1.0)
    return share, *wilson(share, n)


def by_sequence(run: Path) -> bool:
    """Whether the objective has one ratio per sequence (GSPO), not one per token; True if unknown."""
    with contextlib.suppress(ConfigError):
        return is_by_sequence(read_config(run))
    return True


def is_by_sequence(config: Row) -> bool:
    """`by_sequence` of a config that is already read."""
    actor = config.get("actor")
    return not isinstance(actor, dict) or actor.get("importance_sampling_level") != "token"


def best_step(run: Path) -> int | None:
    """The step of the highest held-out accuracy, the earliest of equals; 0 is the model before training."""
    return best_of(read_metrics(run))


def best_of(rows: Sequence[Row]) -> int | None:
    """`best_step` of rows that are already read."""
    seen = [(row["eval/accuracy"], row["step"]) for row in rows if row.get("eval/accuracy") is not None]
    # −step: of equal accuracies the earliest step is chosen, as the trainer does.
    return max(seen, key=lambda pair: (pair[0], -pair[1]))[1] if seen else None


def read_checkpoints(run: Path) -> list[Checkpoint]:
    """Published checkpoints, oldest first."""
    best = best_step(run)
    found = []
    for folder in (run / "checkpoints").glob("step_*"):
        number = folder.name.removeprefix("step_")
        # The trainer may delete an old checkpoint while we read.
        with contextlib.suppress(FileNotFoundError):
            if number.isdigit() and folder.is_dir():
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
    if which.isdigit() and (int(which) == 0 or int(which) in steps):
        return int(which)
    there = f"available: {', '.join(map(str, steps))}" if steps else "it has no checkpoint yet"
    raise ConfigError(f"{run} has no checkpoint of step {which}; {there}. --step takes best, last or a number")
