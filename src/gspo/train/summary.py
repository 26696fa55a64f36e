"""What `Trainer.train` returns: the result of a run, with its metrics, and its curves in a notebook."""

from __future__ import annotations

import html
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import GspoError
from gspo.monitor.notebook import curve_svgs
from gspo.system.files import read_jsonl

REPORT_S = 600.0  # limit for writing a report

_SHOW = "import sys, pathlib; from gspo.cli.train import show_run; show_run(pathlib.Path(sys.argv[1]), sys.argv[2], {})"
SHOWN = {"reward": "reward/mean", "accuracy": "eval/accuracy", "held_out_reward": "eval/reward"}


@dataclass(frozen=True)
class Summary:
    """The result of a run. `finished` is False if a signal ended it; the same call resumes it."""

    path: Path
    steps: int
    seconds: float
    finished: bool
    rank: int = 0  # the rank of this process

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step: `pandas.DataFrame(summary.rows())`."""
        try:
            return read_jsonl(self.path / "metrics.jsonl")
        except OSError:
            return []

    @property
    def metrics(self) -> dict[str, float]:
        """First and last value of reward, held-out accuracy and held-out reward: `reward_start`, `reward_end`, …"""
        found: dict[str, float] = {}
        rows = self.rows()
        for name, metric in SHOWN.items():
            values = [row[metric] for row in rows if row.get(metric) is not None]
            if values:
                found |= {f"{name}_start": values[0], f"{name}_end": values[-1]}
        return found

    def report(self) -> Path:
        """Write report.html and training.png (needs matplotlib) and print the table, as `gspo train` does."""
        # In a process of its own: report is on a higher floor than training.
        said = "Finished." if self.finished else f"Stopped and saved after step {self.steps}. Train again to resume."
        # -P: a file of the user's folder (types.py, rich.py) does not replace a module.
        command = [sys.executable, "-P", "-c", _SHOW, str(self.path), said]
        try:
            # wait: 600 s, the caller
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REPORT_S)
        except subprocess.TimeoutExpired:
            raise GspoError(f"the report of {self.path} was not written within {REPORT_S:g} s") from None
        if done.returncode:
            raise GspoError(f"the report could not be written: {done.stderr.strip()}")
        print(done.stdout, flush=True)
        return self.path / "report.html"

    def __str__(self) -> str:
        state = "finished" if self.finished else "stopped, can be resumed"
        metrics = self.metrics
        changes = []
        for name in (name for name in SHOWN if f"{name}_start" in metrics):
            # A value that was measured once, or did not change, is not a change.
            ends = dict.fromkeys(f"{metrics[f'{name}_{end}']:.3f}" for end in ("start", "end"))
            changes.append(f"{name.replace('_', ' ')} {' → '.join(ends)}")
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return ", ".join([f"{self.path}: {steps} in {self.seconds:.0f} s, {state}", *changes])

    def _repr_html_(self) -> str:
        """The panel that Jupyter shows."""
        return f"<div>{html.escape(str(self))}<br>{curve_svgs(self.rows())}</div>"
