"""Overrides of the command line: `key=value`, `+key=value`, `++key=value` and `~key`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gspo.config.yaml_tree import COMMAND_LINE, Node, parse, shorten
from gspo.errors import ConfigError

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*)(?P<value>=.*)?", re.DOTALL)
_LIST_ENTRY = re.compile(r"[+~]*(?P<list>[A-Za-z_][\w.-]*?)(\.\d|\[)")


@dataclass(frozen=True)
class Override:
    """`key=value`, or the reset of a key where `node` is None.

    >>> parse_override("+actor.importance_sampling_level=sequence").key
    'actor.importance_sampling_level'
    """

    key: str
    node: Node | None
    text: str


def parse_override(text: str) -> Override:
    """Read `key=value`, `+key=value`, `++key=value` or `~key`; the value is YAML."""
    match = _OVERRIDE.fullmatch(text)
    mark = match["mark"] if match else None
    if match is None or (match["value"] is None) != (mark == "~"):
        if entry := _LIST_ENTRY.match(text):
            raise ConfigError(
                f"{COMMAND_LINE}: {shorten(text)!r}: an entry of a list cannot be set alone; set the whole list, "
                f"'{entry['list']}=[…]', in the YAML file or here"
            )
        raise ConfigError(
            f"{COMMAND_LINE}: {shorten(text)!r} is not an override; write key=value, +key=value, ++key=value, "
            "or ~key to reset a key to its default"
        )
    if mark == "~":
        return Override(match["key"], None, text)
    written = match["value"][1:]
    if written.startswith("${"):  # `${oc.env:A,b}` is not always a string to YAML
        return Override(match["key"], Node(written, COMMAND_LINE, text=written, plain=True), text)
    node = parse(written, lambda _line: COMMAND_LINE)
    if written == "":
        node = Node("", COMMAND_LINE, text="")  # as in Hydra, `key=` is the empty string, not null
    return Override(match["key"], node, text)
