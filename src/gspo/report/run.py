"""`Run("runs/quickstart/gspo")`: a run directory for reading in Python. Training never imports it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.errors import ConfigError
from gspo.report.read import (
    Checkpoint,
    Row,
    best_of,
    open_run,
    read_checkpoints,
    read_config,
    read_metrics,
    status_of,
)
from gspo.report.samples import Kind, read_samples, sample_steps
from gspo.report.summary import RunSummary, summarise, summary_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = dict[str, list[Any]]


class Run:
    """A run directory, finished or not. Every call reads the files again, so it follows a run that is training.

    >>> Run("no-such-run")
    Traceback (most recent call last):
      ...
    gspo.errors.ConfigError: no-such-run is not a run directory: it does not exist. A run directory is ...
    """

    def __init__(self, path: str | Path) -> None:
        self.path = open_run(path)

    @property
    def config(self) -> Row:
        """config.yaml as plain values, with every key: `run.config["actor"]["eps_clip"]`."""
        return read_config(self.path)

    @property
    def status(self) -> str:
        """running, finished, stopped (it can be resumed) or failed."""
        return status_of(self.path, self.steps, self.config)

    @property
    def steps(self) -> int:
        """The last step that was trained."""
        return max((row["step"] for row in self.rows()), default=0)

    @property
    def best_step(self) -> int | None:
        """The step with the best held-out score; 0 is the model before training. None without an evaluation."""
        return best_of(self.rows())

    @property
    def summary(self) -> RunSummary:
        """Scores before and after with their 95 % intervals, reward, clipping, entropy, speed."""
        return summarise(self.path)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that exist, oldest first."""
        return read_checkpoints(self.path)

    def rows(self) -> list[Row]:
        """metrics.jsonl, one dict per step. Step 0 is the evaluation before training."""
        return read_metrics(self.path)

    def metrics(self, *names: str) -> Any:
        """Metrics by step: a pandas DataFrame with `step` as its index; without pandas, a dict of columns.

        names       only these metrics (docs/metrics.md lists them all); a name that no step has is a ConfigError
        """
        rows = self.rows()
        known = dict.fromkeys(name for row in rows for name in row if name != "step")
        self._refuse_unknown(names, known)
        return _table([{name: row.get(name) for name in ("step", *(names or known))} for row in rows], index="step")

    def sample_steps(self, *, held_out: bool = False) -> list[int]:
        """The steps whose samples (or held-out answers) are kept."""
        return list(sample_steps(self.path, _kind(held_out)))

    def samples(self, step: int | None = None, *, held_out: bool = False) -> Any:
        """Every sample of a step (default: the last one), or every held-out answer: a DataFrame or a dict of columns.

        The columns are the fields of docs/run-directory.md. Completions are text that a model wrote: do not execute it.
        """
        steps = self.sample_steps(held_out=held_out)
        step = steps[-1] if step is None and steps else step
        if step not in steps:
            what = "held-out answers" if held_out else "samples"
            there = f"available: {', '.join(map(str, steps[-12:]))}" if steps else "rollout.dump_to_file keeps them"
            raise ConfigError(f"{self.path} has no {what} of {'any step' if step is None else f'step {step}'}; {there}")
        rows = read_samples(self.path, step, _kind(held_out))
        names = dict.fromkeys(name for row in rows for name in row)
        return _table([{name: row.get(name) for name in names} for row in rows])

    def plot(self, *names: str) -> Figure:
        """A matplotlib figure: a panel for each metric, or without names the six panels of training.png."""
        from gspo.report.plot import draw_curves, draw_run

        rows = self.rows()
        self._refuse_unknown(names, dict.fromkeys(name for row in rows for name in row))
        figure = draw_curves(rows, names) if names else draw_run(self.path)
        if figure is None:
            raise ConfigError(f"{self.path} has no finished step yet: there is nothing to draw")
        return figure

    def _refuse_unknown(self, names: Sequence[str], known: dict[str, None]) -> None:
        import difflib

        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; docs/metrics.md lists the metrics"
                raise ConfigError(f"{self.path} has no metric {name!r}{hint}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, {self.steps} steps)"

    def _repr_html_(self) -> str:
        """The table that Jupyter shows."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in summary_rows(self.summary)
        )
        return f"<div><b>{html.escape(str(self.path))}</b>, {self.status}<table>{cells}</table></div>"


def _kind(held_out: bool) -> Kind:
    return "evals" if held_out else "samples"


def _table(rows: Sequence[Row], index: str | None = None) -> Any:
    """Rows with equal keys as a pandas DataFrame, or as a dict of columns where pandas is not installed."""
    columns: Columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    try:
        import pandas
    except ImportError:
        return columns
    table = pandas.DataFrame(columns)
    return table.set_index(index) if index in columns else table
