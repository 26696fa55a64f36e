"""The user's code of a run: digests of the files that define its rewards, environment and filter, in code.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from gspo.system.files import to_json, write_run_file


def changed_code(run: Path, files: Mapping[str, Path]) -> list[str]:
    """What to say about files that have changed since the run was last started; records the files as they are now.

    files: name of the function → file that defines it. Other files that it imports are not compared.
    """
    record = run / "code.json"
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    now = {name: {"file": str(file), "sha256": code_digest(file)} for name, file in files.items()}
    if now != known:
        with write_run_file(record) as tmp:
            tmp.write_text(to_json(now) + "\n", encoding="utf-8")
    return [
        f"warning: {name} has changed since this run was last started ({now[name]['file']}); it continues with the "
        "new code. Set trial_name to start another run"
        for name in now
        if name in known and known[name].get("sha256") != now[name]["sha256"]
    ]


def code_digest(file: Path | None) -> str | None:
    """The sha256 of a file; None if there is none."""
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
