"""Readers of what others wrote: JSON, JSON lines and YAML, as files, answers of servers or texts of models.

A reader checks bytes, values and depth against `Limits`, and its time is linear in the bytes. A parser raises
ValueError only, `read_regular` OSError only. (Readers of tables: data/files.py, images: data/images.py, pickles: audit/disk.py.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gspo.errors import GspoError
from gspo.system.heartbeat import beat


class Limits(NamedTuple):
    bytes: int = 1 << 30
    values: int = 20_000_000  # keys, scalars, lists and objects: about 80 bytes of memory each
    depth: int = 100


LIMITS = Limits()
YAML_LIMITS = Limits(bytes=4 << 20, values=100_000)
_MAX_NUMBER_CHARACTERS = 100  # in YAML; PyYAML's time for a number in base 60 is quadratic
# The possessive quantifiers and the end of the text as an end of a string keep this linear.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
_KINDS = {dict: "an object", list: "a list"}


@contextlib.contextmanager
def reading(file: Path, error: type[GspoError]) -> Iterator[None]:
    """Turn what the readers raise into an `error` that names the file."""
    beat(f"reading {file}")
    try:
        yield
    except OSError as cause:
        raise error(f"{file} cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise error(f"{file} cannot be read: {cause}") from cause


def read_regular(file: Path, most: int = LIMITS.bytes) -> bytes:
    """The content of a regular file of at most `most` bytes; OSError for anything else: a FIFO may block forever."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as cause:  # a name with NUL, or one that the file system cannot encode
        raise OSError(errno.EINVAL, str(cause), repr(str(file))) from None
    with open(handle, "rb") as stream:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file; move it away", str(file))
        # The size before the content: a sparse file costs nothing. Then the content: files of /proc have the size 0.
        if found.st_size > most or len(content := stream.read(most + 1)) > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(file))
        return content


def parse_json(content: bytes | str, limits: Limits = LIMITS, *, strict: bool = False) -> Any:
    """The value of a JSON text; ValueError with the reason. `strict`: no duplicate keys and no lone surrogates.

    >>> parse_json(b'{"a": [1]}')
    {'a': [1]}
    """
    if len(content) > limits.bytes:
        raise ValueError(f"it has {len(content):,} bytes; at most {limits.bytes:,} are read")
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    # A cheap bound first. Only a text that exceeds it is counted again without its strings.
    if _num_values(text) > limits.values and (num := _num_values(_STRING.sub("", text))) > limits.values:
        raise ValueError(f"it has {num:,} values; at most {limits.values:,} are read")
    too_deep = f"lists and objects are nested deeper than {limits.depth}"
    try:
        value = json.loads(text, object_pairs_hook=_unique if strict else None)
    except RecursionError:
        raise ValueError(too_deep) from None
    # The next checks walk the whole value, so they are made only where a cheap look at the text does not exclude them.
    if text.count("[") + text.count("{") > limits.depth and _depth(value) > limits.depth:
        raise ValueError(too_deep)
    if strict and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ord(error.object[error.start])
            raise ValueError(f"a string has a lone surrogate (\\u{found:04x}), which is not a character") from None
    return value


def read_json(
    file: Path, error: type[GspoError], kind: type = dict, limits: Limits = LIMITS, *, strict: bool = False
) -> Any:
    """The object (or list) of a JSON file; an `error` that names the file."""
    with reading(file, error):
        value = parse_json(read_regular(file, limits.bytes), limits, strict=strict)
        if not isinstance(value, kind):
            raise ValueError(f"it must be {_KINDS[kind]} of JSON, got {type(value).__name__}")
        return value


def objects_of(content: bytes, limits: Limits = LIMITS) -> Iterator[dict[str, Any]]:
    """The objects of a text, one per line; damaged lines are skipped, such as a last line that a kill cut off."""
    left = limits.values
    # Split at newlines only: str.splitlines() also splits at characters that JSON strings may contain.
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = parse_json(line, limits)
            if isinstance(value, dict):
                left -= 1 + len(value)
                if left < 0:
                    return
                yield value


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """`objects_of` a file; OSError if it is not a regular file of bounded size."""
    return list(objects_of(read_regular(file)))


def parse_yaml(text: str | bytes, limits: Limits = YAML_LIMITS) -> Any:
    """The plain value of a YAML text, by libyaml's parser in C if PyYAML was built with it; ValueError with the reason.

    >>> parse_yaml("actor: {eps_clip: 2.0e-3}")
    {'actor': {'eps_clip': 0.002}}
    """
    import yaml  # here, because most programs that import this module read no YAML

    if len(text) > limits.bytes:
        raise ValueError(f"it has {len(text):,} bytes; at most {limits.bytes:,} are read")
    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth, loader = 0, None
    try:
        # Events first: making nodes recurses in C once per level without a limit, and a deep text crashes the process.
        for event in yaml.parse(text, Loader=kind):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > limits.depth:
                raise ValueError(f"lists and mappings are nested deeper than {limits.depth}")
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


def _num_values(text: str) -> int:
    return sum(map(text.count, "[{,:"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"the key {name!r} appears twice in one object")
            names.add(name)
    return made


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [v for v in level if isinstance(v, list | dict)]
        level = [item for v in inner for item in (v.values() if isinstance(v, dict) else v)]
    return depth - 1
