"""YAML and overrides become a tree of values, each with the place where it was written; `${}` is replaced.

This file does not use the schema. A `Node` is a mapping, a list or a scalar with its place ("run.yaml:12" or
"command line"), so that later error messages can name the place.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import ConfigError
from gspo.shipped import example_files

COMMAND_LINE = "command line"
DICT = "dict"  # the place of keys of a Python dict
AREAL = "AReaL's default"  # the place of values that a file of AReaL's leaves to AReaL (migrate/areal.py)
MAX_FILE_BYTES = 1 << 20
MAX_NODES = 50_000  # a config has hundreds; only an explosion of aliases has more
MAX_DEPTH = 50

_INT = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0o?[0-7_]+|0b[01_]+|[0-9][0-9_]*)")
# In YAML 1.1, 1e-6 is a string because it has no dot; learning rates are often written that way.
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")}


@dataclass
class Node:
    """One value and its place. `value` is None, bool, int, float, str, list[Node] or dict[str, Node].

    >>> node = Node(3e-4, "run.yaml:7", text="3e-4", plain=True)
    >>> node.from_command_line
    False
    """

    value: Any
    place: str
    text: str = ""  # a scalar as it was written
    plain: bool = False  # written without quotes
    settled: bool = False  # its `${…}` are replaced; a `${` that is left is literal text

    @property
    def from_command_line(self) -> bool:
        return self.place == COMMAND_LINE

    def data(self) -> Any:
        """The value as plain Python objects."""
        if isinstance(self.value, dict):
            return {name: child.data() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.data() for child in self.value]
        return self.value

    def copy(self) -> Node:
        if isinstance(self.value, dict):
            return replace(self, value={name: child.copy() for name, child in self.value.items()})
        if isinstance(self.value, list):
            return replace(self, value=[child.copy() for child in self.value])
        return replace(self)


def empty(place: str) -> Node:
    return Node({}, place)


def fail(problems: Sequence[str]) -> None:
    """Raise all problems as one ConfigError; nothing where there are none."""
    if problems:
        # dict.fromkeys removes duplicates and keeps the order.
        raise ConfigError("\n".join(dict.fromkeys(by_line(problems))))


def by_line(sentences: Sequence[str]) -> list[str]:
    """Sentences that begin with their place, in the order of the file; AReaL's defaults first, all others last.

    >>> by_line(["a.yaml:10: x", "command line: y", "a.yaml:9: z", "AReaL's default: w"])
    ["AReaL's default: w", 'a.yaml:9: z', 'a.yaml:10: x', 'command line: y']
    """

    def line(sentence: str) -> float:
        match = re.match(r".*?:(\d+): ", sentence)
        return int(match[1]) if match else -1 if sentence.startswith(AREAL) else math.inf

    return sorted(sentences, key=line)


def read(path: Path) -> Node:
    """The tree of a YAML file; ConfigError for anything that is not one mapping of safe YAML."""
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
    except FileNotFoundError:
        near = get_close_matches(path.stem, example_files(), n=1)
        hint = f"did you mean the example {near[0]}?" if near else "`gspo examples` lists the configs of gspo"
        raise ConfigError(f"config file {path} does not exist (looked from {Path.cwd()}); {hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"config file {path} cannot be read: {reason}; give the path of a YAML file") from None
    if raw is None:
        raise ConfigError(f"config file {path} is larger than {MAX_FILE_BYTES} bytes; is it a config file?")
    try:
        # utf-8-sig: some editors write a byte order mark at the start.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte {raw[error.start]:#04x}); save it as UTF-8") from None
    root = parse(text, lambda line: f"{path}:{line}")
    if root.value is None:
        return empty(f"{path}:1")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.place}: a config is a mapping of keys to values, got {describe(root)}")
    return root


def from_dict(values: Mapping[str, Any]) -> Node:
    """The tree of a Python dict, by way of its YAML; ConfigError for values that YAML cannot hold."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): plain(child) for name, child in value.items()}
        if isinstance(value, list | tuple):
            return [plain(child) for child in value]
        return str(value) if isinstance(value, Path) else value

    try:
        text = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True, width=1_000_000)
    except yaml.YAMLError as error:
        raise ConfigError(f"{DICT}: a value cannot be part of a config: {error}") from None
    root = parse(text, lambda _line: DICT)
    return root if isinstance(root.value, dict) else empty(DICT)


