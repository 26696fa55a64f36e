"""`gspo audit PATH …`: the files that TRL, verl and ms-swift leave on disk, as a run directory with a report.

This reader interprets the opcodes of a dataclass's pickle itself: it imports nothing and calls nothing. A class is kept
as its name, an object as its state, and a call (an enum's value) as its arguments.

| system | config | metrics | samples |
|---|---|---|---|
| TRL | checkpoint-N/training_args.bin | trainer_state.json | completions/completions_*.parquet (log_completions) |
| verl | .hydra/config.yaml | the file logger's jsonl | rollout_data_dir/N.jsonl |
| ms-swift | args.json | logging.jsonl | completions.jsonl (log_completions) |
"""

from __future__ import annotations

import contextlib
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from gspo.audit import samples
from gspo.audit.findings import write_audit
from gspo.audit.foreign import Draft
from gspo.audit.trl import from_swift, from_trl
from gspo.audit.verl import from_verl
from gspo.errors import ConfigError, GspoError
from gspo.runs import RunDir
from gspo.system import flat, read_json, read_regular, read_yaml, reading

MAX_BYTES = 4_000_000  # a real file has about 10 kB
MAX_OPCODES = 20_000  # a real file has about 1,000
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
    with reading(file, ConfigError):
        content = read_regular(file, 2 * MAX_BYTES)
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
            # torch.save does not compress.
            if len(members) != 1 or members[0].compress_type != zipfile.ZIP_STORED:
                raise ConfigError(f"{file} is not a training_args.bin: it has no data.pkl as torch.save writes it")
            found = interpret(archive.read(members[0]))
    except ConfigError:
        raise
    except Exception as cause:  # zipfile and pickletools raise many types on damaged bytes
        why = str(cause) or type(cause).__name__
        raise ConfigError(f"{file} cannot be read as a training_args.bin: {why:.200}") from cause
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
    for number, (opcode, arg, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if number > MAX_OPCODES:
            raise ValueError(f"more than {MAX_OPCODES:,} opcodes")
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
        stack.append(Inert(f"{_name(module)}.{_name(attribute)}"))
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
        target.update(zip(map(_name, items[::2]), items[1::2], strict=True))
    elif arg is not None:
        stack.append(arg)  # a text or a number
    else:
        raise ValueError(f"unexpected opcode {name}")


def _name(value: Any) -> str:
    # Never the text of another value: shared tuples in tuples have an exponential one.
    if not isinstance(value, str | int | float):
        raise ValueError(f"a name is a {type(value).__name__}")
    return str(value)


def _since_mark(stack: list[Any]) -> list[Any]:
    at = next(at for at in reversed(range(len(stack))) if stack[at] is _MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _add(stack: list[Any], items: list[Any]) -> None:
    if isinstance(stack[-1], list):
        stack[-1].extend(items)
    # The members of a set are not needed: no field that is read here holds one.


NO_RATIOS = (
    "log s of each sequence, and which sequences were clipped: {system} does not write log-probs to disk, so no ε can "
    "be suggested from these files"
)
NO_NOISE = "the error of the sampler's log-probs (noise/): {system} does not write them to disk"


@dataclass
class Found:
    """What was read of another system's run."""

    draft: Draft
    version: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by step
    unknown: list[str] = field(default_factory=list)


def audit_files(paths: Sequence[Path], run: Path) -> dict[str, Any]:
    """Read the files below `paths` and write the run directory `run`; returns the content of its audit.json."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: pass the output folder of TRL, verl or ms-swift")
    if (run / "config.yaml").is_file() and not (run / "audit.json").is_file():
        raise ConfigError(f"{run} holds a run of gspo; choose another folder with --out")
    try:
        return _audit(paths, run)
    except GspoError:
        raise
    except Exception as cause:  # their files may hold any value anywhere
        place = ", ".join(map(str, paths))
        raise ConfigError(
            f"{place}: a file holds a value that is not expected ({type(cause).__name__}: {cause})"
        ) from cause


def _audit(paths: Sequence[Path], run: Path) -> dict[str, Any]:
    found = _reader(paths)(paths)
    found.unknown += [text.format(system=found.draft.system) for text in (NO_RATIOS, NO_NOISE)]
    if found.draft.system == "TRL":
        found.unknown[-2] += "; gspo.audit.TRLCallback(trainer) records them while TRL trains"
    if not found.metrics and not found.samples:
        found.unknown.append("everything that training measured: no metrics and no samples were found")
    directory = RunDir(run)
    try:
        directory.cut_back(0)
        source = ", ".join(str(path) for path in paths)
        written = write_audit(run, found.draft, version=found.version, source=source, unknown=found.unknown)
        for row in found.metrics:
            directory.metrics(row)
        for step, rows in found.samples.items():
            directory.samples(step, rows, {})
        last = max((row["step"] for row in found.metrics), default=max(found.samples, default=0))
        directory.log(f"read from {source}; finished after step {last}")
    finally:
        directory.close()
    return written


def _reader(paths: Sequence[Path]) -> Callable[[Sequence[Path]], Found]:
    """The system that wrote the files, by the files that only it writes."""
    marks: tuple[tuple[str, Callable[[Path], bool], Callable[[Sequence[Path]], Found]], ...] = (
        ("args.json", _is_swift, read_swift),
        ("config.yaml", _is_verl, read_verl),
        ("trainer_state.json", lambda _: True, read_trl),
        ("training_args.bin", lambda _: True, read_trl),
    )
    for name, is_it, reader in marks:
        if any(is_it(file) for file in files(paths, name)):
            return reader
    if any(samples.is_verl_dump(file) for file in files(paths, "*.jsonl")):
        return read_verl
    looked = "TRL (trainer_state.json, training_args.bin), verl (.hydra/config.yaml, N.jsonl of rollout_data_dir)"
    raise ConfigError(
        f"no run of another trainer in {', '.join(map(str, paths))}: found neither the files of {looked} nor of "
        "ms-swift (args.json, logging.jsonl)"
    )


def files(paths: Iterable[Path], name: str) -> list[Path]:
    """Files of this name in the paths, their folders and their folders' folders, in the order of names with numbers."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            if path.match(name):
                found[path] = None
        else:
            for depth in ("", "*/", ".hydra/", "*/*/"):
                found.update(dict.fromkeys(file for file in path.glob(depth + name) if file.is_file()))
    return sorted(found, key=lambda file: [int(part) if part.isdecimal() else part for part in _words(str(file))])


def _words(name: str) -> list[str]:
    # Texts and numbers alternate, so that lists of two names compare: checkpoint-10 is after checkpoint-9.
    return re.split(r"(\d+)", name)


def _is_swift(file: Path) -> bool:
    with contextlib.suppress(ConfigError):
        return not {"swift_version", "rlhf_type"}.isdisjoint(read_json(file, ConfigError))
    return False


def _is_verl(file: Path) -> bool:
    # A file that names the key and cannot be read is verl's: the error is better than to look for another system.
    with contextlib.suppress(OSError):
        return re.search(rb"^actor_rollout_ref\b", read_regular(file), re.MULTILINE) is not None
    return False


# -- TRL


def read_trl(paths: Sequence[Path]) -> Found:
    configs, states = files(paths, "training_args.bin"), files(paths, "trainer_state.json")
    # The newest checkpoint has the whole history.
    read = [read_json(file, ConfigError) for file in states]
    state = max(read, key=lambda one: samples.finite(one.get("global_step")) or 0, default={})
    values = read_training_args(configs[-1]) if configs else {}
    draft = from_trl(values, configs[-1].name) if configs else Draft("TRL", "training_args.bin", {})
    found = Found(draft, _trl_version(paths))
    if not configs:
        draft.unexplained = "the config is unknown: there is no training_args.bin (TRL writes it to checkpoint-N/)"
    if not states:
        found.unknown.append("curves: there is no trainer_state.json (TRL writes it to checkpoint-N/)")
    history = state.get("log_history")
    found.metrics = samples.trl_rows(history if isinstance(history, list) else [], draft, found.unknown)
    found.samples = samples.trl_samples(files(paths, "completions_*.parquet"), draft, history, found.unknown)
    return found


def _trl_version(paths: Sequence[Path]) -> str:
    """From the model card that TRL writes beside a checkpoint; another major version than 1 is refused."""
    for file in reversed(files(paths, "README.md")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if named := re.search(r"^- TRL: (\d+)(\.[\w.]+)?", read_regular(file).decode(), re.MULTILINE):
                if named[1] != "1":
                    raise ConfigError(f"{file}: the run is of TRL {named[1]}{named[2] or ''}; gspo audit reads TRL 1.x")
                return f"{named[1]}{named[2] or ''}"
    return ""


# -- verl


def read_verl(paths: Sequence[Path]) -> Found:
    configs = [file for file in files(paths, "config.yaml") if _is_verl(file)]
    draft = (
        from_verl(flat(read_yaml(configs[-1], ConfigError)), configs[-1].name)
        if configs
        else Draft("verl", ".hydra/config.yaml", {})
    )
    if not configs:
        draft.unexplained = (
            "the config is unknown: pass the Hydra folder of the run too (outputs/DATE/TIME, with .hydra/config.yaml)"
        )
    found = Found(draft)
    lines = files(paths, "*.jsonl")
    found.samples = samples.verl_samples([file for file in lines if samples.is_verl_dump(file)])
    tables = [samples.lines_of(file) for file in lines if not samples.is_verl_dump(file)]
    found.metrics = samples.verl_rows([row for rows in tables for row in rows], draft)
    if not found.metrics:
        found.unknown.append(
            "curves and clip shares: pass the jsonl of verl's file logger (trainer.logger=[console,file]); without it "
            "only rewards are known"
        )
        found.metrics = samples.reward_rows(found.samples, draft)
    if not found.samples:
        found.unknown.append("samples: pass the folder of trainer.rollout_data_dir")
    found.unknown.append("advantages and lengths of single samples: verl's rollout dump has text and score only")
    return found


# -- ms-swift


def read_swift(paths: Sequence[Path]) -> Found:
    configs = [file for file in files(paths, "args.json") if _is_swift(file)]
    values = read_json(configs[-1], ConfigError)
    kind = values.get("rlhf_type")
    if kind != "grpo":
        raise ConfigError(f"{configs[-1]}: rlhf_type is {kind}; gspo audit reads runs of rlhf_type grpo")
    draft = from_swift(values, configs[-1].name)
    found = Found(draft, str(values.get("swift_version") or ""))
    history = [row for file in files(paths, "logging.jsonl") for row in samples.lines_of(file)]
    found.metrics = samples.swift_rows(history, draft, found.unknown)
    found.samples = samples.swift_samples(files(paths, "completions.jsonl"), draft, history)
    if not history:
        found.unknown.append("curves: there is no logging.jsonl")
    if not found.samples:
        found.unknown.append("samples: there is no completions.jsonl (--log_completions true writes it)")
    return found
