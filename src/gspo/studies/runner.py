"""Run the jobs of a study: one process per job, several at a time, resumable.

This module does not import torch; only the processes of the jobs do. The records of a finished job are merged into the
study's result file at once, so a kill loses at most the running jobs, and these resume from their checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo.errors import ConfigError
from gspo.studies import plan, results
from gspo.studies.plan import Job, Study
from gspo.system import await_killed, read_json

Progress = Callable[[int, int, str], None]  # (finished jobs, all jobs, name of the job that has just ended)

_GRACE_S = 60.0  # from SIGTERM to SIGKILL: a trainer saves a checkpoint first


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    file: Path
    log: Path


@dataclass(frozen=True)
class Outcome:
    """The result of a call of `run_jobs`."""

    made: int  # new results
    found: int  # results that existed before
    failures: tuple[str, ...]


def run_jobs(
    study: Study, choice: plan.Choice, *, docs: Path, runs: Path, num_parallel: int, progress: Progress
) -> Outcome:
    """Run the jobs that have no result yet.

    Ctrl-C and SIGTERM stop the running jobs, which save, and raise KeyboardInterrupt.
    """
    with _locked(runs / study.name), _terminable():
        wanted = plan.jobs(study, choice)
        outcome = _run(study, wanted, docs, runs, num_parallel, progress)
        if study.tune is not None and not outcome.failures:
            best = results.chosen(study, results.current(study, results.read_records(docs, study)))
            tested = _run(study, plan.tuned_jobs(study, best, choice), docs, runs, num_parallel, progress)
            outcome = Outcome(outcome.made + tested.made, outcome.found + tested.found, tested.failures)
    return outcome


def missing(study: Study, docs: Path, choice: plan.Choice) -> list[Job]:
    """The jobs that have no result yet; without those that follow a tuning."""
    known = results.read_records(docs, study)
    wanted = plan.jobs(study, choice)
    return [job for job in wanted if not results.done(known, job)]


def _run(study: Study, wanted: Sequence[Job], docs: Path, runs: Path, num_parallel: int, progress: Progress) -> Outcome:
    known = results.read_records(docs, study)
    queue = [job for job in wanted if not results.done(known, job)]
    num_missing, found = len(queue), len(wanted) - len(queue)
    ended, failures = found, []
    progress(ended, len(wanted), "")
    running: list[_Running] = []
    try:
        while queue or running:
            while queue and len(running) < num_parallel:
                running.append(_start(study, queue.pop(0), runs, num_parallel))
            time.sleep(0.2)  # wait: 0.2 s, the stall timeout of each job
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                ended += 1
                if why := _collect(study, one, docs):
                    failures.append(why)
                name = " ".join(filter(None, (study.name, one.job.stage, one.job.arm, f"seed {one.job.seed}")))
                progress(ended, len(wanted), f"{name}{': FAILED' if why else ''}")
    finally:
        _stop(running)
    return Outcome(num_missing - len(failures), found, tuple(failures))


def _start(study: Study, job: Job, runs: Path, num_parallel: int) -> _Running:
    arm = re.sub(r"[^A-Za-z0-9.=-]+", "_", job.arm) or "all"
    # The digest is part of the name, so that a run with another config is never resumed.
    folder = (runs / study.name / f"{arm}-{job.stage}-{job.digest}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"job_seed{job.seed}.json"
    given = {"job": asdict(job), "folder": str(folder), "jobs": num_parallel, "command": _command()}
    file.write_text(json.dumps(given), encoding="utf-8")
    log = file.with_suffix(".log")
    # One thread per run: there are as many runs as cores, so more threads would only compete. A session of its own, so
    # that Ctrl-C reaches the run once, through this process.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TERM": "dumb"}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo.studies.worker", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    return _Running(job, process, file, log)


def _collect(study: Study, one: _Running, docs: Path) -> str | None:
    """Merge the records of a finished job into the result file; returns an error message if there are none."""
    result = one.file.with_suffix(".result")
    if one.process.returncode != 0 or not result.exists():
        tail = "\n".join(one.log.read_text(errors="replace").strip().splitlines()[-6:])
        return f"{study.name} {one.job.arm} seed {one.job.seed}: exit code {one.process.returncode}, {one.log}:\n{tail}"
    fresh = read_json(result, ConfigError, kind=list)
    results.write_records(docs, study, results.replaced(results.read_records(docs, study), fresh))
    one.file.unlink(missing_ok=True)
    result.unlink(missing_ok=True)
    return None


def _stop(running: Sequence[_Running]) -> None:
    """Send SIGTERM, wait, then kill; only the processes that were started here."""
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for one in running:
        try:
            one.process.wait(max(deadline - time.monotonic(), 0.1))  # wait: 60 s, then SIGKILL, the study
        except subprocess.TimeoutExpired:
            one.process.kill()
            await_killed(one.process)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C: jobs have sessions of their own, and no signal to our group reaches them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise ConfigError(f"{folder} is in use by another `gspo study run`; wait until it ends") from cause
        yield


def _command() -> str:
    return shlex.join(["gspo", *sys.argv[1:]])
