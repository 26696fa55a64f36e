"""Replace `${key}` and `${oc.env:NAME,default}` in a tree; types are kept, and problems name their place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from gspo.config.yaml_tree import FAILED, MAX_NODES, Node, describe, get, is_failed, parse, shorten
from gspo.errors import ConfigError

_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_OPEN = re.compile(r"(?<!\\)\$\{")
MAX_TEXT = 100_000
MAX_CHAIN = 50


def escape(text: str) -> str:
    """A string that interpolation does not change.

    >>> escape("${HOME} costs ${5}")
    '\\\\${HOME} costs \\\\${5}'
    """
    return text.replace("${", "\\${")


def interpolate(root: Node, fallback: Callable[[str], Node | None]) -> list[str]:
    """Replace every `${key}` and `${oc.env:NAME,default}` in place, and return the problems.

    `fallback` gives the node of a key that the tree does not have (defaults, other spellings); None: unknown.
    A literal `${` is written `\\${`.
    """
    problems: list[str] = []
    _Interpolator(root, fallback, problems).settle(root, ())
    return problems


@dataclass
class _Interpolator:
    root: Node
    fallback: Callable[[str], Node | None]
    problems: list[str]
    copied: int = 0

    def settle(self, node: Node, trail: tuple[str, ...]) -> bool:
        """Make a node free of references; False where that failed (and was reported)."""
        # A node can be reached twice: by its place in the tree and through a reference.
        if node.settled:
            return not is_failed(node)
        if isinstance(node.value, (list, dict)):
            children = node.value if isinstance(node.value, list) else list(node.value.values())
            good = False not in [self.settle(child, trail) for child in children]  # a list: all are reported
            node.settled = good
            return good
        if isinstance(node.value, str) and "${" in node.value:
            # One reference alone keeps the target's type; a reference inside other text becomes part of a string.
            whole = _REFERENCE.fullmatch(node.value.strip())
            good = self.whole(node, whole[1].strip(), trail) if whole else self.embed(node, trail)
            # FAILED marks the node, so that later steps do not report it again.
            if not good:
                node.value = FAILED
        node.settled = True
        return not is_failed(node)

    def whole(self, node: Node, reference: str, trail: tuple[str, ...]) -> bool:
        """A value that is one reference takes the target's value and type."""
        target = self.resolve(reference, node.place, trail)
        if target is None:
            return False
        # References to sections copy them; nested references could otherwise grow the config exponentially.
        self.copied += _size(target)
        if self.copied > MAX_NODES:
            self.problems.append(f"{node.place}: ${{{reference}}} makes more than {MAX_NODES} values of this config")
            return False
        twin = target.copy()
        node.value, node.text, node.plain = twin.value, twin.text, twin.plain
        return True

    def embed(self, node: Node, trail: tuple[str, ...]) -> bool:
        """References inside a string become part of it."""
        parts: list[str] = []
        position = length = 0
        for match in _REFERENCE.finditer(node.value):
            target = self.resolve(match[1].strip(), node.place, trail)
            if target is None:
                return False
            if target.value is None or isinstance(target.value, (dict, list)):
                self.problems.append(
                    f"{node.place}: {match[0]} is {describe(target)}, which cannot be part of a string; "
                    "refer to a key with one value"
                )
                return False
            parts += [node.value[position : match.start()], target.text or str(target.value)]
            position = match.end()
            length += len(parts[-1])
            if length > MAX_TEXT:
                self.problems.append(f"{node.place}: ${{…}} makes a string of more than {MAX_TEXT} characters")
                return False
        rest = node.value[position:]
        # parts alternates: literal text, replaced value, literal text, … Only the literal text is checked and
        # unescaped: a value that contains `${` stays as it is.
        literal = "".join([*parts[0::2], rest])
        if _OPEN.search(literal):
            self.problems.append(
                f"{node.place}: {shorten(node.value)!r} holds an unfinished ${{…}}; write ${{section.key}}, "
                "${oc.env:NAME,default}, or \\${ for the characters themselves"
            )
            return False
        parts[0::2] = [part.replace("\\${", "${") for part in parts[0::2]]
        node.value = node.text = "".join([*parts, rest.replace("\\${", "${")])
        # The result is a string even if it looks like a number.
        node.plain = False
        return True

    def resolve(self, reference: str, place: str, trail: tuple[str, ...]) -> Node | None:
        if reference.startswith("oc.env:"):
            return self.environment(reference.removeprefix("oc.env:"), place)
        # `trail` holds the references from the first node to this one; a repeated one is a cycle.
        if reference in trail:
            chain = " → ".join([*trail[trail.index(reference) :], reference])
            self.problems.append(f"{place}: ${{{reference}}} refers to itself ({chain}); give one of them a value")
            return None
        if len(trail) >= MAX_CHAIN:
            self.problems.append(f"{place}: ${{{reference}}} ends a chain of more than {MAX_CHAIN} references")
            return None
        trail = (*trail, reference)
        target = self.root if reference else None
        # A section on the way may itself be a reference, so it is settled before its key is looked up.
        for name in reference.split("."):
            if target is not None and isinstance(target.value, str) and not self.settle(target, trail):
                return None  # reported where it failed
            target = target.value.get(name) if target is not None and isinstance(target.value, dict) else None
        target = target or self.fallback(reference)
        if target is None:
            self.problems.append(
                f"{place}: ${{{shorten(reference)}}} refers to an unknown key; "
                "write ${section.key} with a key of this config, or ${oc.env:NAME,default}"
            )
            return None
        return target if self.settle(target, trail) else None

    def environment(self, request: str, place: str) -> Node | None:
        name, comma, default = request.partition(",")
        name = name.strip()
        value = os.environ.get(name)
        if value is None and not comma:
            self.problems.append(
                f"{place}: the environment variable {shorten(name)!r} is not set; "
                f"set it, or give a default: ${{oc.env:{shorten(name)},default}}"
            )
            return None
        if value is None:
            value = default.strip()
        try:
            # Parsed as YAML, so that NAME=8 gives a number.
            node = parse(value, lambda _line: place) if value else Node("", place)
        except ConfigError:
            node = Node(value, place, text=value)
        # A variable is one value: a list or a mapping in it stays a string.
        return node if not isinstance(node.value, (dict, list)) else Node(value, place, text=value)


def section_behind(root: Node, node: Node) -> Node | None:
    """The section that a value `${section}` refers to as written; None for anything else."""
    seen: set[str] = set()
    target: Node | None = node
    while target is not None and isinstance(target.value, str):
        match = _REFERENCE.fullmatch(target.value.strip())
        if match is None or match[1].strip() in seen:
            return None
        seen.add(match[1].strip())
        target = get(root, match[1].strip())
    return target if target is not None and target is not node and isinstance(target.value, dict) else None


def _size(node: Node) -> int:
    if isinstance(node.value, dict):
        return 1 + sum(map(_size, node.value.values()))
    return 1 + sum(map(_size, node.value)) if isinstance(node.value, list) else 1
