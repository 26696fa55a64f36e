"""`gspo report`, `watch` and `compare`: the results of runs, as pages and as text."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.cli.common import console, display
from gspo.config import load, read_origins
from gspo.errors import ConfigError, GspoError
from gspo.report import (
    BUDGET,
    compare_view,
    open_run,
    parse_filter,
    read_block,
    sample_steps,
    samples_view,
    training_rows,
    write_page,
    write_report,
)
from gspo.report import compare as compare_runs
from gspo.system import beat, inert, read_json


def write_report_of(run: Path, to: Path | None = None, megabytes: float | None = None) -> Path:
    beat("writing the report")
    return write_report(run, to, doctor=words_of(run), budget=int(1e6 * megabytes) if megabytes else BUDGET)


def words_of(run: Path) -> dict[str, Any]:
    """What `gspo doctor` says about a run's config, with the origins that the run wrote; of an audit, its findings."""
    from gspo.doctor import explain

    with contextlib.suppress(GspoError):
        audit = read_json(run / "audit.json", GspoError)
        return audit["doctor"] if isinstance(audit.get("doctor"), dict) else {}
    try:
        loaded = load(run / "config.yaml")
        origins = read_origins(run)
        loaded = replace(loaded, origins={key: origins.get(key, here) for key, here in loaded.origins.items()})
        return explain(loaded, with_memory=False).sections
    except GspoError as problem:
        return {"unreadable": str(problem)}


def report(args: argparse.Namespace) -> int:
    if args.samples:
        return _samples(args)
    if args.held_out or args.best or args.filter or (args.step, args.num) != (None, None):
        raise ConfigError("--held-out, --step, --num, --best and --filter belong to --samples; add it")
    if args.max_mb is not None and not args.max_mb > 0:
        raise ConfigError("--max-mb must be above 0")
    run = open_run(args.run)
    to = Path(args.out) if args.out else run / "report.html"
    try:
        write_report_of(run, to, args.max_mb)
    except OSError as problem:
        raise ConfigError(f"{to} cannot be written: {problem.strerror}; choose another file with --out") from problem
    print(inert(str(to)))
    if args.open:
        open_page(to.absolute().as_uri())
    return 0


def _samples(args: argparse.Namespace) -> int:
    if args.out or args.open or args.max_mb is not None:
        raise ConfigError("--samples prints and writes no page: leave out --out, --open and --max-mb")
    num = 3 if args.num is None else args.num
    if num < 1:
        raise ConfigError("--num must be at least 1")
    run, kind = open_run(args.run), "evals" if args.held_out else "samples"
    if args.best or args.filter:
        return _write_rows(args, run)
    steps = list(sample_steps(run, kind))
    step = args.step if args.step is not None else steps[-1] if steps else None
    if step is None or step not in steps:
        there = f"available: {', '.join(map(str, steps[-12:]))}" if steps else f"there is no file in {run / kind}"
        hint = "" if steps else " (rollout.dump_to_file keeps them)"
        what = "held-out answers" if args.held_out else "samples"
        raise ConfigError(f"{run} has no {what} of {'any step' if step is None else f'step {step}'}; {there}{hint}")
    console().print(samples_view(read_block(run, step, kind), num, inert))
    return 0


def _write_rows(args: argparse.Namespace, run: Path) -> int:
    """`gspo report RUN --samples --filter … > rows.jsonl`."""
    if args.held_out or args.step is not None:
        raise ConfigError("--best and --filter read all training samples: leave out --held-out and --step")
    num = 0
    for row in training_rows(run, [parse_filter(text) for text in args.filter], best=args.best):
        print(json.dumps(row, ensure_ascii=False))
        num += 1
    if not num:
        raise ConfigError(f"no sample of {run} fulfils the conditions (rollout.dump_to_file keeps samples)")
    print(f"gspo: {num} rows; train_dataset.path: rows.jsonl with algorithm: sft trains on them", file=sys.stderr)
    return 0


def watch(args: argparse.Namespace) -> int:
    from gspo.report import Watch  # imports the server

    path = Path(args.path)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist: pass a run directory, or a folder that contains runs")
    if not 0 <= args.port < 65536:
        raise ConfigError("--port must be between 0 and 65535; 0 means a free port")
    watch = Watch(path, words_of, args.port)
    print(
        f"{watch.address}\n  readable on this machine only, by everyone with this address. Ctrl-C stops it.",
        flush=True,
    )
    if args.open:
        open_page(watch.address)
    with contextlib.suppress(KeyboardInterrupt):
        watch.wait()  # wait: none, it serves until Ctrl-C
    watch.close()
    return 0


def open_page(address: str) -> None:
    if not webbrowser.open(address):
        print("gspo: no browser could be started; open the address above", file=sys.stderr)


def compare(args: argparse.Namespace) -> int:
    found = compare_runs(args.runs, args.metric)
    console().print(compare_view(found, display()["width"], inert))
    if args.out:
        print(inert(f"\nwritten to {write_page(found, Path(args.out))}"))
    return 0
