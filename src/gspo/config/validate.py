"""From a tree of written values to the schema's dataclasses: names, types, bounds, and what to do about them.

Every problem of a config is collected, none is raised before all are known.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gspo.config.migrate import other_systems
from gspo.config.schema import Config
from gspo.config.yaml_tree import Node, clip, describe, is_failed

_SCALARS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
INT_LIMIT = 1 << 63


@dataclass(frozen=True)
class Key:
    """One key of the schema, or one section of it.

    >>> known_keys()["gconfig.top_p"].above, known_keys()["actor"].section.__name__
    (0.0, 'Actor')
    """

    name: str
    default: Any
    doc: str
    scalars: tuple[type, ...]  # accepted scalar types; empty for sections, lists and mappings
    choices: tuple[str, ...]
    nullable: bool
    section: type | None = None
    items: type | None = None  # of a list; a dataclass where its items are sections
    mappings: bool = False  # items of a list may also be mappings, passed on as they are
    free: bool = False  # a mapping passed on as it is
    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def leaves_choice(self) -> bool:
        """Whether null means "decide for me" rather than "none"; the sentence says which."""
        return self.default is None and "null:" in self.doc and not re.search(r"null: (none|off)\b", self.doc)

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.section is not None:
            parts = ["a section"]
        elif self.free:
            parts = ["a mapping"]
        elif self.items is not None:
            parts = [f"a list of {_PLURALS.get(self.items, 'sections')}" + " or mappings" * self.mappings]
        else:
            parts = [_SCALARS[kind] for kind in self.scalars]
        if self.choices:
            parts.append("one of " * (len(self.choices) > 1) + ", ".join(self.choices))
        return " or ".join([*parts, "null"] if self.nullable else parts)

    @property
    def bounds(self) -> str:
        """The allowed range in words; empty where there is none."""
        limits = ((self.above, "above"), (self.low, "at least"), (self.high, "at most"))
        return " and ".join(f"{word} {limit:.9g}" for limit, word in limits if limit is not None)


@functools.cache
def known_keys() -> Mapping[str, Key]:
    """Every key of the schema by its dotted name, sections before what they hold."""
    return types.MappingProxyType({key.name: key for key in keys_of(Config, "")})


def keys_of(cls: type, prefix: str) -> Iterable[Key]:
    """The keys of a section class, below `prefix`."""
    hints = get_type_hints(cls)
    for entry in fields(cls):
        default = entry.default if entry.default is not MISSING else entry.default_factory()  # type: ignore[misc]
        key = _key(prefix + entry.name, hints[entry.name], default, dict(entry.metadata))
        yield key
        if key.section is not None:
            yield from keys_of(key.section, key.name + ".")


def _key(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Key:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    found: dict[str, Any] = {"scalars": (), "choices": ()}
    for option in options:
        if option is type(None):
            continue
        if get_origin(option) is Literal:
            found["choices"] += get_args(option)
        elif get_origin(option) is list:
            inside = get_args(option)[0]
            kinds = get_args(inside) if get_origin(inside) in (Union, types.UnionType) else (inside,)
            found["items"] = kinds[0]
            found["mappings"] = any(get_origin(kind) is dict for kind in kinds)
        elif get_origin(option) is dict:
            found["free"] = True
        elif is_dataclass(option):
            found["section"] = option
        else:
            found["scalars"] += (option,)
    return Key(name=name, default=default, nullable=type(None) in options, **found, **metadata)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like this one: by its whole, then by its last part.

    >>> nearest("actor.esp_clip", known_keys()), nearest("lr", known_keys())
    ('actor.eps_clip', 'actor.optimizer.lr')
    """
    names = list(names)
    leaf = name.rpartition(".")[2]
    same_leaf = [known for known in names if known.rpartition(".")[2] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaves = {known.rpartition(".")[2]: known for known in reversed(names)}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def unknown_key(name: str, place: str, names: Iterable[str] | None = None) -> str:
    """The complaint about a key that nobody knows; `names` are the known ones, by default all of the schema."""
    leaf = name.rpartition(".")[2]
    theirs = other_systems.find(name)
    # A name that is ours too, one section off, is more likely a key in the wrong place than one of another system.
    if theirs is not None and (theirs.key in (name, leaf + ".*") or not _is_ours(leaf) or "." not in name):
        return f"{place}: {theirs.complaint(name)}"
    near = nearest(name, known_keys() if names is None else names)
    if near is None:
        return f"{place}: {name} is not a known key; remove it (docs/config.md lists all keys)"
    if near == name:
        return f"{place}: {name} is written with a dot inside one key; write it nested, one section a line"
    return f"{place}: {name} is not a known key; the nearest is {near}: use that, or remove it"


def _is_ours(leaf: str) -> bool:
    return any(known.rpartition(".")[2] == leaf for known in known_keys())


def _unknown(name: str, node: Node, names: Iterable[str] | None) -> Iterable[str]:
    """A complaint about an unknown key, or about each key of another system's section."""
    if isinstance(node.value, dict) and other_systems.is_section(name):
        for child_name, child in node.value.items():
            yield from _unknown(f"{name}.{child_name}", child, names)
    else:
        yield unknown_key(name, node.place, names)


def build(tree: Node, problems: list[str]) -> tuple[Config, dict[str, str]]:
    """The config a tree describes, defaults elsewhere, and the place of every key that was written.

    Problems are appended; the config is only meaningful where there were none.
    """
    places: dict[str, str] = {}
    config = _section(Config, "", tree, problems, places)
    return config, places


def _section(cls: type, prefix: str, node: Node, problems: list[str], places: dict[str, str]) -> Any:
    # An item of a list is no key of the schema by its full name; its own keys are.
    own = {key.name: key for key in keys_of(cls, prefix)} if prefix.endswith("].") else None
    keys = known_keys() if own is None else own
    values: dict[str, Any] = {}
    for name, child in node.value.items():
        key = keys.get(prefix + name) if "." not in name else None
        if key is None:
            problems += _unknown(prefix + name, child, own)
            continue
        if is_failed(child):
            continue
        values[name] = _value(key, child, problems, places)
        places[key.name] = child.place
    return cls(**{name: value for name, value in values.items() if value is not _BAD})


_BAD = object()


def _value(key: Key, node: Node, problems: list[str], places: dict[str, str]) -> Any:
    """The Python value of a node for a key; _BAD, with a problem, where it is none."""
    if node.value is None:
        if key.nullable:
            return None
        if key.section is not None or key.items is not None or key.free:
            # null empties what holds others
            return key.section() if key.section is not None else type(key.default)(key.default)
    elif key.section is not None and isinstance(node.value, dict):
        return _section(key.section, key.name + ".", node, problems, places)
    elif key.free and isinstance(node.value, dict):
        return _free(key, node, problems)
    elif key.items is not None and isinstance(node.value, list):
        return _items(key, node, problems, places)
    elif not isinstance(node.value, (dict, list)):
        value = _scalar(key, node)
        if value is not _BAD:
            return _bounded(key, value, node, problems)
    if isinstance(node.value, dict) and other_systems.is_section(key.name):
        problems += _unknown(key.name, node, None)
    else:
        problems.append(_wrong(key, node))
    return _BAD


def _items(key: Key, node: Node, problems: list[str], places: dict[str, str]) -> Any:
    """The values of a list: scalars, mappings passed on as they are, or sections."""
    kind: Any = key.items
    values = []
    for number, child in enumerate(node.value):
        if is_failed(child):
            values.append(_BAD)
        elif key.mappings and isinstance(child.value, dict):
            values.append(_free(key, child, problems))
        elif is_dataclass(key.items):
            item = Key(f"{key.name}[{number}]", None, key.doc, (), (), False, section=kind)
            values.append(_value(item, child, problems, places))
        else:
            item = Key(key.name, None, key.doc, (kind,), (), False)
            values.append(_value(item, child, problems, places))
    return _BAD if any(value is _BAD for value in values) else values


def _scalar(key: Key, node: Node) -> Any:
    value = node.value
    if key.choices:
        for text in (value, node.text):  # a choice such as `off` may have been read as a boolean
            if isinstance(text, str) and text in key.choices:
                return text
    if isinstance(value, bool):
        return value if bool in key.scalars else _BAD
    if isinstance(value, int):
        if int in key.scalars:
            return value
        if float in key.scalars:
            return float(value) if abs(value) < 1e300 else math.inf
    if isinstance(value, float) and float in key.scalars:
        return value
    if str in key.scalars:
        # A trial called 007 is a text, whatever YAML thinks of it.
        return node.text if isinstance(value, (int, float)) and node.text else value if isinstance(value, str) else _BAD
    return _BAD


def _bounded(key: Key, value: Any, node: Node, problems: list[str]) -> Any:
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(f"{node.place}: {key.name} must be a finite number, got {node.text or value}")
        return _BAD
    if isinstance(value, int) and abs(value) >= INT_LIMIT:
        problems.append(f"{node.place}: {key.name} must fit into 64 bits, got {clip(node.text)}")
        return _BAD
    outside = (
        (key.low is not None and value < key.low)
        or (key.high is not None and value > key.high)
        or (key.above is not None and value <= key.above)
    )
    if outside:
        problems.append(f"{node.place}: {key.name} must be {key.bounds}, got {node.text or value} ({_lower(key.doc)})")
        return _BAD
    return value


def _free(key: Key, node: Node, problems: list[str]) -> Any:
    if any(is_failed(child) for child in _leaves(node)):
        return _BAD
    for leaf in _leaves(node):
        if isinstance(leaf.value, float) and not math.isfinite(leaf.value):
            problems.append(f"{leaf.place}: {key.name} holds {leaf.text}; flags must be finite numbers")
    return node.data()


def _leaves(node: Node) -> Iterable[Node]:
    children = node.value.values() if isinstance(node.value, dict) else node.value
    for child in children:
        if isinstance(child.value, (dict, list)):
            yield from _leaves(child)
        else:
            yield child


def _lower(doc: str) -> str:
    return doc.rstrip(".")


def _wrong(key: Key, node: Node) -> str:
    complaint = f"{node.place}: {key.name} must be {key.wanted}, got {describe(node)}"
    if key.choices and isinstance(node.value, str):
        near = difflib.get_close_matches(node.value, key.choices, n=1)
        return complaint + (f"; did you mean {near[0]}?" if near else f" ({_lower(key.doc)})")
    if isinstance(node.value, bool) and str in key.scalars:
        return complaint + f"; put quotes around {node.text}"
    if isinstance(node.value, float) and int in key.scalars and node.value.is_integer():
        return complaint + f"; write {int(node.value)}"
    if isinstance(node.value, str) and not node.plain and {int, float} & set(key.scalars):
        return complaint + ("; write it without quotes" if node.value.strip() else "")
    return complaint + f" ({_lower(key.doc)})"
