"""`load`: a tree of values becomes one valid, resolved config with the origin of every key.

A message has the key, the value, the place, the nearest known name and the remedy.

text → tree with places (yaml_tree) → `${…}` replaced (interpolate) → old keys migrated (migrate/table) →
names, types and bounds checked (validate) → unset keys filled in (resolve). All problems are reported together.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.algorithms import ALGORITHMS, EPS_KEYS, algorithm_of, is_function
from gspo.config import yaml_tree as tree
from gspo.config.resolve import Loaded, Origin, default_algorithm, level_of, origin_of, resolve, value_of
from gspo.config.schema import Config, Key, Section, keys_of, known_keys
from gspo.config.yaml_tree import Node, Override
from gspo.errors import ConfigError
from gspo.shipped import find_config, installed_path
from gspo.system import by_name

# Keys of TRL and verl.
FOREIGN_KEY, FOREIGN_SECTION = (f"gspo.migrate.other_systems:{name}" for name in ("find", "is_section"))

_BOUNDS = {"greater_than", "greater_than_equal", "less_than_equal"}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like this one: by its whole, then by its last part.

    >>> nearest("actor.esp_clip", known_keys()), nearest("lr", known_keys())
    ('actor.eps_clip', 'actor.optimizer.lr')
    """
    names = list(names)
    leaf = name.rpartition(".")[2]
    # The same last part in another section is the most likely mistake: a key in the wrong section.
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
    """The message about a key that the schema does not have; `names` are the known ones, by default all keys."""
    leaf = name.rpartition(".")[2]
    theirs = by_name(FOREIGN_KEY)(name)
    # A known name in another section is more likely a key in the wrong place than a key of another system.
    is_ours = "." in name and any(known.rpartition(".")[2] == leaf for known in known_keys())
    if theirs is not None and (theirs.key in (name, leaf + ".*") or not is_ours):
        return f"{place}: {theirs.complaint(name)}"
    near = nearest(name, known_keys() if names is None else names)
    if near is None:
        return f"{place}: {name} is not a known key; remove it (docs/config.md lists all keys)"
    if near == name:
        return f"{place}: {name} is written with a dot inside one key; write it nested, one section per line"
    return f"{place}: {name} is not a known key; the nearest is {near}: use that, or remove it"


def build_config(root: Node, problems: list[str]) -> tuple[Config | None, dict[str, str]]:
    """The config that a tree describes, with defaults elsewhere, and the place of every key that was written.

    Problems are appended; the config is None where there were any.
    """
    places = {name: node.place for name, node in tree.walk(root) if name in known_keys()}
    try:
        return Config.model_validate(root.data()), places
    except ValidationError as error:
        # A union reports one error for each of its branches, so errors are grouped by key.
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    found: dict[str, tuple[Node, set[str]]] = {}
    for each in errors:
        name, node = _locate(root, each["loc"])
        found.setdefault(name, (node, set()))[1].add(each["type"])
    # Some values are valid after a conversion. If any was converted, validate again: the remaining errors are then
    # reported by the second pass.
    accepted = [name for name, (node, kinds) in found.items() if _accept(name, node, kinds)]
    if accepted:
        return build_config(root, problems)[0], places
    for name, (node, kinds) in found.items():
        # A failed interpolation was reported already.
        if not tree.is_failed(node):
            problems += _messages(name, node, kinds)
    return None, places


def _locate(root: Node, loc: tuple[int | str, ...]) -> tuple[str, Node]:
    """The name and node that an error of pydantic's is about; the branch of a union at the end of `loc` is left out."""
    name, node = "", root
    for part in loc:
        if isinstance(part, int) and isinstance(node.value, list):
            name, node = f"{name}[{part}]", node.value[part]
        elif isinstance(node.value, dict) and part in node.value:
            name, node = f"{name}.{part}".lstrip("."), node.value[part]
    return name, node


def _accept(name: str, node: Node, kinds: set[str]) -> bool:
    """Change a node so that it is valid, where YAML is stricter than we are; False where there is nothing to change."""
    if "string_type" in kinds and type(node.value) in (int, float) and node.text:
        node.value = node.text  # trial_name: 007 is the string "007"
    elif node.value is None and kinds == {"list_type"}:  # null resets a list, a section or a mapping to its default
        node.value = [Node(item, node.place) for item in _key_at(name).default]
    elif node.value is None and kinds in ({"model_type"}, {"dict_type"}):
        node.value = {}
    else:
        return False
    return True


def _keys_near(name: str) -> Mapping[str, Key]:
    """All keys; of a name inside an item of a list (`mixture[0].path`), the keys of that item."""
    item = re.match(r"(.*?)\[\d+\]\.", name)
    if item is None:
        return known_keys()
    section: Any = known_keys()[item[1]].items
    return {key.name: key for key in keys_of(section, item[0])}


