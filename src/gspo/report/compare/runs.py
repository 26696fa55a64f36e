"""The runs of a comparison: which run directories are meant, their curves, and the figures of one run."""

from __future__ import annotations

import contextlib
import glob
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import ConfigError
from gspo.report.read import Row, evaluations, is_run, open_run, score_interval
from gspo.report.summary import ENDS
from gspo.stats import Floats
from gspo.system.files import read_regular

GOAL = 0.8  # held-out accuracy; the table says how many samples a run needed to reach it


@dataclass(frozen=True)
class ComparedRun:
    """One run directory: its config as dotted keys, its rows by step."""

    path: Path
    config: Mapping[str, Any]
    rows: Mapping[int, Row]
    graded: bool = False  # the held-out score is the reward; False: the accuracy

    @property
    def score(self) -> str:
        """The metric of the held-out score."""
        return "eval/reward" if self.graded else "eval/accuracy"

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def steps(self) -> int:
        return max(self.rows, default=0)

    @property
    def planned(self) -> int | None:
        total = self.config.get("total_train_steps")
        return total if isinstance(total, int) else None

    def curve(self, metric: str) -> tuple[Floats, Floats]:
        """Steps and values of a metric, where it was measured; clip/sequences is clipped low plus clipped high."""
        seen = [(step, metric_value(row, metric)) for step, row in self.rows.items()]
        kept = [(step, value) for step, value in seen if value is not None]
        steps, values = zip(*kept, strict=True) if kept else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def figures(self) -> dict[str, float | None]:
        """The row of numbers that the outcome table is made of; None where nothing was measured."""
        at, score = self.curve(self.score)
        best = int(np.flatnonzero(score == score.max())[-1]) if len(score) else None
        # Without evaluation: runs with other evaluation frequencies stay comparable.
        seconds = [
            value - (metric_value(row, "time/eval_s") or 0.0)
            for row in self.rows.values()
            if (value := metric_value(row, "time/step_s")) is not None
        ]
        return {
            "score_start": _first(score),
            "score_end": _first(score[::-1]),
            "score_best": None if best is None else float(score[best]),
            "best_step": None if best is None else float(at[best]),
            "samples_to_goal": self.samples_to(GOAL),
            "reward_end": _mean(self.curve("reward/mean")[1][-ENDS:]),
            "clipped_low": _mean(self.curve("clip/sequences_low")[1]),
            "clipped_high": _mean(self.curve("clip/sequences_high")[1]),
            "entropy_end": _mean(self.curve("policy/entropy")[1][-ENDS:]),
            "length_end": _mean(self.curve("length/mean")[1][-ENDS:]),
            "seconds": float(np.median(seconds)) if seconds else None,  # the median ignores pauses of the machine
        }

    def samples_to(self, accuracy: float) -> float | None:
        """Samples drawn until an evaluation first reached this accuracy, including resampled groups."""
        at, seen = self.curve("eval/accuracy")
        reached = at[seen >= accuracy]
        # Runs of earlier versions have the first key, which had priority.
        prompts = self.config.get("rollout.consumer_batch_size") or self.config.get("train_dataset.batch_size")
        group = self.config.get("gconfig.n_samples")
        if not len(reached) or not isinstance(prompts, int) or not isinstance(group, int):
            return None
        step = int(reached[0])
        refilled = sum(metric_value(row, "reward/refilled_groups") or 0 for at, row in self.rows.items() if at <= step)
        return float((step * prompts + refilled) * group)

    def score_at(self, step: int) -> float | None:
        """Score at the last evaluation up to `step`."""
        at, seen = self.curve(self.score)
        return _first(seen[at <= step][::-1])

    def score_ends(self) -> tuple[float, float] | None:
        """95 % interval of the last evaluation, over problems."""
        rows = evaluations(self.rows.values(), self.graded)
        return score_interval(rows[-1], self.graded)[1:] if rows else None


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories, each once: a run, the runs up to three levels below a folder, or what a pattern matches."""
    found: dict[Path, Path] = {}
    for given in map(str, paths):
        matches = [Path(given)]
        if glob.has_magic(given) and not Path(given).exists():
            matches = [Path(match) for match in sorted(glob.glob(given)) if Path(match).is_dir()]
            matches.sort(key=started)
            if not matches:
                raise ConfigError(f"no folder matches {given}")
        below = [run for match in matches for run in ([match] if is_run(match) else _below(match))]
        if not below:
            open_run(matches[0])  # raises: its message says what is missing
        for run in below:
            # By resolved path: a run that several arguments name appears once.
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    levels = ("*", "*/*", "*/*/*")
    found = {file.parent for level in levels for file in folder.glob(f"{level}/config.yaml")}
    # A folder inside a run is part of that run. Oldest first, so that new runs are compared with the older one.
    return sorted((run for run in found if not found & set(run.parents)), key=lambda run: (started(run), run))


def started(run: Path) -> float:
    """When a run was first started, in seconds: the time of the first line of log.txt, which a resume keeps."""
    with contextlib.suppress(OSError, ValueError):
        return time.mktime(time.strptime(read_regular(run / "log.txt")[:19].decode(), "%Y-%m-%d %H:%M:%S"))
    with contextlib.suppress(OSError):
        return (run / "config.yaml").stat().st_mtime
    return 0.0


def metric_value(row: Row, metric: str) -> float | None:
    """A finite number, or None."""
    if metric == "clip/sequences":
        low, high = metric_value(row, "clip/sequences_low"), metric_value(row, "clip/sequences_high")
        return None if low is None or high is None else low + high
    value = row.get(metric)
    with contextlib.suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _first(values: Floats) -> float | None:
    return float(values[0]) if len(values) else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