def parse(text: str, place_of: Callable[[int], str]) -> Node:
    """The tree of a YAML text; `place_of` names a line (counted from 1)."""
    try:
        # `compose` builds nodes with line numbers and constructs no Python objects.
        composed = yaml.compose(text, Loader=yaml.SafeLoader)
        if composed is None:
            return Node(None, place_of(1))
        return _Converter(place_of).convert(composed, 0)
    except RecursionError:
        raise ConfigError(f"{place_of(1)}: nested too deeply (more than {MAX_DEPTH} levels)") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place_of(mark.line + 1 if mark else 1)}: not valid YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else 1
        raise ConfigError(f"{place_of(line)}: not valid YAML: a control character is not allowed here") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place_of(1)}: not valid YAML: {error}") from None
    except ValueError as error:  # PyYAML does not catch what int() and chr() raise for broken \x escapes
        raise ConfigError(f"{place_of(1)}: not valid YAML: {error}") from None


@dataclass
class _Converter:
    place_of: Callable[[int], str]
    count: int = 0
    open: set[int] = field(default_factory=set)

    def convert(self, node: yaml.Node, depth: int) -> Node:
        place = self.place_of(node.start_mark.line + 1)
        # Aliases are expanded here, so a small file can grow exponentially; the count and the depth limit that.
        self.count += 1
        if self.count > MAX_NODES:
            raise ConfigError(f"{place}: more than {MAX_NODES} values after expanding aliases; is it a config file?")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{place}: nested too deeply (more than {MAX_DEPTH} levels)")
        # `open` holds the collections from the root to this node.
        if id(node) in self.open:
            raise ConfigError(f"{place}: an alias contains itself")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, place)
        self.open.add(id(node))
        expected = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != _TAG + expected:
            raise ConfigError(f"{place}: the YAML tag {_tag_name(node.tag)} is not allowed; configs are plain data")
        if isinstance(node, yaml.MappingNode):
            value: Any = self.mapping(node, depth)
        else:
            value = [self.convert(child, depth + 1) for child in node.value]
        self.open.discard(id(node))
        return Node(value, place)

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for name_node, value_node in node.value:
            place = self.place_of(name_node.start_mark.line + 1)
            if name_node.tag == _TAG + "merge":
                sources = self.convert(value_node, depth + 1)
                for source in sources.value if isinstance(sources.value, list) else [sources]:
                    if not isinstance(source.value, dict):
                        raise ConfigError(f"{place}: << merges mappings, got {describe(source)}")
                    # Copies, because an override of one section must not change the section it was merged from. As in
                    # YAML, an earlier source has priority over a later one.
                    merged = {**{k: child.copy() for k, child in source.value.items()}, **merged}
                continue
            name = _scalar(name_node, place) if isinstance(name_node, yaml.ScalarNode) else None
            if name is None or not name.text:
                raise ConfigError(f"{place}: a key must be a name, got {'nothing' if name else 'a list or mapping'}")
            # PyYAML would silently use the last of both.
            if name.text in own:
                first = own[name.text].place
                raise ConfigError(f"{place}: the key {name.text} appears twice (first at {first}); remove one of them")
            child = self.convert(value_node, depth + 1)
            # A key's place is the line of its name: its value may begin a line below, or at an anchor far above.
            own[name.text] = replace(child, place=place)
        # Keys of the mapping itself have priority over merged ones, wherever `<<` is written.
        return {**merged, **own}


