"""Readers of what others wrote: JSON and JSON lines, as files, answers of servers or texts of models.

A reader checks bytes, values and depth against `Limits`, and its time is linear in the bytes. A parser raises
ValueError only, `read_regular` OSError only. Other readers: foreign_yaml.py, data/files.py (tables), data/images.py,
audit/disk.py (pickles).
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


@contextlib.contextmanager
def naming_panics(where: str, error: type[Exception]) -> Iterator[None]:
    """Turn a panic of a library in Rust (tokenizers), which is a BaseException, into an `error` with its place."""
    try:
        yield
    except BaseException as cause:
        if type(cause).__name__ != "PanicException":
            raise
        raise error(f"{where}: a library failed ({str(cause).strip() or 'panic'!s:.200})") from cause


def read_regular(file: Path, most: int = LIMITS.bytes) -> bytes:
    """The content of a regular file of at most `most` bytes; OSError for anything else: a FIFO may block forever."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as cause:  # a name with NUL, or one that the file system cannot encode
        raise OSError(errno.EINVAL, str(cause), repr(str(file))) from None
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file; move it away", str(file))
    with open(handle, "rb") as stream:
        # The size first: a sparse file costs nothing. Then the content: files of /proc have the size 0, and files grow.
        content = stream.read(most + 1) if about.st_size <= most else b""
    if (size := max(about.st_size, len(content))) > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {most:,} are read", str(file))
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
    file: Path, error: type[GspoError], limits: Limits = LIMITS, *, kind: type = dict, strict: bool = False
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


def _num_values(text: str) -> int:
    return sum(map(text.count, "[{,:"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made, seen = dict(pairs), set[str]()
    if len(made) < len(pairs):
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return made


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [v for v in level if isinstance(v, list | dict)]
        level = [item for v in inner for item in (v.values() if isinstance(v, dict) else v)]
    return depth - 1