def _key_at(name: str) -> Key:
    keys = _keys_near(name)
    if name in keys:
        return keys[name]
    held = keys[name.rpartition("[")[0]]  # an item of a list
    kind: Any = held.items
    if issubclass(kind, Section):
        return Key(name, None, held.doc, section=kind)
    return Key(held.name, None, held.doc, scalars=(kind,))


def _messages(name: str, node: Node, kinds: set[str]) -> Iterable[str]:
    if "extra_forbidden" in kinds or (isinstance(node.value, dict) and by_name(FOREIGN_SECTION)(name)):
        yield from _unknown(name, node)
        return
    key = _key_at(name)
    if "finite_number" in kinds:
        floats = (leaf for leaf in tree.leaves(node) if isinstance(leaf.value, float))
        leaf = next(leaf for leaf in floats if not math.isfinite(leaf.value))
        yield f"{leaf.place}: {key.name} must be a finite number, got {leaf.text or leaf.value}"
    elif "int_64_bits" in kinds:
        yield f"{node.place}: {key.name} must fit into 64 bits, got {tree.shorten(node.text)}"
    elif kinds & _BOUNDS:
        yield f"{node.place}: {key.name} must be {key.bounds}, got {node.text or node.value} ({key.doc.rstrip('.')})"
    else:
        yield _wrong(key, node)


def _unknown(name: str, node: Node) -> Iterable[str]:
    """A message about an unknown key, or about each key of another system's section."""
    if isinstance(node.value, dict) and by_name(FOREIGN_SECTION)(name):
        for child_name, child in node.value.items():
            yield from _unknown(f"{name}.{child_name}", child)
    else:
        yield unknown_key(name, node.place, _keys_near(name))


def _wrong(key: Key, node: Node) -> str:
    message = f"{node.place}: {key.name} must be {key.wanted}, got {tree.describe(node)}"
    # Add the most specific hint: a similar choice, quotes, an integer; otherwise the description of the key.
    if key.choices and isinstance(node.value, str):
        near = difflib.get_close_matches(node.value, [str(choice) for choice in key.choices], n=1)
        return message + (f"; did you mean {near[0]}?" if near else f" ({key.doc.rstrip('.')})")
    if isinstance(node.value, bool) and str in key.scalars:
        return message + f"; put quotes around {node.text}"
    if isinstance(node.value, float) and int in key.scalars and node.value.is_integer():
        return message + f"; write {int(node.value)}"
    if isinstance(node.value, str) and not node.plain and {int, float} & set(key.scalars):
        return message + ("; write it without quotes" if node.value.strip() else "")
    return message + f" ({key.doc.rstrip('.')})"


MIGRATION = "gspo.migrate.table"  # the keys of AReaL


