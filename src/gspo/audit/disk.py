"""`gspo audit PATH …`: the files that TRL, verl and ms-swift leave on disk, as a run directory with a report.

| system | config | metrics | samples |
|---|---|---|---|
| TRL | checkpoint-N/training_args.bin | trainer_state.json | completions/completions_*.parquet (log_completions) |
| verl | .hydra/config.yaml | the file logger's jsonl | rollout_data_dir/N.jsonl |
| ms-swift | args.json | logging.jsonl | completions.jsonl (log_completions) |
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gspo.audit import logs, samples
from gspo.audit.directory import write_audit
from gspo.audit.foreign import Draft
from gspo.audit.training_args import read_training_args
from gspo.audit.trl import from_swift, from_trl
from gspo.audit.verl import from_verl
from gspo.errors import ConfigError
from gspo.runs.directory import RunDir
from gspo.system.files import parse_yaml, read_jsonl, read_regular
from gspo.system.text import flat

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
    reader = _reader(paths)
    found = reader(paths)
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
    return sorted(found, key=lambda file: [int(part) if part.isdigit() else part for part in _words(str(file))])


def _words(name: str) -> list[str]:
    # Texts and numbers alternate, so that lists of two names compare: checkpoint-10 is after checkpoint-9.
    return re.split(r"(\d+)", name)


def _object(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(file))
        return found if isinstance(found, dict) else {}
    return {}


def _yaml(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        found = parse_yaml(read_regular(file))
        return found if isinstance(found, dict) else {}
    return {}


def _is_swift(file: Path) -> bool:
    return "swift_version" in (args := _object(file)) or "rlhf_type" in args


def _is_verl(file: Path) -> bool:
    return "actor_rollout_ref" in _yaml(file)


# -- TRL


def read_trl(paths: Sequence[Path]) -> Found:
    configs, states = files(paths, "training_args.bin"), files(paths, "trainer_state.json")
    # The newest checkpoint has the whole history.
    state = max((_object(file) for file in states), key=lambda one: one.get("global_step") or 0, default={})
    values = read_training_args(configs[-1]) if configs else {}
    draft = from_trl(values, configs[-1].name) if configs else Draft("TRL", "training_args.bin", {})
    found = Found(draft, _trl_version(paths))
    if not configs:
        draft.unexplained = "the config is unknown: there is no training_args.bin (TRL writes it to checkpoint-N/)"
    if not states:
        found.unknown.append("curves: there is no trainer_state.json (TRL writes it to checkpoint-N/)")
    history = state.get("log_history")
    found.metrics = logs.trl_rows(history if isinstance(history, list) else [], draft, found.unknown)
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
        from_verl(flat(_yaml(configs[-1])), configs[-1].name) if configs else Draft("verl", ".hydra/config.yaml", {})
    )
    if not configs:
        draft.unexplained = (
            "the config is unknown: pass the Hydra folder of the run too (outputs/DATE/TIME, with .hydra/config.yaml)"
        )
    found = Found(draft)
    lines = files(paths, "*.jsonl")
    found.samples = samples.verl_samples([file for file in lines if samples.is_verl_dump(file)])
    tables = [read_jsonl(file) for file in lines if not samples.is_verl_dump(file)]
    found.metrics = logs.verl_rows([row for rows in tables for row in rows], draft)
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
    values = _object(configs[-1])
    kind = values.get("rlhf_type")
    if kind != "grpo":
        raise ConfigError(f"{configs[-1]}: rlhf_type is {kind}; gspo audit reads runs of rlhf_type grpo")
    draft = from_swift(values, configs[-1].name)
    found = Found(draft, str(values.get("swift_version") or ""))
    history = [row for file in files(paths, "logging.jsonl") for row in read_jsonl(file)]
    found.metrics = logs.swift_rows(history, draft, found.unknown)
    found.samples = samples.swift_samples(files(paths, "completions.jsonl"), draft, history)
    if not history:
        found.unknown.append("curves: there is no logging.jsonl")
    if not found.samples:
        found.unknown.append("samples: there is no completions.jsonl (--log_completions true writes it)")
    return found
