"""What a config will do, as one tree of plain values: the content of `gspo doctor`, for people and as JSON.

Each section is a function from the facts of a config to a dict of words and numbers; `render.py` only lays them out.
Torch-free, except for the memory of a model that must be counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gspo import lint
from gspo.lint.facts import Finding, facts_of
from gspo.lint.unused import ineffective
from gspo.config.loaded import Loaded
from gspo.doctor.explain.batch import batch_section
from gspo.doctor.explain.data import data_section
from gspo.doctor.explain.memory import memory_section
from gspo.doctor.explain.objective import objective_section
from gspo.doctor.explain.policies import policy_section
from gspo.doctor.shapes import ModelFields, find_source


@dataclass(frozen=True)
class Report:
    """`sections` is what `report_json` writes, findings included; the findings decide the exit code."""

    sections: dict[str, Any]
    findings: tuple[Finding, ...]
    strict: bool

    @property
    def exit_code(self) -> int:
        """2: the config contradicts itself; 1: this machine cannot run it; 0: neither."""
        if any(f.severity == "error" or self.strict for f in self.findings):
            return 2
        return int(any(check["state"] == "failed" for check in self.sections["machine"] or ()))

    def with_machine(self, checks: Sequence[Any]) -> Report:
        """The report with the checks of this machine (`doctor.ready.examine`)."""
        return replace(self, sections={**self.sections, "machine": [asdict(check) for check in checks]})


def explain(loaded: Loaded, *, num_gpus: int | None = None, with_memory: bool = True) -> Report:
    """Everything that `gspo doctor` shows. The memory section may import torch to count the model's parameters."""
    source = find_source(loaded.config.actor.path)
    facts = facts_of(loaded, num_gpus)
    context = source.context if isinstance(source, ModelFields) else None
    findings = lint.lint(loaded, facts.num_gpus, context)
    config = facts.config
    sections = {
        "config": None if loaded.path is None else str(loaded.path),
        "run_directory": f"{config.cluster.fileroot}/{config.experiment_name}/{config.trial_name}",
        "objective": objective_section(facts),
        "data": data_section(facts),
        "batch": batch_section(facts),
        "policies": policy_section(facts),
        **({"memory": memory_section(facts, source)} if with_memory else {}),
        "messages": list(loaded.messages),
        "warnings": [asdict(finding) for finding in findings if finding.severity == "warning"],
        "errors": [asdict(finding) for finding in findings if finding.severity == "error"],
        "without_effect": [
            {"key": key, "where": facts.where(key), "why": why} for key, why in ineffective(loaded, facts.num_gpus)
        ],
        "strict": config.strict,
        "machine": None,  # not looked at
    }
    return Report(sections, tuple(findings), config.strict)


def report_json(report: Report) -> str:
    # ASCII only: no text of a config can act on a terminal.
    return json.dumps({**report.sections, "exit_code": report.exit_code}, indent=2, ensure_ascii=True, allow_nan=False)
