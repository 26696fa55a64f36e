"""Result files, one record per run, small enough to commit: docs/results/studies/NAME.json, or NAME.json. Torch-free.

A record has the measured values, the command, config, machine, date and commit (`sessions` and `configs` of the file
hold values that many records share). A record whose digest differs from that of today's catalog is of another
experiment and is not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import log2
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.studies import plan
from gspo.studies.plan import Job, Study
from gspo.system import atomic_write, read_json

Record = dict[str, Any]

TIMED = ("step_s", "seconds_to_80")
# Times of a run are neither shown nor compared if it got less than this share of its core, or if the load of the
# machine was higher than that of the study's own runs.
_SHARE, _EXTRA_LOAD = 0.8, 0.5


def results_file(docs: Path, study: Study) -> Path:
    return (docs / "results" / "studies" if study.is_shipped else docs) / f"{study.name}.json"


def read_records(docs: Path, study: Study) -> list[Record]:
    """The records of a study, complete with session and config."""
    path = results_file(docs, study)
    if not path.exists():
        return []
    held = read_json(path, ConfigError)
    today = {digest: plan.digest_today(study, config, digest) for digest, config in held["configs"].items()}
    return [
        {
            **record,
            **held["sessions"][record["session"]],
            "config": held["configs"][record["digest"]],
            "digest": today[record["digest"]],
        }
        for record in held["records"]
    ]


def write_records(docs: Path, study: Study, records: Iterable[Record]) -> None:
    """One record per line, sorted, so that a new run is one new line in a diff; shared values are written once."""
    sessions: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    lines = []
    for record in sorted(records, key=lambda r: (r["stage"], r["arm"], r["seed"])):
        session = {name: record[name] for name in _SHARED}
        name = hashlib.sha256(json.dumps(session, sort_keys=True).encode()).hexdigest()[:8]
        sessions[name], configs[record["digest"]] = session, record["config"]
        own = {key: value for key, value in record.items() if key not in (*_SHARED, "config", "session")}
        lines.append(_line(own | {"session": name}))
    parts = [
        f'"study": {_line(study.name)}',
        f'"claim": {_line(study.claim)}',
        *(
            f'"{title}": {{\n' + ",\n".join(f"{_line(key)}: {_line(held[key])}" for key in sorted(held)) + "\n}"
            for title, held in (("sessions", sessions), ("configs", configs))
        ),
        '"records": [\n' + ",\n".join(lines) + "\n]",
    ]
    path = results_file(docs, study)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as tmp:
        tmp.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


_SHARED = ("command", "date", "commit", "machine", "versions")


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def replaced(records: Sequence[Record], fresh: Sequence[Record]) -> list[Record]:
    """The records, with those of the same arm, seed and stage replaced by fresh ones."""
    new = {(r["stage"], r["arm"], r["seed"]) for r in fresh}
    return [r for r in records if (r["stage"], r["arm"], r["seed"]) not in new] + list(fresh)


def done(records: Sequence[Record], job: Job) -> bool:
    """Whether the result of a job exists; a job of a computed study covers all arms of its seed."""
    found = (r for r in records if r["stage"] == job.stage and r["seed"] == job.seed and r["digest"] == job.digest)
    return any(not job.arm or r["arm"] == job.arm for r in found)


def current(study: Study, records: Sequence[Record]) -> list[Record]:
    """The records that belong to today's version of the study."""
    wanted = {job.key for job in plan.jobs(study, plan.Choice(full=True))}
    if study.tune is not None:
        tuned = [r for r in records if (r["stage"], r["arm"], r["seed"], r["digest"]) in wanted]
        wanted |= {job.key for job in plan.tuned_jobs(study, chosen(study, tuned), plan.Choice(full=True))}
    if study.compute:
        seeds = {(seed, digest) for _, _, seed, digest in wanted}
        return [r for r in records if (r["seed"], r["digest"]) in seeds]
    found = [r for r in records if (r["stage"], r["arm"], r["seed"], r["digest"]) in wanted]
    return [*found, *_edges(study, found)] if study.edge else found


def _edges(study: Study, records: Sequence[Record]) -> list[Record]:
    """Per arm and seed, log₂ of the largest value of `study.edge` up to which no run collapsed.

    If the run with the smallest value collapsed, it is the value one step of the grid below.
    """
    assert study.edge is not None
    grid = sorted(float(overrides[study.edge]) for overrides in study.tasks.values())
    out = []
    for arm in study.arms:
        named = {f"{arm} @ {task}": float(study.tasks[task][study.edge]) for task in study.tasks}
        mine = [r for r in records if r["arm"] in named]
        for seed in sorted({r["seed"] for r in mine}):
            runs = {named[r["arm"]]: r for r in mine if r["seed"] == seed}
            if len(runs) < len(grid):
                continue
            survived = len(list(takewhile(lambda value, runs=runs: not runs[value]["measures"]["collapsed"], grid)))
            value = grid[survived - 1] if survived else grid[0] ** 2 / grid[1]
            first = runs[grid[0]]
            shared = {name: first[name] for name in (*_SHARED, "took", "seed", "stage")}
            out.append({**shared, "arm": arm, "failed": None, "config": {}, "measures": {"edge": log2(value)}})
    return out


def chosen(study: Study, records: Sequence[Record]) -> dict[str, Mapping[str, Any]]:
    """The best point of the grid for each arm for which all points have equally many runs."""
    assert study.tune is not None
    best: dict[str, Mapping[str, Any]] = {}
    for arm in study.arm_names():
        scores: list[tuple[float, Mapping[str, Any]]] = []
        counts = set()
        for point, overrides in study.tune.points():
            found = [
                r["measures"][study.tune.by] or 0.0
                for r in records
                if r["stage"] == "tune" and r["arm"] == f"{arm} {point}" and r["seed"] in study.tune.seeds
            ]
            counts.add(len(found))
            if found:
                scores.append((sum(found) / len(found), overrides))
        if len(counts) == 1 and scores:
            best[arm] = max(scores, key=lambda pair: pair[0])[1]
    return best


def by_seed(records: Sequence[Record], arm: str, measure: str) -> dict[int, float]:
    """A measure of one arm, by seed, without missing values and without times from a busy machine."""
    mine = (r for r in records if r["arm"] == arm and r["stage"] == "test")
    found = {r["seed"]: r["measures"].get(measure) for r in mine if measure not in TIMED or not is_busy(r)}
    return {seed: value for seed, value in found.items() if value is not None}


def is_busy(record: Record) -> bool:
    """Whether other programs ran at the same time, so that the measured times are not reliable."""
    took = record["took"]
    return took["cpu_s"] < _SHARE * took["wall_s"] or took["load"] > took["jobs"] + _EXTRA_LOAD
