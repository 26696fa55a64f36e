"""`gspo study`: list, run, show, page. Torch-free; each run is a separate process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gspo.errors import ConfigError
from gspo.studies import page, plan, results, runner
from gspo.studies.plan import Study
from gspo.system import NO_LAB, in_lab


def listing(docs: Path, console: Console) -> None:
    """Every study with its claim and the number of finished runs."""
    _require_catalog()
    view = Table("study", "set", "runs done", "claim", box=None, pad_edge=False)
    for name, study in plan.studies().items():
        wanted = _wanted(study, docs)
        records = results.read_records(docs, name)
        made = sum(results.done(records, job) for job in wanted)
        part = "default" if study.default else "--full"
        view.add_row(name, part, f"{made} of {len(wanted)}", study.claim)
    console.print(view)
    console.print("\ngspo study run NAME … runs what is missing; gspo study show NAME prints the results.")


def _require_catalog() -> None:
    if not plan.studies():
        raise ConfigError(f"the shipped studies: {NO_LAB}. `gspo study run my_study.yaml` runs a study of your own")


def _wanted(study: Study, docs: Path) -> list[plan.Job]:
    wanted = plan.jobs(study)
    if study.tune is None:
        return wanted
    best = results.chosen(study, results.current(study, results.read_records(docs, study.name)))
    return [*wanted, *plan.tuned_jobs(study, best)]


def run_studies(
    names: Sequence[str], choice: plan.Choice, *, docs: Path, runs: Path, num_parallel: int, console: Console
) -> int:
    """Run what is missing, study by study, and write the page of each; returns the exit code."""
    if not names:
        _require_catalog()
    known = plan.studies()
    chosen = [plan.find_study(name) for name in names] or [s for s in known.values() if choice.full or s.default]
    if choice.only is not None and len(names) != 1:
        raise ConfigError("--only needs one study: gspo study run NAME --only ARM")
    failures: list[str] = []
    for study in chosen:
        missing = runner.missing(study, docs, choice)
        console.print(_forecast(study, len(missing), docs, runs, num_parallel), soft_wrap=True)
        try:
            with _Bar(study.name) as bar:
                outcome = runner.run_jobs(study, choice, docs=docs, runs=runs, num_parallel=num_parallel, progress=bar)
        finally:
            _write_page(study, docs)  # also after Ctrl-C: finished runs are kept
        failures += outcome.failures
        console.print(f"{study.name}: {outcome.made} new runs, {outcome.found} found, {len(outcome.failures)} failed")
    show([study.reference for study in chosen], docs, console)
    for why in failures:
        print(f"gspo: {why}", file=sys.stderr)
    return 1 if failures else 0


def _forecast(study: Study, num_missing: int, docs: Path, runs: Path, num_parallel: int) -> str:
    """How long a study will take here, and where it writes."""
    at_least = "at least " if study.tune is not None else ""  # the chosen point is run afterwards
    head = (
        f"{study.name}: {at_least}{num_missing} {'run' if num_missing == 1 else 'runs'} to do, {num_parallel} at a time"
    )
    if num_missing and study.run_s is not None:
        at_once = min(num_parallel, num_missing, len(os.sched_getaffinity(0)))
        minutes = num_missing * study.run_s / at_once / 60
        head += f", about {minutes:.0f} minutes" if minutes >= 1.5 else ", about a minute"
        head += f" ({study.run_s:g} s of a core each where it was measured)"
    elif num_missing:
        head += ", time unknown (the study has no run_s)"
    file = results.results_file(docs, study.name)
    at = docs / "baselines.md" if study.is_shipped else file.with_suffix(".md")
    places = f"Results: {file} and {at}. Runs: {runs / study.name}"
    return f"{head}. {places}. Ctrl-C saves; the same command resumes."


def _write_page(study: Study, docs: Path) -> None:
    """The page of a study of the user; the pages of all shipped studies."""
    if study.is_shipped:
        in_lab("lab.studies.pages:write_pages")(docs, [study.name])
    else:
        page.write_page(study, docs)


def generate_page(docs: Path) -> Path:
    """Generate docs/baselines.md and docs/when_to_use.md from the result files."""
    return in_lab("lab.studies.pages:write_pages")(docs)


def show(names: Sequence[str], docs: Path, console: Console) -> None:
    """The tables of these studies; without a name, the summary of all studies."""
    if not names:
        found = {
            name: results.current(study, results.read_records(docs, name)) for name, study in plan.studies().items()
        }
        _print(console, in_lab("lab.studies.pages:summary_table")(found))
        return
    for name in names:
        study = plan.find_study(name)
        records = results.current(study, results.read_records(docs, study.name))
        console.print(f"\n{study.name}: {study.claim}", style="bold")
        if not records:
            console.print(f"not run yet: gspo study run {name}")
            continue
        if study.checks:
            _print(console, page.decision_rows(study, records))
        for task, rows in page.tables(study, records).items():
            console.print(f"\n{task}" if task else "")
            _print(console, rows)


def _print(console: Console, rows: Sequence[Sequence[str]]) -> None:
    head, *body = rows
    view = Table(*head, box=None, pad_edge=False)
    for row in body:
        view.add_row(*(text.replace("**", "") for text in row))
    console.print(view)


class _Bar:
    """A progress bar on a terminal, a line per finished job elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._bar = name, None

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None)
        return self

    def __call__(self, done: int, total: int, label: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=label or self._name)
        elif label:
            print(f"[{done}/{total}] {label}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
