"""YAML that others wrote, within bounds of bytes, values and depth, also with its aliases written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gspo.errors import GspoError
from gspo.system.foreign import Limits, read_regular, reading

YAML_LIMITS = Limits(bytes=4 << 20, values=100_000)
_MAX_NUMBER_CHARACTERS = 100  # PyYAML's time for a number in base 60 is quadratic


def parse_yaml(text: str | bytes, limits: Limits = YAML_LIMITS) -> Any:
    """The plain value of a YAML text, by libyaml's parser in C if PyYAML was built with it; ValueError with the reason.

    >>> parse_yaml("actor: {eps_clip: 2.0e-3}")
    {'actor': {'eps_clip': 0.002}}
    """
    if len(text) > limits.bytes:
        raise ValueError(f"it has {len(text):,} bytes; at most {limits.bytes:,} are read")
    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth, values, loader = 0, 0, None
    try:
        # Events first: making nodes recurses in C once per level without a limit, and a deep text crashes the process.
        for event in yaml.parse(text, Loader=kind):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > limits.depth:
                raise ValueError(f"lists and mappings are nested deeper than {limits.depth}")
            values += isinstance(event, yaml.NodeEvent)
            if values > limits.values:  # a node has 360 bytes
                raise ValueError(f"it has more than {limits.values:,} values")
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _expanded(node, limits, {}, set())
        return loader.construct_document(node)
    except ValueError:
        raise
    except Exception as cause:  # PyYAML's constructors raise anything on a scalar with a wrong tag
        raise ValueError(f"it is not valid YAML: {' '.join(str(cause).split())[:300]}") from cause
    finally:
        if loader is not None:
            loader.dispose()


def read_yaml(file: Path, error: type[GspoError]) -> dict[str, Any]:
    """The mapping of a YAML file (an empty one for anything else); an `error` that names the file."""
    with reading(file, error):
        found = parse_yaml(read_regular(file, YAML_LIMITS.bytes))
        return found if isinstance(found, dict) else {}


def _expanded(node: Any, limits: Limits, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Values and depth below a node of YAML with its aliases written out. `known` by node: each is seen once."""
    if isinstance(node.value, str):
        if not node.tag.endswith((":str", ":binary")) and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise ValueError(
                f"line {node.start_mark.line + 1}: a scalar of {len(node.value):,} characters, not a string"
            )
        return 1, 0
    if id(node) in above:
        raise ValueError(f"line {node.start_mark.line + 1}: an alias contains itself")
    if id(node) not in known:
        pairs = [part if isinstance(part, tuple) else (part,) for part in node.value]
        # Hashes of numbers are not random: many could be made equal, and a mapping of them quadratic.
        if sum(len(pair) > 1 and not pair[0].tag.endswith((":str", ":merge")) for pair in pairs) > 1000:
            raise ValueError(f"line {node.start_mark.line + 1}: more than 1,000 keys that are not names")
        parts = [_expanded(child, limits, known, above | {id(node)}) for pair in pairs for child in pair]
        found = 1 + sum(num for num, _ in parts), 1 + max((deep for _, deep in parts), default=0)
        if found[0] > limits.values or found[1] > limits.depth:
            raise ValueError(
                f"line {node.start_mark.line + 1}: with its aliases written out it has {found[0]:,} values in "
                f"{found[1]} levels; at most {limits.values:,} in {limits.depth} are read"
            )
        known[id(node)] = found
    return known[id(node)]
