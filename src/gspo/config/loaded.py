"""What `load` returns: a resolved config, and the origin of every key."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gspo.config.schema import Config
from gspo.config.yaml_tree import COMMAND_LINE


@dataclass(frozen=True)
class Origin:
    """Who decided a key: the user (file or command line), the algorithm, the level, another key, or the schema.

    >>> str(Origin("file", "run.yaml:7")), str(Origin("algorithm", "gspo")), str(Origin("default"))
    ('run.yaml:7', 'algorithm gspo', 'default')
    """

    kind: Literal["file", "command line", "algorithm", "level", "derived", "default"]
    detail: str = ""

    def __str__(self) -> str:
        if self.kind in ("file", "derived"):
            return self.detail
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def by_user(self) -> bool:
        return self.kind in ("file", "command line")


def origin_of(place: str) -> Origin:
    return Origin("command line") if place == COMMAND_LINE else Origin("file", place)


def write_origins(origins: Mapping[str, Origin]) -> str:
    """The text of a run's origins.json: key → {"kind", "detail"}."""
    return json.dumps({key: asdict(origin) for key, origin in origins.items()}, indent=1, ensure_ascii=False) + "\n"


def read_origins(run: Path) -> dict[str, Origin]:
    """The origins that a run wrote; empty where it wrote none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        written = json.loads((run / "origins.json").read_text(encoding="utf-8"))
        return {key: Origin(**origin) for key, origin in written.items()}
    return {}


@dataclass(frozen=True)
class Loaded:
    """A resolved config. `origins` has every key that holds a value, and sections that are null.

    `messages` has one line for each foreign key that was translated or dropped, and for `backend: auto`.
    """

    config: Config
    origins: Mapping[str, Origin]
    messages: list[str]
    path: Path | None = None
    # What `lint.check` found, by the number of GPUs: a config is linted once. A copy by `replace` starts without it.
    findings: dict[int | None, list[Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def origin(self, key: str) -> Origin:
        """Who decided a key; of a section: the user where any of its keys is set."""
        if key in self.origins:
            return self.origins[key]
        inside = [origin for name, origin in self.origins.items() if name.startswith(key + ".")]
        if not inside:
            raise KeyError(key)
        return next((origin for origin in inside if origin.by_user), inside[0])

    def is_set(self, key: str) -> bool:
        """Whether the user set this key, or any key of this section; null where null means "decide for me" is unset."""
        try:
            return self.origin(key).by_user
        except KeyError:
            return False
