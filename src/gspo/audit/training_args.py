"""TRL's training_args.bin as plain values. It is a pickle, and a pickle can run any program when it is loaded.

This reader interprets the opcodes of a dataclass's pickle itself: it imports nothing and calls nothing. A class is kept
as its name, an object as its state, and a call (an enum's value) as its arguments.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError

MAX_BYTES = 4_000_000  # a real file has about 10 kB
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})


@dataclass
class Inert:
    """An object of the file: its class by name, the arguments of its constructor, and its state."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


def read_training_args(file: Path) -> dict[str, Any]:
    """The fields of the config in `file`; ConfigError if it is not one."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
            if len(members) != 1 or members[0].file_size > MAX_BYTES:
                raise ConfigError(
                    f"{file} is not a training_args.bin: it has no data.pkl of at most {MAX_BYTES:,} bytes"
                )
            with archive.open(members[0]) as stream:
                content = stream.read(MAX_BYTES)
    except (OSError, zipfile.BadZipFile) as cause:
        raise ConfigError(f"{file} is not a training_args.bin: {cause}") from cause
    try:
        found = interpret(content)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as cause:
        raise ConfigError(f"{file} cannot be read as a training config: {cause}") from cause
    if not isinstance(found, Inert) or not found.state:
        raise ConfigError(f"{file} does not hold a training config")
    return {name: plain(value) for name, value in found.state.items()}


def plain(value: Any) -> Any:
    """An enum as its value; any other object as the name of its class."""
    if isinstance(value, Inert):
        simple = len(value.args) == 1 and isinstance(value.args[0], str | int | float)
        return value.args[0] if simple and not value.state else value.name
    return value


def interpret(content: bytes) -> Any:
    """The value of a pickle of dicts, lists, texts, numbers and inert objects; ValueError for any other opcode."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, arg, _ in pickletools.genops(content):
        name = opcode.name
        if name == "STOP":
            return stack[-1]
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(arg)] = stack[-1]  # pyright: ignore[reportArgumentType]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(arg)])  # pyright: ignore[reportArgumentType]
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name not in _IGNORED:
            _apply(name, arg, stack)
    raise ValueError("the file ends too early")


def _apply(name: str, arg: Any, stack: list[Any]) -> None:
    """Opcodes that take something from the stack, and literals."""
    if name == "GLOBAL":
        stack.append(Inert(str(arg).replace(" ", ".")))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(Inert(f"{module}.{attribute}"))
    elif name in ("REDUCE", "NEWOBJ"):
        args, called = stack.pop(), stack.pop()
        stack.append(Inert(called.name, args))
    elif name == "BUILD":
        state, target = stack.pop(), stack[-1]
        # Objects with slots have a pair of states.
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            target.state.update(part or {})
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("APPENDS", "APPEND", "ADDITEMS"):
        _add(stack, [stack.pop()] if name == "APPEND" else _since_mark(stack))
    elif name in ("SETITEMS", "SETITEM"):
        items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        target = stack[-1].state if isinstance(stack[-1], Inert) else stack[-1]
        target.update(zip((str(key) for key in items[::2]), items[1::2], strict=True))
    elif arg is not None:
        stack.append(arg)  # a text or a number
    else:
        raise ValueError(f"unexpected opcode {name}")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = max(at for at, item in enumerate(stack) if item is _MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _add(stack: list[Any], items: list[Any]) -> None:
    if isinstance(stack[-1], list):
        stack[-1].extend(items)
    # The members of a set are not needed: no field that is read here holds one.
