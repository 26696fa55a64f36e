"""The files that make an audit a run directory: config.yaml and origins.json (our keys), audit.json (docs/audit.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gspo.audit.findings import sections_of
from gspo.audit.foreign import Draft
from gspo.config.loaded import Origin, write_origins
from gspo.system.files import to_json, write_run_file


def write_audit(run: Path, draft: Draft, *, version: str, source: str, unknown: Sequence[str]) -> dict[str, Any]:
    """Write the explanation of a config to a run directory and return it. `unknown`: what cannot be known, and why."""
    audit = {
        "system": draft.system,
        "version": version,
        "source": source,
        "unknown": list(unknown),
        "notes": list(draft.notes),
        "doctor": sections_of(draft),
    }
    head = (
        f"# Keys of {draft.system} in gspo's names, for the report; origins.json has their names. Not for training.\n"
    )
    # config.yaml last: it makes the folder a run directory, and readers then find the other two.
    texts = {
        "audit.json": to_json(audit) + "\n",
        "origins.json": write_origins({key: Origin("file", text) for key, text in draft.origins.items()}),
        "config.yaml": head + yaml.safe_dump(nested(draft.keys), sort_keys=False, allow_unicode=True),
    }
    for name, text in texts.items():
        with write_run_file(run / name) as tmp:
            tmp.write_text(text, encoding="utf-8")
    return audit


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections.

    >>> nested({"algorithm": "gspo", "actor.eps_clip": 0.2, "actor.optimizer.lr": 1e-06})
    {'algorithm': 'gspo', 'actor': {'eps_clip': 0.2, 'optimizer': {'lr': 1e-06}}}
    """
    root: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return root
