"""Run our trainer and TRL's on equal work, alternately, each in its own process, and compare time and memory.

A round is one process of each side, and ours runs once more at the end, so that each process of TRL is between two of
ours. Medians are compared, so load of other programs affects both alike.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gspo.errors import GspoError
from lab.bench.workloads import Workload, write_workload_model

Say = Callable[[str], None]
_WORKLOAD_S = 7200.0  # limit for one workload
DEFAULT_DEVICE_BATCH = 8  # TRL's per_device_train_batch_size


def has_peer() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))


def compare_with_trl(workload: Workload, *, peer: bool, say: Say) -> dict[str, Any]:
    """Medians of each side and their ratios; on the smallest workload also TRL with its default device batch."""
    with tempfile.TemporaryDirectory() as folder:
        write_workload_model(workload, Path(folder))
        ours, theirs, default = [], [], []
        for number in range(workload.rounds):
            label = f"{workload.name}, round {number + 1} of {workload.rounds}"
            ours.append(run_side("ours", workload, folder))
            say(f"{label}: ours {ours[-1]['step_s']:.2f} s/step")
            if peer:
                theirs.append(run_side("peer", workload, folder))
                say(f"{label}: TRL {theirs[-1]['step_s']:.2f} s/step")
        if peer:
            ours.append(run_side("ours", workload, folder))
            say(f"{workload.name}, once more: ours {ours[-1]['step_s']:.2f} s/step")
        if peer and workload.name == "tiny":
            default.append(run_side("peer", workload, folder, [str(DEFAULT_DEVICE_BATCH)]))
            say(f"{workload.name}: TRL with its default device batch {default[-1]['step_s']:.2f} s/step")
        # Recording a timeline slows a step down, so the timeline comes from a separate run.
        profiled = run_side("ours", replace(workload, steps=3), folder, ["profile=true"])["breakdown"]
    result: dict[str, Any] = {"workload": _shape(workload), "ours": _medians(ours), "breakdown": profiled}
    if theirs:
        result["trl"] = _medians(theirs)
        result["ratio"] = result["trl"]["step_s"] / result["ours"]["step_s"]
        result["cpu_ratio"] = result["trl"]["cpu_s"] / result["ours"]["cpu_s"]
        result["memory_ratio"] = result["ours"]["peak_bytes"] / result["trl"]["peak_bytes"]
    if default:
        result["trl_default"] = _medians(default)
        result["ratio_default"] = result["trl_default"]["step_s"] / result["ours"]["step_s"]
    return result


def sweep(*, peer: bool, say: Say) -> list[dict[str, Any]]:
    """Seconds per step of the tiny model, one size varied at a time: ours, ours without shared prefixes, TRL."""
    from lab.bench.workloads import TINY

    # A small batch, so that the longest point takes seconds. Sizes that are not varied: 64 prompt tokens, G 8, 32 new.
    base = Workload("sweep", TINY, 8, 8, 64, 32, steps=4)
    axes = {"prompt_tokens": (16, 64, 256, 768), "num_samples": (2, 8, 16, 32), "new_tokens": (8, 32, 96, 192)}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        write_workload_model(base, Path(folder))
        for axis, values in axes.items():
            arms: dict[str, list[float]] = {"ours": [], "ours, prefix not shared": []} | ({"TRL": []} if peer else {})
            for value in values:
                w = Workload(**{**asdict(base), axis: value})
                arms["ours"].append(run_side("ours", w, folder)["step_s"])
                plain = run_side("ours", w, folder, ["actor.share_prefix=false"])["step_s"]
                arms["ours, prefix not shared"].append(plain)
                if peer:
                    arms["TRL"].append(run_side("peer", w, folder)["step_s"])
                say(f"sweep, {axis} = {value}: " + ", ".join(f"{arm} {y[-1]:.2f} s" for arm, y in arms.items()))
            lines.append(
                {
                    "axis": axis,
                    "values": list(values),
                    "seconds": arms,
                    "slope": {arm: slope(values, seconds) for arm, seconds in arms.items()},
                }
            )
    return lines


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of y over x.

    >>> slope([1, 2, 3], [5, 7, 9])
    2.0
    """
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def machine() -> dict[str, Any]:
    """The machine of the measurement, and its date."""
    from datetime import UTC, datetime

    from gspo.system import num_cores, versions_and_hardware

    threads = num_cores()
    known = versions_and_hardware("cpu", threads)
    known["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    with contextlib.suppress(PackageNotFoundError):
        known["packages"]["trl"] = version("trl")
    return known


def run_side(side: str, workload: Workload, folder: str, extra: Sequence[str] = ()) -> dict[str, Any]:
    command = [sys.executable, "-m", f"lab.bench.{side}", json.dumps(asdict(workload)), folder, *extra]
    try:
        # wait: 7200 s, gspo bench
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WORKLOAD_S)
    except subprocess.TimeoutExpired:
        raise GspoError(f"bench: {side} of workload {workload.name} did not end within {_WORKLOAD_S:g} s") from None
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise GspoError(f"bench: {side} of workload {workload.name} ended with exit code {done.returncode}:\n{tail}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    medians: dict[str, Any] = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return medians | {"rounds_s": [r["step_s"] for r in rounds]}


def _shape(w: Workload) -> dict[str, Any]:
    return {name: value for name, value in asdict(w).items() if name != "model"}
