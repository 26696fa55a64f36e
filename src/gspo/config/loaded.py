"""What `load` returns: a resolved config, and the origin of every key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gspo.config.interpolate import escape
from gspo.config.schema import Config, Section
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


# -- A config as text ------------------------------------------------------------------------------------------


def dump(loaded: Loaded) -> str:
    """The resolved config with every key and the origin of its value; `load` of it gives an equal config."""
    lines = ["# The resolved config: every key, and the origin of its value."]
    lines += _dump_section(loaded.config, "", "", loaded)
    return "\n".join(lines) + "\n"


def _dump_section(section: Any, prefix: str, indent: str, loaded: Loaded) -> Iterable[str]:
    for name, value in section:
        key = prefix + name
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _dump_section(value, key + ".", indent + "  ", loaded)
        else:
            yield f"{indent}{name}: {written(value)}  # {_comment(str(loaded.origins[key]))}"


def _comment(text: str) -> str:
    return re.sub(r"[^\x20-\x7e\xa1-\ufefe]", "?", text)


def written(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str):
        # Quotes are left out only where YAML reads the text as the same string.
        plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS
        return value if plain else _quoted(escape(value))
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(name))}: {written(child)}" for name, child in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _quoted(text: str) -> str:
    """Double quotes keep every text, line breaks and lone surrogates included."""

    def character(c: str) -> str:
        if c in '"\\':
            return "\\" + c
        return c if c.isprintable() else f"\\U{ord(c):08x}"

    return '"' + "".join(map(character, text)) + '"'


_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def config_fingerprint(config: Config) -> str:
    """A fingerprint of every value, whatever file or spelling it came from.

    >>> [config_fingerprint(Config(seed=seed)) == config_fingerprint(Config()) for seed in (1, 2)]
    [True, False]
    """
    return hashlib.sha256(json.dumps(config.model_dump(), sort_keys=True).encode()).hexdigest()
