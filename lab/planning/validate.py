"""Predicted against measured seconds per step on this machine: `python -m lab.planning.validate`.

The machine is described as two devices: the trainer on core 0, all sampler servers on core 1, one thread each. Costs
come from a calibration (`calibrate.py`): a sampler alone and beside another process, and two short synchronous runs, in
one process and with one server. All other runs are predicted from these costs, then measured. Results are kept in
docs/results/planning.json after each run, and a second call measures only what is missing; the table is written into
docs/planning.md. Needs an idle machine with two cores and Linux (`taskset`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gspo.errors import GspoError
from gspo.sampling import registered
from lab.bench.workloads import Workload, write_workload_model
from lab.planning.calibrate import costs_of, predict, slowdown_of
from lab.planning.command import lengths_of_run
from lab.planning.simulation import Work, recorded_lengths
from lab.planning.trial import MODELS, NUM_STEPS

GOAL = 0.15
SERVERS, ETAS = (0, 1, 2), (0, 1, 2, 3, 4)
CALIBRATION = ((0, 0), (1, 0))  # (servers, η) of the runs that are measured first
_RUN_S = 1800.0
BEGIN, END = "<!-- validation: `python -m lab.planning.validate` -->", "<!-- end of validation -->"


def validate_model(w: Workload, known: dict[str, Any], etas: Sequence[int], save: Any) -> None:
    """Fill `known` with the calibration and the cells of one model; `save()` after each measurement."""
    with tempfile.TemporaryDirectory(prefix="gspo-plan-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_workload_model(w, folder)
        runs = known.setdefault("runs", {})
        if "sampler" not in known:
            [alone] = _samplers(folder, (1,))
            known["sampler"] = {**alone, "slowdown": slowdown_of(alone, _samplers(folder, (0, 1)))}
            save(f"{w.name}: a sampler alone, slowdown beside another {known['sampler']['slowdown']:.2f}")
        cells = [(servers, eta) for servers in SERVERS for eta in etas]
        for servers, eta in [*CALIBRATION, *(cell for cell in cells if cell not in CALIBRATION)]:
            name = f"{servers}/{eta}"
            if name not in runs:
                runs[name] = measure(w, folder, Path(scratch) / "runs", servers, eta)
                save(f"{w.name}: {servers} servers, η = {eta}: {runs[name]['step_s']:.2f} s/step")


def predictions(w: Workload, known: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted seconds per step and staleness of each measured cell, by the calibration alone."""
    runs = known["runs"]
    inline, served = (runs[f"{servers}/{eta}"] for servers, eta in CALIBRATION)
    work = Work(w.num_prompts, w.num_samples, w.prompt_tokens, recorded_lengths(inline["lengths"]), num_steps=40)
    found = {**known["sampler"], **costs_of(known["sampler"], inline, served, work)}
    out = {}
    for name in runs:
        servers, eta = map(int, name.split("/"))
        result = predict(found, replace(work, max_staleness=eta, num_steps=40 + 2 * eta), num_servers=servers)
        out[name] = {"step_s": result.step_s, "staleness": result.staleness, "limit": result.limit}
    return out


def measure(w: Workload, folder: Path, root: Path, num_servers: int, eta: int) -> dict[str, Any]:
    """Train, and read the metrics of the steps in which the pipeline was full."""
    num_steps = 1 + NUM_STEPS + 2 * eta
    words = [json.dumps(asdict(w)), str(folder), str(root), *map(str, (num_servers, eta, num_steps))]
    command = ["taskset", "-c", "0", sys.executable, "-m", "lab.planning.trial", *words]
    run = root / "gspo" / f"servers{num_servers}_eta{eta}"
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        ended = threading.Event()
        mover = threading.Thread(target=_move_servers, args=(run / "samplers", num_servers, ended), daemon=True)
        mover.start()
        try:
            code = process.wait(_RUN_S)  # wait: 1800 s, lab.planning.validate
        except subprocess.TimeoutExpired:
            process.terminate()
            raise GspoError(f"{' '.join(command[3:6])} … did not end within {_RUN_S:g} s") from None
        finally:
            ended.set()
            mover.join(5.0)
        if code:
            log.seek(0)
            raise GspoError(f"a measured run ended with exit code {code}:\n{log.read()[-2000:]}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0][eta + 1 : num_steps - eta]
    lengths = lengths_of_run(run)

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key) or 0.0 for row in rows)

    found = {
        "step_s": mean("time/step_s"),
        "rollout_s": mean("time/rollout_s"),
        "sync_s": mean("time/sync_s"),
        "staleness": mean("staleness/token_mean"),
        "steps_s": [round(row["time/step_s"], 4) for row in rows],
        "tokens": sum(lengths) / num_steps,
    }
    return {**found, "lengths": lengths} if (num_servers, eta) == CALIBRATION[0] else found


