"""`gspo audit`: explain a run of TRL, verl or ms-swift from the files that it left."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo.cli.reports import open_page, write_report_of


def audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="output folders or files of one run; of verl also the Hydra folder and the file logger's jsonl",
    )
    parser.add_argument("--out", metavar="DIR", help="run directory to write (default: runs/audit/NAME of the path)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def audit(args: argparse.Namespace) -> int:
    from gspo.audit.disk import audit_files as read_and_write
    from gspo.system.text import inert

    paths = [Path(path) for path in args.paths]
    run = Path(args.out) if args.out else Path("runs/audit") / paths[0].absolute().name
    found = read_and_write(paths, run)
    print("\n".join(inert(line) for line in _lines(found)))
    page = write_report_of(run)
    print(inert(f"\n{page}"))
    if args.open:
        open_page(page.absolute().as_uri())
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The audit as text: the objective, findings, and what cannot be known."""
    doctor = found["doctor"]
    yield f"{found['system']} {found['version']}".rstrip()
    if "objective" in doctor:
        objective, batch = doctor["objective"], doctor["batch"]
        yield f"  {objective['formula']}"
        yield from (f"  {line}" for line in objective["words"])
        yield (
            f"  batch: {batch['prompts']} prompts × {batch['group_size']} samples = {batch['sequences']} sequences, "
            f"{batch['minibatches'] * batch['epochs']} updates"
        )
    else:
        yield f"  {doctor['unreadable']}"
    for finding in (*doctor.get("errors", ()), *doctor.get("warnings", ())):
        yield f"{finding['severity']}: {finding['key']} ({finding['where']}): {finding['message']}."
        yield f"  Remedy: {finding['remedy']}."
    yield from (f"note: {line}" for line in found["notes"])
    yield from (f"not known: {line}" for line in found["unknown"])