def _tag_name(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag


def _scalar(node: yaml.ScalarNode, place: str) -> Node:
    if node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"{place}: the YAML tag {_tag_name(node.tag)} is not allowed; configs are plain data")
    kind = node.tag.removeprefix(_TAG)
    text: str = node.value
    # A string in quotes stays a string; only a plain scalar can become a number.
    result = Node(text, place, text=text, plain=node.style is None)
    if kind == "null":
        result.value = None
    elif kind == "bool":
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{place}: {text!r} is not a boolean; write true or false")
        result.value = _BOOLS[text.lower()]
    elif kind in ("int", "float") or (kind == "str" and result.plain):
        number = _number(text, place)
        if (
            number is None and kind != "str" and ":" not in text
        ):  # 12:30 is a number in base 60 in YAML 1.1; here it is a string
            raise ConfigError(f"{place}: {text!r} is not a number")
        if number is not None:
            result.value = number
    return result


def _number(text: str, place: str) -> int | float | None:
    if len(text) > 100:
        if _INT.fullmatch(text) or _FLOAT.fullmatch(text):
            raise ConfigError(f"{place}: a number of {len(text)} characters is not a sensible value")
        return None
    if _INT.fullmatch(text):
        digits = text.replace("_", "")
        if re.fullmatch(r"[-+]?0[0-9]+", digits):  # 010 is octal in YAML 1.1 and decimal in 1.2; it is read as decimal
            return int(digits, 10)
        return int(digits, 0)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    if _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        return float(text.replace("_", ""))
    return None


def describe(node: Node) -> str:
    """What a value is, for an error message.

    >>> describe(Node([], "x"))
    'a list'
    """
    value = node.value
    if value is None:
        return "null"
    # Before the integers: bool is a subclass of int.
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return f"the string {shorten(value)!r}"
    return f"{'the integer' if isinstance(value, int) else 'the number'} {node.text or value}"


def shorten(text: str, width: int = 80) -> str:
    """The text, shortened for an error message."""
    return text if len(text) <= width else text[: width - 1] + "…"


def get(root: Node, key: str) -> Node | None:
    """The node at a dotted key, or None."""
    node = root
    for name in key.split("."):
        if not isinstance(node.value, dict) or name not in node.value:
            return None
        node = node.value[name]
    return node


def pop(root: Node, key: str) -> Node | None:
    """Remove the node at a dotted key from the tree and return it; sections that become empty stay."""
    section, _, name = key.rpartition(".")
    parent = get(root, section) if section else root
    if parent is None or not isinstance(parent.value, dict):
        return None
    return parent.value.pop(name, None)


def put(root: Node, key: str, node: Node) -> None:
    """Set a dotted key; a mapping is merged into a mapping, anything else replaces."""
    parent = root
    names = key.split(".")
    for name in names[:-1]:
        child = parent.value.get(name)
        # A scalar on the way is replaced by a section; validation reports it if the schema has no section there.
        if child is None or not isinstance(child.value, dict):
            child = parent.value[name] = empty(node.place)
        parent = child
    existing = parent.value.get(names[-1])
    if existing is not None and isinstance(existing.value, dict) and isinstance(node.value, dict):
        for name, child in node.value.items():
            put(existing, name, child)
    else:
        parent.value[names[-1]] = node


def walk(node: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every (dotted key, node) below a mapping, sections before what they hold."""
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            key = f"{prefix}{name}"
            yield key, child
            yield from walk(child, key + ".")


def leaves(node: Node) -> Iterator[Node]:
    """Every scalar below a node."""
    if isinstance(node.value, (dict, list)):
        for child in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from leaves(child)
    else:
        yield node


class _Failed(str):
    """A value that could not be interpolated. It marks the node, so that the problem is reported once."""


FAILED = _Failed()


def is_failed(node: Node) -> bool:
    """Whether interpolation of this node failed and was reported already."""
    return node.value is FAILED


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