def _move_servers(folder: Path, num_servers: int, ended: threading.Event) -> None:
    """Pin each server to core 1 when it has registered; it was started on the trainer's core."""
    moved: set[int] = set()
    while len(moved) < num_servers and not ended.wait(0.2):  # wait: 0.2 s, the end of the run
        for index in range(num_servers):
            found = registered(folder, index) if index not in moved else None
            if found is None:
                continue
            for task in Path(f"/proc/{found.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {1})
            moved.add(index)


def _samplers(folder: Path, cores: Sequence[int]) -> list[dict[str, Any]]:
    """The measurement of a sampler, at the same time on each of these cores."""
    words = [sys.executable, "-m", "lab.planning.calibrate", str(folder)]
    started = [
        subprocess.Popen(["taskset", "-c", str(core), *words], stdout=subprocess.PIPE, text=True) for core in cores
    ]
    out = []
    for process in started:
        said, _ = process.communicate(timeout=_RUN_S)  # wait: 1800 s, lab.planning.validate
        if process.returncode:
            raise GspoError(f"the calibration of a sampler ended with exit code {process.returncode}")
        out.append(json.loads(said.strip().splitlines()[-1]))
    return out


def validation_table(results: Mapping[str, Any]) -> list[str]:
    """The comparison as Markdown."""
    lines = ["| model | processes | η | measured, s/step | predicted | error | staleness, measured / predicted | |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    errors = []
    for name, known in results["models"].items():
        predicted = predictions(MODELS[name], known)
        for cell, found in sorted(known["runs"].items()):
            servers, eta = map(int, cell.split("/"))
            one = predicted[cell]
            error = one["step_s"] / found["step_s"] - 1
            is_known = (servers, eta) in CALIBRATION
            if not is_known:
                errors.append(abs(error))
            processes = f"{servers} server{'s' if servers > 1 else ''}" if servers else "one process"
            lines.append(
                f"| {name} | {processes} | {eta} | {found['step_s']:.2f} | {one['step_s']:.2f} | {error:+.0%} | "
                f"{found['staleness']:.2f} / {one['staleness']:.2f} | {'calibration' if is_known else ''} |"
            )
    if not errors:
        return [*lines, "", "No run was predicted yet."]
    within = sum(error <= GOAL for error in errors)
    return [
        *lines,
        "",
        f"{results['date']}, {results['processor']}, trainer on core 0, servers on core 1, one thread each. Of "
        f"{len(errors)} runs that the calibration did not use, {within} are within {GOAL:.0%}; the median error is "
        f"{statistics.median(errors):.0%}, the largest {max(errors):.0%}.",
    ]


def write_section(page: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Replace what stands between two comments of a page."""
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise GspoError(f"{page} has no lines {begin} and {end}")
    page.write_text("\n".join([head + begin, "", *lines, "", end + tail]), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    from lab.bench.compare import machine

    parser = argparse.ArgumentParser(
        prog="python -m lab.planning.validate", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR", help="folder of planning.md")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="default: all; may be repeated")
    parser.add_argument("--eta", action="append", type=int, choices=ETAS, help="default: 0 to 4; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in results/planning.json")
    parser.add_argument("--table", action="store_true", help="measure nothing; write the table from the results")
    args = parser.parse_args(argv)
    file = args.docs / "results" / "planning.json"
    results = json.loads(file.read_text()) if file.exists() and not args.fresh else {}
    results.setdefault("models", {})
    if not args.table:
        about = machine()
        results |= {"date": about["date"], "processor": about["processor"]}
        if len(os.sched_getaffinity(0)) < 2:
            print("validate: needs two cores, one for the trainer and one for the servers", file=sys.stderr)
            return 2

    def save(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")

    for name in [] if args.table else args.model or list(MODELS):
        validate_model(MODELS[name], results["models"].setdefault(name, {}), args.eta or ETAS, save)
    lines = validation_table(results)
    write_section(args.docs / "planning.md", BEGIN, END, lines)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
