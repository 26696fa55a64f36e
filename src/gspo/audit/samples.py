"""Samples that other trainers wrote, as rows of samples/step_*.jsonl. What they do not write is null."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from gspo.audit.foreign import Draft
from gspo.audit.rows import equal_groups, text_of
from gspo.system.files import read_jsonl
from gspo.system.imports import install_command

Row = dict[str, Any]
MAX_STEPS = 200  # steps whose samples are read: the page shows a part of them anyway


def trl_samples(tables: Sequence[Path], draft: Draft, history: Any, unknown: list[str]) -> dict[int, list[Row]]:
    """completions/completions_00012.parquet: one file per log, with the newest rollout batch."""
    if not tables:
        unknown.append("samples: there is no completions_*.parquet (log_completions=True writes it)")
        return {}
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        unknown.append(f"samples: reading completions_*.parquet needs pyarrow: {install_command('tasks')}")
        return {}
    names, found = _reward_names(history), {}
    for file in tables[-MAX_STEPS:]:
        try:
            rows = parquet.read_table(file).to_pylist()
        except (OSError, ValueError) as problem:
            unknown.append(f"samples of {file.name}: {problem}")
            continue
        step = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
        if step > 0:
            # Updates of one rollout batch log the same samples.
            found[ceil(step / draft.num_updates)] = [(row, row.get("advantage")) for row in rows]
    weights = draft.values.get("reward_weights")
    return {step: _grouped(step, rows, draft, names, weights) for step, rows in found.items()}


def swift_samples(tables: Sequence[Path], draft: Draft, history: Any) -> dict[int, list[Row]]:
    """completions.jsonl: one object of columns per log."""
    names, found = _reward_names(history), {}
    for table in (table for file in tables for table in read_jsonl(file)[-MAX_STEPS:]):
        columns = {name: values for name, values in table.items() if isinstance(values, list)}
        size = min((len(values) for values in columns.values()), default=0)
        steps = [str(step) for step in columns.get("step", ())]
        if size and steps and steps[-1].isdecimal():
            rows = [{name: values[at] for name, values in columns.items()} for at in range(size)]
            found[ceil(int(steps[-1]) / draft.num_updates)] = [(row, row.get("advantages")) for row in rows]
    weights = draft.values.get("reward_weights")
    return {step: _grouped(step, rows, draft, names, weights) for step, rows in found.items() if step > 0}


def _reward_names(history: Any) -> list[str]:
    """The reward functions, from the names `rewards/<function>/mean` of the log."""
    logged = (name for log in history or () if isinstance(log, dict) for name in log)
    return list(
        dict.fromkeys(
            n.removeprefix("rewards/").removesuffix("/mean")
            for n in logged
            if n.startswith("rewards/") and n.endswith("/mean")
        )
    )


def _grouped(
    step: int, rows: Iterable[tuple[Mapping[str, Any], Any]], draft: Draft, names: Sequence[str], weights: Any
) -> list[Row]:
    size = int(draft.keys.get("gconfig.n_samples", 1))
    out = []
    for number, (row, advantage) in enumerate(rows):
        parts = {name: row[name] for name in names if name in row}
        known = weights if isinstance(weights, list) and len(weights) == len(parts) else [1.0] * len(parts)
        scored = [w * v for w, v in zip(known, parts.values(), strict=True) if isinstance(v, int | float) and v == v]
        out.append(
            _row(step, number, number // size, row.get("prompt"), row.get("completion"))
            | {
                "sample": number % size,
                "reward": sum(scored) if scored else None,
                "reward_parts": parts,
                "advantage": advantage if isinstance(advantage, int | float) else None,
            }
        )
    return out


def is_verl_dump(file: Path) -> bool:
    """Whether a jsonl file is a rollout dump: its first line has input, output and score."""
    try:
        with open(file, "rb") as stream:
            first = json.loads(stream.readline(10_000_000))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"input", "output", "score"} <= first.keys()


def verl_samples(dumps: Sequence[Path]) -> dict[int, list[Row]]:
    """N.jsonl of rollout_data_dir. verl reorders a batch by length, so equal prompts are a group."""
    found: dict[int, list[Row]] = {}
    for file in dumps[-MAX_STEPS:]:
        prompts: dict[str, int] = {}
        sizes: dict[int, int] = {}
        for number, row in enumerate(read_jsonl(file)):
            step = row.get("step") if isinstance(row.get("step"), int) else 0
            group = prompts.setdefault(text_of(row.get("input")), len(prompts))
            score = row.get("score")
            parts = {
                name: value
                for name, value in row.items()
                if name not in ("score", "step") and isinstance(value, int | float) and not isinstance(value, bool)
            }
            found.setdefault(int(step or 0), []).append(
                _row(int(step or 0), number, group, row.get("input"), row.get("output"))
                | {
                    "sample": sizes.get(group, 0),
                    "answer": None if row.get("gts") is None else text_of(row["gts"]),
                    "reward": score if isinstance(score, int | float) else None,
                    "reward_parts": parts,
                }
            )
            sizes[group] = sizes.get(group, 0) + 1
    return {step: rows for step, rows in found.items() if step > 0}


def reward_rows(samples: Mapping[int, Sequence[Row]], draft: Draft) -> list[Row]:
    """Metrics that follow from samples alone: rewards, and groups whose rewards are equal."""
    rows = []
    for step, batch in samples.items():
        ordered = sorted(batch, key=lambda row: row["submission"])
        rewards = np.array([np.nan if row["reward"] is None else row["reward"] for row in ordered], dtype=float)
        size = int(draft.keys.get("gconfig.n_samples", 1))
        equal = equal_groups(rewards, size) if size > 1 and len(rewards) % size == 0 else np.array([])
        scored = rewards[np.isfinite(rewards)]
        rows.append(
            {
                "step": step,
                "reward/mean": float(scored.mean()) if len(scored) else None,
                "reward/std": float(scored.std()) if len(scored) else None,
                "reward/zero_variance_groups": float(equal.mean()) if len(equal) else None,
            }
        )
    return rows


def _row(step: int, number: int, group: int, prompt: Any, completion: Any) -> Row:
    empty = dict.fromkeys(
        ("answer", "failure", "advantage", "length", "finish", "log_s", "clipped", "minibatch", "version", "pieces")
    )
    return {
        "step": step,
        "sequence": number,
        "submission": group,
        "prompt": text_of(prompt),
        "completion": text_of(completion),
        **empty,
    }
