"""The table of docs/conformance.md: `python -m lab.conformance.page [--git NAME=GIT_DIRECTORY …] [--cache FOLDER]`.

Packages come from PyPI without their dependencies, into the cache; what is on GitHub only comes from git directories.
A row that cannot be tested now stays as it was recorded in docs/results/conformance.json, with its version and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.conformance import Implementation, Package, check_all, load, show, targets
from lab.conformance import more_targets, ours

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/conformance.json", ROOT / "docs/conformance.md"
BEGIN, END = "<!-- Table written by `python -m lab.conformance.page`. -->", "<!-- End of the table. -->"
PYPI = ("trl", "verl", "areal", "openrlhf", "liger", "ms-swift", "unsloth-zoo")
GITHUB = {
    "slime": ("THUDM/slime", "slime"),
    "skyrl": ("NovaSky-AI/SkyRL", "skyrl"),
    "nemo-rl": ("NVIDIA-NeMo/RL", "nemo_rl"),
}
OTHERS = {name: (load_target, name) for name, load_target in more_targets.TARGETS.items()}
LOADERS = {**targets.TARGETS, **OTHERS}


def downloaded(name: str, cache: Path) -> Path:
    """The newest wheel of a package, unpacked."""
    _, distribution = LOADERS[name]
    place = cache / name
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), distribution]
    subprocess.run(command, check=True, timeout=300)  # wait: 300 s
    wheel = max(place.glob("*.whl"), key=lambda file: file.stat().st_mtime)
    folder = place / wheel.stem
    if not folder.is_dir():
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def exported(name: str, git: str, cache: Path) -> tuple[Path, str, str]:
    """(folder, commit, its date) of the files of a git directory."""
    top = GITHUB[name][1]
    head = subprocess.check_output(["git", "-C", git, "log", "-1", "--format=%H %cs"], text=True, timeout=60).split()
    folder = cache / name / head[0]
    if not folder.is_dir():
        folder.mkdir(parents=True)
        archive = subprocess.check_output(["git", "-C", git, "archive", "--format=zip", "HEAD", top], timeout=120)
        (folder.with_suffix(".zip")).write_bytes(archive)
        zipfile.ZipFile(folder.with_suffix(".zip")).extractall(folder)
    return folder, head[0], head[1]


def row(found: Mapping[str, Any], version: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What is recorded of one implementation: a word for each case (`show.as_json` gives `found`)."""
    cells = {case["case"]: cell(case) for case in found["cases"]}
    metric = next(case["clip_fraction"] for case in found["cases"] if case["case"] == "clean") or "–"
    about = {"name": found["name"], "version": version, "date": str(datetime.date.today()), "notes": list(notes)}
    return {**about, "clip_fraction": metric, "cells": cells}


def cell(case: Mapping[str, Any]) -> str:
    """`=`, `–`, the answer to an open case, or in bold what differs where the paper decides."""
    if case["status"] in ("agrees", "not offered"):
        return "=" if case["status"] == "agrees" else "–"
    word = case["answer"] if case["answer"] not in ("", "other", "not finite") else ""
    if not word:
        is_nan = case["answer"] == "not finite" or "NaN" in " ".join(case["details"])
        word = "not finite" if is_nan else "other"
    return f"**{word}**" if case["status"] in ("differs", "failed") else word


def checked(implementation: Implementation, version: str = "") -> dict[str, Any]:
    found = show.as_json(implementation, check_all(implementation))
    return row(found, version or implementation.version, implementation.notes)


def tested(git: Mapping[str, str], cache: Path) -> Iterator[dict[str, Any]]:
    """A row for everything that can be had here."""
    plain = targets.target("gspo")
    yield checked(plain)
    yield checked(ours.compiled())
    yield row(ours.on_two_ranks(), plain.version)
    for name in PYPI:
        yield checked(LOADERS[name][0](Package(LOADERS[name][1], downloaded(name, cache))))
    for name, place in git.items():
        folder, commit, date = exported(name, place, cache)
        version = f"{GITHUB[name][0]} {commit[:8]} ({date})"
        yield checked(LOADERS[name][0](Package(name, folder)), version)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cases × implementations, as Markdown, and below it how each one was loaded."""
    lines = [f"| case | {' | '.join(r['name'] for r in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for case in load():
        mark = "" if case.decided else " (open)"
        lines.append(f"| {case.name}{mark} | {' | '.join(r['cells'].get(case.name, '') for r in rows)} |")
    lines += [f"| clip fraction counts (open) | {' | '.join(r['clip_fraction'] for r in rows)} |", ""]
    for r in rows:
        notes = "".join(f"; {note}" for note in r["notes"])
        lines.append(f"- **{r['name']}** {r['version']}, tested {r['date']}{notes}")
    return lines


def written(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([before + BEGIN, "", *table(rows), "", END]) + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--git", action="append", default=[], metavar="NAME=GIT_DIRECTORY", help=", ".join(GITHUB))
    parser.add_argument("--cache", type=Path, default=ROOT / "build/conformance", help="for downloaded packages")
    args = parser.parse_args()
    git = dict(pair.split("=", 1) for pair in args.git)
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    known = {r["name"]: r for r in rows}
    for r in tested(git, args.cache):
        known[r["name"]] = r
        print(r["name"], r["version"], flush=True)
    lines = ",\n".join(json.dumps(r, ensure_ascii=False) for r in known.values())
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), list(known.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