def load(path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Loaded:
    """The resolved config of a YAML file or a dict (None: all defaults) with overrides on top; ConfigError otherwise.

    A dict holds sections as dicts, or dotted keys: {"gconfig": {"n_samples": 8}, "actor.path": "embedded:tiny"}.

    >>> loaded = load(None, ["algorithm=grpo", "+actor.importance_sampling_level=sequence"])
    >>> loaded.config.actor.eps_clip, str(loaded.origin("actor.eps_clip")), loaded.is_set("actor.eps_clip")
    (0.0003, 'level sequence', False)
    """
    if isinstance(overrides, str | Mapping):
        what = "one string" if isinstance(overrides, str) else "a dict"
        raise ConfigError(f'overrides must be a list of strings, for example ["seed=1"], got {what}')
    path, root = _read(path)
    problems: list[str] = []
    messages: list[str] = []
    in_file = root.copy()
    # Problems are collected up to `build_config`, so that the user sees all of them in one run.
    for text in overrides:
        try:
            _override(root, tree.parse_override(text), problems)
        except ConfigError as error:
            problems.append(str(error))
    # After the overrides: `${key}` must give the overridden value.
    problems += tree.interpolate(root, lambda reference: _elsewhere(root, reference))
    # After interpolation, because a migration rule converts values, not references.
    by_name(MIGRATION).migrate(root, problems, messages)
    _drop_eps_of_another_level(root, in_file, messages)
    config, places = build_config(root, problems)
    # `resolve` needs a config that passed validation.
    tree.fail(problems)
    assert config is not None, "a config without problems"
    origins = _origins(config, places)
    config = resolve(config, origins, problems, messages)
    tree.fail(problems)
    return Loaded(config, origins, tree.by_line(messages), path)


def _read(source: str | Path | Mapping[str, Any] | None) -> tuple[Path | None, Node]:
    """The file, if there is one, and the tree of a YAML file or of a dict."""
    if isinstance(source, Mapping):
        root = tree.empty(tree.DICT)
        for key, node in tree.from_dict(source).value.items():
            tree.put(root, key, node)
        return None, root
    if source is None:
        return None, tree.empty("default")
    if not isinstance(source, str | Path):
        raise ConfigError(f"a config is the path of a YAML file, the name of an example or a dict, got {source!r:.80}")
    path = Path(source)
    example = None if path.is_file() else find_config(str(source))
    if example is None:
        return path, tree.read(path)
    root = tree.read(example)
    for node in tree.leaves(root):
        if isinstance(node.value, str):
            node.value = installed_path(node.value)
    return example, root


def _override(root: Node, override: Override, problems: list[str]) -> None:
    if override.node is not None:
        # Otherwise the override would replace a `${…}` section as a whole and lose its other keys.
        _open_references(root, override.key)
        tree.put(root, override.key, override.node)
        return
    if not _is_known(override.key):
        problems.append(unknown_key(override.key, tree.COMMAND_LINE))
    # `~key` resets the key however the file spells it.
    for key in (override.key, *by_name(MIGRATION).spellings(override.key)):
        tree.pop(root, key)


def _drop_eps_of_another_level(root: Node, in_file: Node, messages: list[str]) -> None:
    """Remove ε that a file chose for another ratio level than that of an `algorithm` on the command line.

    Ranges of token ratios and of sequence ratios differ by orders of magnitude. An ε on the command line stays.
    """
    chosen = tree.get(root, "algorithm")
    if chosen is None or not chosen.from_command_line:
        return

    def level(values: Node) -> str | None:
        keys = ("algorithm", "actor.importance_sampling_level")
        name, own = (str(node.data()) if (node := tree.get(values, key)) else None for key in keys)
        name = name or default_algorithm(own, tree.get(values, "critic") is not None)[0]
        known = name in ALGORITHMS or is_function(name)
        return level_of(algorithm_of(name), own).partition("_")[0] if known else None

    before, now = level(in_file), level(root)
    for key in EPS_KEYS if None not in (before, now) and before != now else ():
        eps = tree.get(root, f"actor.{key}")
        if eps is not None and eps.value is not None and not eps.from_command_line:
            tree.pop(root, f"actor.{key}")
            messages.append(
                f"{eps.place}: actor.{key} {eps.text or eps.value} is dropped: it is a range of {before} ratios, and "
                f"algorithm={chosen.data()} has {now} ratios; set actor.{key} on the command line to choose it"
            )


def _is_known(key: str) -> bool:
    keys = known_keys()
    free = (name for name, known in keys.items() if known.free)
    return key in keys or by_name(MIGRATION).is_known(key) or any(key.startswith(name + ".") for name in free)


def _open_references(root: Node, key: str) -> None:
    """Where a section on the way is `${other.section}`, copy that section, so that one key of it can be set."""
    names = key.split(".")
    for depth in range(1, len(names)):
        section = tree.get(root, ".".join(names[:depth]))
        target = None if section is None else tree.section_behind(root, section)
        if section is not None and target is not None:
            section.value = target.copy().value


def _elsewhere(root: Node, reference: str) -> Node | None:
    """What `${reference}` means where the config does not write that key: another spelling of it, or the default."""
    for spelling in (by_name(MIGRATION).renamed(reference), *by_name(MIGRATION).spellings(reference)):
        node = tree.get(root, spelling)
        if node is not None:
            return node
    key = known_keys().get(by_name(MIGRATION).renamed(reference))
    if key is None:
        return Node(None, "default") if by_name(MIGRATION).is_known(reference) else None
    default = {} if key.section is not None and not key.nullable else key.default
    if isinstance(default, list):
        default = [Node(item, "default", text=str(item)) for item in default]
    return Node(default, "default")


def _origins(config: Config, places: dict[str, str]) -> dict[str, Origin]:
    """The origin of each key before resolution; a null that means "not set" has the origin `default`."""
    origins: dict[str, Origin] = {}
    for name, key in known_keys().items():
        section = name.rpartition(".")[0]
        # Keys below a null section do not exist.
        if section and value_of(config, section) is None:
            continue
        value = value_of(config, name)
        # A section has no origin of its own, except one that may be null and that the user wrote.
        if key.section is not None and value is not None:
            if name in places and key.nullable:
                origins[name] = origin_of(places[name])
            continue
        unset = name not in places or (value is None and key.null_is_unset)
        origins[name] = Origin("default") if unset else origin_of(places[name])
    return origins
