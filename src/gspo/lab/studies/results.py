"""Result files: docs/results/studies/NAME.json, one record per run, small enough to commit. Torch-free.

A record says what was measured, by which command and config, on which machine, when, at which commit (`sessions` and
`configs` of the file hold what many records share). A record whose digest is not that of today's catalog belongs to
another experiment and is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.lab.studies import plan
from gspo.lab.studies.plan import Job, Study

Record = dict[str, Any]

TIMED = ("step_s", "seconds_to_80")
# A run that got less than this share of its core, or shared the machine with more than the study's own runs, was not
# alone: its seconds are neither shown nor compared.
_SHARE, _EXTRA_LOAD = 0.8, 0.5


def file_of(docs: Path, study: str) -> Path:
    return docs / "results" / "studies" / f"{study}.json"


def read(docs: Path, study: str) -> list[Record]:
    """The records of a study, each with all that is known of it."""
    path = file_of(docs, study)
    if not path.exists():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    return [
        {**record, **held["sessions"][record["session"]], "config": held["configs"][record["digest"]]}
        for record in held["records"]
    ]


def write(docs: Path, study: Study, records: Iterable[Record]) -> None:
    """One record a line, sorted, so that a new run is a new line in a diff; what many share stands once."""
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
    path = file_of(docs, study.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
    os.replace(aside, path)


_SHARED = ("command", "date", "commit", "machine", "versions")


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def replaced(records: Sequence[Record], fresh: Sequence[Record]) -> list[Record]:
    """The records with fresh ones in place of those of the same arm, seed and stage."""
    new = {(r["stage"], r["arm"], r["seed"]) for r in fresh}
    return [r for r in records if (r["stage"], r["arm"], r["seed"]) not in new] + list(fresh)


def done(records: Sequence[Record], job: Job) -> bool:
    """Whether a job's result is there; one of a computed study stands for all arms of its seed."""
    found = (r for r in records if r["stage"] == job.stage and r["seed"] == job.seed and r["digest"] == job.digest)
    return any(not job.arm or r["arm"] == job.arm for r in found)


def current(study: Study, records: Sequence[Record]) -> list[Record]:
    """The records that belong to the study as the catalog has it today."""
    wanted = {job.key for job in plan.jobs(study, full=True)}
    if study.tune is not None:
        tuned = [r for r in records if (r["stage"], r["arm"], r["seed"], r["digest"]) in wanted]
        wanted |= {job.key for job in plan.tuned_jobs(study, chosen(study, tuned), full=True)}
    if study.compute:
        seeds = {(seed, digest) for _, _, seed, digest in wanted}
        return [r for r in records if (r["seed"], r["digest"]) in seeds]
    return [r for r in records if (r["stage"], r["arm"], r["seed"], r["digest"]) in wanted]


def chosen(study: Study, records: Sequence[Record]) -> dict[str, Mapping[str, Any]]:
    """Each arm's best point of the grid, once every point has been tried equally often."""
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
    """A measure of one arm, by seed; left out are runs that did not get there, and seconds of a busy machine."""
    mine = (r for r in records if r["arm"] == arm and r["stage"] == "test")
    found = {r["seed"]: r["measures"].get(measure) for r in mine if measure not in TIMED or not is_busy(r)}
    return {seed: value for seed, value in found.items() if value is not None}


def is_busy(record: Record) -> bool:
    """Whether other work ran beside a record's run, so that its seconds say little."""
    took = record["took"]
    return took["cpu_s"] < _SHARE * took["wall_s"] or took["load"] > took["jobs"] + _EXTRA_LOAD
