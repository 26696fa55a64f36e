"""`gspo.trl.GSPOTrainer` beside TRL's trainer, on the same script: `gspo bench --workload door`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.bench.compare import Say, _medians, run_side
from lab.bench.peer import TRAINERS
from lab.bench.workloads import DOORS, Workload, write_workload_model

# Training half and whole step (TRL ÷ ours), peak memory (ours ÷ TRL).
GOALS = {"door-prompts": {"training": 3.0}, "door-small": {"training": 2.5, "step with sampler": 3.0, "memory": 0.6}}


def compare_doors(rounds: int | None, say: Say, names: tuple[str, ...] = tuple(DOORS)) -> dict[str, Any]:
    return {name: compare_door(DOORS[name], rounds or DOORS[name].rounds, say) for name in names}


def compare_door(w: Workload, rounds: int, say: Say) -> dict[str, Any]:
    """Medians of each trainer, alternating, each in its own process; ratios of CPU and wall seconds."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory() as folder:
        write_workload_model(w, Path(folder))
        for number in range(rounds):
            for name in TRAINERS:
                found[name].append(run_side("peer", w, folder, ["0", name]))
                one = found[name][-1]
                say(
                    f"{w.name}, round {number + 1} of {rounds}: {name} {one['step_s']:.2f} s/step, CPU "
                    f"{one['cpu_s']:.2f} s, of which training {one['cpu_training_s']:.2f} s, peak "
                    f"{one['peak_bytes'] / 1e9:.2f} GB"
                )
    medians = {name: _medians(each) for name, each in found.items()}
    return medians | {"ratios": ratios(medians)}


def ratios(medians: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """TRL ÷ ours: CPU seconds of the training half, wall and CPU seconds of a step; memory the other way round."""
    trl, ours, sampler = (medians[name] for name in TRAINERS)
    return {
        "training": trl["cpu_training_s"] / ours["cpu_training_s"],
        "step": trl["step_s"] / ours["step_s"],
        "step with sampler": trl["step_s"] / sampler["step_s"],
        "CPU of a step with sampler": trl["cpu_s"] / sampler["cpu_s"],
        "memory": ours["peak_bytes"] / trl["peak_bytes"],
    }


def door_table(results: Mapping[str, Any]) -> list[list[str]]:
    names = list(next(iter(results.values()))["ratios"])
    return [
        ["TRL ÷ gspo.trl", *names],
        *([name, *(_with_goal(name, of, r["ratios"][of]) for of in names)] for name, r in results.items()),
    ]


def _with_goal(workload: str, of: str, value: float) -> str:
    goal = GOALS.get(workload, {}).get(of)
    return f"{value:.2f}" + ("" if goal is None else f" (goal {'≤' if of == 'memory' else '≥'} {goal:g})")
