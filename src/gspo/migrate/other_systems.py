"""The keys of TRL and verl, for error messages and docs/migrating.md.

These keys are not translated: TRL and verl count batches, steps and epochs differently, so a translated config could
load and mean something else. Such a key is an error that names the key of gspo. (AReaL's keys mean the same as ours
and are translated: areal.py.) The tables are trl.yaml and verl.yaml.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo.system import parse_yaml


@dataclass(frozen=True)
class ForeignKey:
    """One key of another system.

    >>> find("num_generations").ours
    'gconfig.n_samples'
    """

    system: Literal["TRL", "verl"]
    key: str
    fate: Literal["mapped", "needless", "unsupported"]
    ours: str
    note: str

    def complaint(self, written: str) -> str:
        """For a config that uses it."""
        if self.fate == "mapped":
            note = f" ({self.note})" if self.note else ""
            return f"{written} is {self.system}'s name; here it is {self.ours}{note}"
        fate = "is not needed here" if self.fate == "needless" else "is not supported here"
        return f"{written} is a key of {self.system} and {fate}: {self.note}; remove it"


@functools.cache
def foreign_keys() -> Mapping[tuple[str, str], ForeignKey]:
    """Every known key by (system, key), in the order of the documentation."""
    files: tuple[tuple[Literal["TRL", "verl"], str], ...] = (("TRL", "trl.yaml"), ("verl", "verl.yaml"))
    rows = (row for system, name in files for row in _rows(system, Path(__file__).with_name(name)))
    return types.MappingProxyType({(row.system, row.key): row for row in rows})


def _rows(system: Literal["TRL", "verl"], file: Path) -> Iterable[ForeignKey]:
    for tables in parse_yaml(file.read_text(encoding="utf-8")).values():
        for fate, rows in tables.items():
            for keys, *about in rows:
                ours = about.pop(0) if fate == "mapped" else ""
                yield from (ForeignKey(system, key, fate, ours, *(about or [""])) for key in keys.split())


def find(name: str) -> ForeignKey | None:
    """The row of a key of TRL or verl. A key of TRL is also found inside a section of gspo.

    >>> find("actor_rollout_ref.rollout.multi_turn.enable").fate, find("actor.num_generations").ours
    ('unsupported', 'gconfig.n_samples')
    """
    known = foreign_keys()
    if ("verl", name) in known:
        return known["verl", name]
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        below = known.get(("verl", ".".join(parts[:depth]) + ".*"))
        if below is not None:
            return below
    for (system, key), row in known.items():  # keys such as log_prob_*
        if system == "verl" and key.endswith("_*") and name.startswith(key[:-1]):
            return row
    return known.get(("TRL", parts[-1]))


@functools.cache
def _sections() -> frozenset[str]:
    found: set[str] = set()
    for system, key in foreign_keys():
        parts = key.split(".") if system == "verl" else []
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return frozenset(found)


def is_section(name: str) -> bool:
    """Whether verl has a section of this name.

    >>> is_section("actor_rollout_ref.actor"), is_section("actor")
    (True, False)
    """
    return name in _sections()
