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
from gspo.system import NO_LAB, in_lab, num_cores


def listing(names: Sequence[str], given: Path | None, console: Console) -> None:
    """These studies, or all shipped ones, with their claims and numbers of finished runs."""
    if not names:
        _require_catalog()
    view = Table("study", "set", "runs done", "claim", box=None, pad_edge=False)
    for study in map(plan.find_study, names or plan.studies()):
        docs = folder_of(study, given)
        wanted = _wanted(study, docs)
        records = results.read_records(docs, study)
        made = sum(results.done(records, job) for job in wanted)
        part = "default" if study.default else "--full"
        view.add_row(study.name, part if study.is_shipped else "own", f"{made} of {len(wanted)}", study.claim)
    console.print(view)
    console.print("\ngspo study run NAME … runs what is missing; gspo study show NAME prints the results.")


def _require_catalog() -> None:
    if not plan.studies():
        raise ConfigError(f"the shipped studies: {NO_LAB}. `gspo study run my_study.yaml` runs a study of your own")


def folder_of(study: Study, given: Path | None) -> Path:
    """The folder of results and page: as given, else docs/ for the shipped studies, and the folder of a study file."""
    return given or (Path("docs") if study.is_shipped else study.path.parent)


def _wanted(study: Study, docs: Path) -> list[plan.Job]:
    wanted = plan.jobs(study)
    if study.tune is None:
        return wanted
    best = results.chosen(study, results.current(study, results.read_records(docs, study)))
    return [*wanted, *plan.tuned_jobs(study, best)]


def run_studies(
    names: Sequence[str], choice: plan.Choice, *, docs: Path | None, runs: Path, num_parallel: int, console: Console
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
        place = folder_of(study, docs)
        missing = runner.missing(study, place, choice)
        console.print(_forecast(study, len(missing), place, runs, num_parallel), soft_wrap=True)
        for note in () if study.is_shipped else plan.dropped(study):
            console.print(note, soft_wrap=True)
        try:
            with _Bar(study.name) as bar:
                outcome = runner.run_jobs(study, choice, docs=place, runs=runs, num_parallel=num_parallel, progress=bar)
        finally:
            _write_page(study, place)  # also after Ctrl-C: finished runs are kept
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
        at_once = min(num_parallel, num_missing, num_cores())
        minutes = num_missing * study.run_s / at_once / 60
        head += f", about {minutes:.0f} minutes" if minutes >= 1.5 else ", about a minute"
        head += f" ({study.run_s:g} s of a core each where it was measured)"
    elif num_missing:
        head += ", time unknown (the study has no run_s)"
    file = results.results_file(docs, study)
    at = f"{docs / 'baselines.md'}" if study.is_shipped else f"{file.with_suffix('.md')}, with a .png"
    places = f"Results: {file} and {at}. Runs: {runs / study.name}"
    return f"{head}. {places}. Ctrl-C saves; the same command resumes."


def _write_page(study: Study, docs: Path) -> Path:
    """The page of a study of the user; the pages of all shipped studies."""
    if study.is_shipped:
        return in_lab("lab.studies.pages:write_pages")(docs, [study.name])
    return page.write_page(study, docs)


def generate_pages(names: Sequence[str], docs: Path | None) -> list[Path]:
    """The page of each of these studies; without a name, docs/baselines.md and docs/when_to_use.md."""
    if not names:
        return [in_lab("lab.studies.pages:write_pages")(docs or Path("docs"))]
    return [_write_page(study, folder_of(study, docs)) for study in map(plan.find_study, names)]


def show(names: Sequence[str], docs: Path | None, console: Console) -> None:
    """The tables of these studies; without a name, the summary of all studies."""
    if not names:
        _print(
            console, in_lab("lab.studies.pages:summary_table")(in_lab("lab.studies.pages:found")(docs or Path("docs")))
        )
        return
    for name in names:
        study = plan.find_study(name)
        records = results.current(study, results.read_records(folder_of(study, docs), study))
        console.print(f"\n{study.name}: {study.claim}".removesuffix(": "), style="bold")
        if not records:
            console.print(f"not run yet: gspo study run {name}")
            continue
        if study.checks:
            _print(console, page.decision_rows(study, records))
            console.print(page.PAIRED)
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
