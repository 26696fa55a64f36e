"""One job in its own process: `python -m gspo.studies.worker JOB.json` writes the records next to JOB.json.

JOB.json holds a job and the folder of its run. A stopped run resumes from its last checkpoint; a finished run is kept
without its weights. Exit codes: 0 measured, 3 stopped by a signal and resumable; any other code is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo.errors import TrainingError
from gspo.report import read_metrics
from gspo.studies import measure, plan
from gspo.studies.plan import Job, Study
from gspo.system import in_lab, to_json, versions_and_hardware, write_run_file

STOPPED = 3
GRACE_S = 60.0  # from SIGTERM to SIGKILL, as in the runner


def main(job_file: Path) -> int:
    threading.Thread(target=_stop_with_parent, args=(os.getppid(),), daemon=True).start()
    given = json.loads(job_file.read_text(encoding="utf-8"))
    job, folder = Job(**given["job"]), Path(given["folder"])
    study = plan.find_study(job.study)
    began = time.monotonic(), time.process_time()
    found = _computed(study, job, folder) if study.compute else _trained(study, job, folder)
    if found is None:
        return STOPPED
    took = {
        "wall_s": round(time.monotonic() - began[0], 2),
        "cpu_s": round(time.process_time() - began[1], 2),
        "load": round(os.getloadavg()[0], 2),
        "jobs": given["jobs"],
    }
    common = {"seed": job.seed, "stage": job.stage, "digest": job.digest, "took": took, **provenance(given["command"])}
    with write_run_file(job_file.with_suffix(".result")) as tmp:
        tmp.write_text(to_json([{"arm": arm, **common, **rest} for arm, rest in found.items()]), encoding="utf-8")
    return 0


def _stop_with_parent(parent: int) -> None:
    """Stop this process, which saves first, when its parent has ended: no process would read the result."""
    while os.getppid() == parent:
        time.sleep(1.0)  # wait: checked every 1 s, the job
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # wait: GRACE_S, the job
    os.kill(os.getpid(), signal.SIGKILL)  # a step that takes longer is lost; the last checkpoint is kept


def _computed(study: Study, job: Job, folder: Path) -> dict[str, dict[str, Any]]:
    measured = in_lab(f"lab.studies.direct.{study.compute}:measure")
    scratch = folder / "scratch"
    loaded = plan.configured(study, {"cluster.fileroot": str(scratch)}, job.seed)
    by_arm: Mapping[str, Mapping[str, Any]] = measured(loaded, dict(study.settings), job.seed)
    shutil.rmtree(scratch, ignore_errors=True)
    base = plan.set_keys(loaded)
    return {arm: {"measures": dict(values), "config": base, "failed": None} for arm, values in by_arm.items()}


def _trained(study: Study, job: Job, folder: Path) -> dict[str, dict[str, Any]] | None:
    from gspo.train import Trainer, export

    place = {"cluster.fileroot": str(folder.parent), "experiment_name": folder.name, "trial_name": f"seed{job.seed}"}
    run, failed = folder / f"seed{job.seed}", None
    start = {**place, "trial_name": f"first{job.seed}"}
    first = plan.first_stage(study, job.overrides, start, job.seed)
    if first is not None:
        ended = Trainer(first).train(report=False)  # a stage that has ended before is not run again
        if not ended.finished:
            return None
        model = first.config.run_path / "model"
        if not model.is_dir():
            export(first.config, first.config.run_path, ended.steps, model)
        place["actor.path"] = str(model)
    loaded = plan.configured(study, {**job.overrides, **place}, job.seed)
    try:
        if not Trainer(loaded).train(report=False).finished:
            return None
    except TrainingError as error:
        failed = str(error)  # the training failed, which is a result, too
    rows = read_metrics(run)
    config = loaded.config
    shape = {
        "samples_per_group": config.gconfig.n_samples,
        "groups_per_step": config.train_dataset.batch_size,
    }
    record = {
        "measures": measure.measures(rows, **shape, failed=failed is not None),
        "curves": measure.curves(rows, **shape),
        "failed": failed,
        "train": plan.train_command(study, job.overrides, job.seed),
        "config": plan.recorded(study, job.overrides, job.seed),
    }
    for weights in (run / "checkpoints", run / "samples", folder / start["trial_name"]):
        shutil.rmtree(weights, ignore_errors=True)
    return {job.arm: record}


def provenance(command: str) -> dict[str, Any]:
    """The command, date, commit, machine and package versions of a record."""
    known = versions_and_hardware("cpu", 1)
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": (known["commit"] or "")[:12] or None,
        "machine": f"{known['processor']}, {known['cores']} cores, {known['memory_bytes'] / 2**30:.0f} GiB",
        "versions": {"python": known["python"], **known["packages"]},
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
