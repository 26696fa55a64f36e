"""`load`: a YAML file and overrides become one resolved config with the origin of every key.

text → tree with places (yaml_tree) → `${…}` replaced (interpolate) → old keys migrated (migrate/table) →
names, types and bounds checked (validate) → unset keys filled in (resolve). All problems are reported together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import yaml_tree as tree
from gspo.config.interpolate import interpolate, section_behind
from gspo.config.loaded import Loaded, Origin, origin_of
from gspo.config.overrides import Override, parse_override
from gspo.config.resolve import resolve, value_of
from gspo.config.schema import Config, known_keys
from gspo.config.validate import build_config, unknown_key
from gspo.config.yaml_tree import Node
from gspo.errors import ConfigError
from gspo.shipped import find_config, installed_path
from gspo.system.imports import by_name

MIGRATION = "gspo.migrate.table"  # the keys of AReaL


def load(path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Loaded:
    """The resolved config of a YAML file or a dict (None: all defaults) with overrides on top; ConfigError otherwise.

    A dict holds sections as dicts, or dotted keys: {"gconfig": {"n_samples": 8}, "actor.path": "embedded:tiny"}.

    >>> loaded = load(None, ["+actor.importance_sampling_level=sequence"])
    >>> loaded.config.actor.eps_clip, str(loaded.origin("actor.eps_clip")), loaded.is_set("actor.eps_clip")
    (0.0003, 'level sequence', False)
    """
    if isinstance(overrides, str | Mapping):
        what = "one string" if isinstance(overrides, str) else "a dict"
        raise ConfigError(f'overrides must be a list of strings, for example ["seed=1"], got {what}')
    path, root = _read(path)
    problems: list[str] = []
    messages: list[str] = []
    # Problems are collected up to `build_config`, so that the user sees all of them in one run.
    for text in overrides:
        try:
            _override(root, parse_override(text), problems)
        except ConfigError as error:
            problems.append(str(error))
    # After the overrides: `${key}` must give the overridden value.
    problems += interpolate(root, lambda reference: _elsewhere(root, reference))
    # After interpolation, because a migration rule converts values, not references.
    by_name(MIGRATION).migrate(root, problems, messages)
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


def _is_known(key: str) -> bool:
    keys = known_keys()
    free = (name for name, known in keys.items() if known.free)
    return key in keys or by_name(MIGRATION).is_known(key) or any(key.startswith(name + ".") for name in free)


def _open_references(root: Node, key: str) -> None:
    """Where a section on the way is `${other.section}`, copy that section, so that one key of it can be set."""
    names = key.split(".")
    for depth in range(1, len(names)):
        section = tree.get(root, ".".join(names[:depth]))
        target = None if section is None else section_behind(root, section)
        if section is not None and target is not None:
            section.value = target.copy().value


def _elsewhere(root: Node, reference: str) -> Node | None:
    """What `${reference}` means where the config does not write that key: another spelling of it, or the default."""
    for spelling in (by_name(MIGRATION).renamed(reference), *by_name(MIGRATION).spellings(reference)):
        node = tree.get(root, spelling)
        if node is not None:
            return node
    key = known_keys().get(by_name(MIGRATION).renamed(reference))
    if key is not None:
        return Node({} if key.section is not None and not key.nullable else _default_node(key.default), "default")
    return Node(None, "default") if by_name(MIGRATION).is_known(reference) else None


def _default_node(default: object) -> object:
    return [Node(item, "default", text=str(item)) for item in default] if isinstance(default, list) else default


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
