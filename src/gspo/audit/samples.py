"""What other trainers wrote of their steps, metrics and samples, by our names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from gspo.audit.callback import equal_groups, text_of
from gspo.audit.foreign import Draft
from gspo.data import read_parquet
from gspo.errors import ConfigError, DataError
from gspo.system import parse_json, read_jsonl, reading

Row = dict[str, Any]

# TRL's and ms-swift's names → ours. Clip shares are named by the level of the ratio, in `_clip_names`.
TRL = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/zero_variance_groups",
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "length/truncated",
    "entropy": "policy/entropy",
    "kl": "policy/kl_reference",
    "loss": "loss/mean",
    "grad_norm": "grad/norm",
    "learning_rate": "optimizer/lr",
    "step_time": "step_time",
}
VERL = {
    "critic/score/mean": "reward/mean",
    "response_length/mean": "length/mean",
    "response_length/max": "length/max",
    "response_length/clip_ratio": "length/truncated",
    "actor/entropy": "policy/entropy",
    "actor/kl_loss": "policy/kl_reference",
    "actor/pg_loss": "loss/mean",
    "actor/grad_norm": "grad/norm",
    "actor/lr": "optimizer/lr",
    "actor/pg_clipfrac": "clip/tokens",
    "timing_s/gen": "time/rollout_s",
    "timing_s/update_actor": "time/forward_backward_s",
    "timing_s/step": "time/step_s",
}
MIXED = (
    "clip shares without mini-batch 1 (its ratio is 1): the log has means over {n} updates, so the shares are smaller "
    "than those of a run of gspo"
)


def trl_rows(history: Sequence[Any], draft: Draft, unknown: list[str]) -> list[Row]:
    """Rows of trainer_state.json's log_history."""
    entries = [(step_in(log["step"]), log) for log in history if isinstance(log, dict) and "step" in log]
    return _update_rows(entries, draft, unknown)


def swift_rows(history: Sequence[Mapping[str, Any]], draft: Draft, unknown: list[str]) -> list[Row]:
    """Rows of logging.jsonl, whose step is written as `global_step/max_steps: 10/100`, by Megatron as `iteration`."""
    entries = []
    for log in history:
        entries.append((step_in(log.get("global_step/max_steps") or log.get("iteration")), log))
    return _update_rows(entries, draft, unknown)


def verl_rows(lines: Sequence[Mapping[str, Any]], draft: Draft) -> list[Row]:
    """Rows of verl's file logger: {"step": 1, "data": {…}}; a step of verl is a rollout batch, as here."""
    rows = []
    for line in lines:
        step, data = step_in(line.get("step")), line.get("data")
        if step > 0 and isinstance(data, dict):
            row = {ours: finite(data[name]) for name, ours in VERL.items() if name in data}
            rows.append({"step": step, **row, **_eps(draft)})
    return rows


def _update_rows(entries: Sequence[tuple[int, Mapping[str, Any]]], draft: Draft, unknown: list[str]) -> list[Row]:
    """Logs of optimizer updates as rows of rollout batches: means over the updates of each batch."""
    updates, clip_names = draft.num_updates, _clip_names(draft)
    # An update that reuses samples logs no reward; evaluations and the summary at the end log no loss.
    entries = [(step, log) for step, log in entries if step > 0 and "loss" in log]
    single = [step for step, _ in entries] == list(range(1, len(entries) + 1))
    if entries and not single and updates > 1:
        each = entries[1][0] - entries[0][0] if len(entries) > 1 else entries[0][0]
        unknown.append(MIXED.format(n=each))
    batches: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
    for step, log in entries:
        batches.setdefault(ceil(step / updates), []).append((step, log))
    rows = []
    for batch, logs in batches.items():
        row = {ours: _mean([log.get(name) for _, log in logs]) for name, ours in TRL.items()}
        # The first update of a batch has the ratio 1.
        later = [log for step, log in logs if not (single and updates > 1 and (step - 1) % updates == 0)]
        row |= {ours: _mean([log.get(name) for log in later]) for name, ours in clip_names.items()}
        parts = dict[str, list[Any]]()
        for name, value in (item for _, log in logs for item in log.items()):
            if name.startswith("rewards/") and name.endswith("/mean"):
                parts.setdefault(name.removeprefix("rewards/").removesuffix("/mean"), []).append(value)
        row |= {f"reward/part_{label}": _mean(values) for label, values in sorted(parts.items())}
        seconds = row.pop("step_time")  # of an update, sampling included
        if seconds is not None and single:
            row["time/step_s"] = seconds * len(logs)
        rows.append({"step": batch, **{name: value for name, value in row.items() if value is not None}, **_eps(draft)})
    return rows


def _clip_names(draft: Draft) -> dict[str, str]:
    """TRL's clip shares count sequences where there is one ratio per sequence, and tokens otherwise."""
    if draft.keys.get("algorithm") == "cispo":
        return {"cispo_clip_ratio": "clip/tokens"}
    if draft.keys.get("actor.importance_sampling_level") == "token":
        return {"clip_ratio/region_mean": "clip/tokens"}
    return {"clip_ratio/low_mean": "clip/sequences_low", "clip_ratio/high_mean": "clip/sequences_high"}


def _eps(draft: Draft) -> Row:
    return {"clip/eps_low": draft.keys.get("actor.eps_clip"), "clip/eps_high": draft.keys.get("actor.eps_clip_higher")}


def finite(value: Any) -> float | None:
    """The value as a float; None if it is no number, or one that no float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    return float(value) if is_number else None


def step_in(value: Any) -> int:
    """The step in a number or in a text such as 10/100; 0: there is none."""
    if isinstance(value, str):
        head = value.partition("/")[0]
        return int(head) if head.isdecimal() and len(head) < 10 else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def _group_size(draft: Draft) -> int:
    return max(1, int(finite(draft.keys.get("gconfig.n_samples")) or 1))


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [number for value in values if (number := finite(value)) is not None]
    return sum(numbers) / len(numbers) if numbers else None


MAX_ROWS, MAX_BYTES = 1_000_000, 1 << 28  # of a file of samples
MAX_STEPS = 200  # steps whose samples are read: the page shows a part of them anyway


def trl_samples(tables: Sequence[Path], draft: Draft, history: Any, unknown: list[str]) -> dict[int, list[Row]]:
    """completions/completions_00012.parquet: one file per log, with the newest rollout batch."""
    if not tables:
        unknown.append("samples: there is no completions_*.parquet (log_completions=True writes it)")
        return {}
    names, found = _reward_names(history), {}
    for file in tables[-MAX_STEPS:]:
        try:
            rows = read_parquet(file, MAX_ROWS, MAX_BYTES)
        except DataError as problem:
            unknown.append(f"samples: {problem}")
            continue
        step = max((step_in(row.get("step")) for row in rows), default=0)
        if step > 0:
            # Updates of one rollout batch log the same samples.
            found[ceil(step / draft.num_updates)] = [(row, row.get("advantage")) for row in rows]
    weights = draft.values.get("reward_weights")
    return {step: _grouped(step, rows, draft, names, weights) for step, rows in found.items()}


def swift_samples(tables: Sequence[Path], draft: Draft, history: Any) -> dict[int, list[Row]]:
    """completions.jsonl: one object of columns per log."""
    names, found = _reward_names(history), {}
    for table in (table for file in tables for table in lines_of(file)[-MAX_STEPS:]):
        columns = {name: values for name, values in table.items() if isinstance(values, list)}
        size = min((len(values) for values in columns.values()), default=0)
        step = step_in(columns["step"][-1]) if size and "step" in columns else 0
        if step > 0:
            rows = [{name: values[at] for name, values in columns.items()} for at in range(size)]
            found[ceil(step / draft.num_updates)] = [(row, row.get("advantages")) for row in rows]
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
    step: int, rows: Sequence[tuple[Mapping[str, Any], Any]], draft: Draft, names: Sequence[str], weights: Any
) -> list[Row]:
    size = _group_size(draft)
    columns = {name for row, _ in rows for name in row}
    names = [name for name in names if name in columns]  # a log may have many more
    known = [finite(weight) for weight in weights] if isinstance(weights, list) else []
    out = []
    for number, (row, advantage) in enumerate(rows):
        parts = {name: row[name] for name in names if name in row}
        each = known if len(known) == len(parts) and None not in known else [1.0] * len(parts)
        scored = [
            w * v for w, v in zip(each, map(finite, parts.values()), strict=True) if w is not None and v is not None
        ]
        out.append(
            _row(step, number, number // size, row.get("prompt"), row.get("completion"))
            | {
                "sample": number % size,
                "reward": sum(scored) if scored else None,
                "reward_parts": parts,
                "advantage": finite(advantage),
            }
        )
    return out


def lines_of(file: Path) -> list[Row]:
    with reading(file, ConfigError):
        return read_jsonl(file)


def is_verl_dump(file: Path) -> bool:
    """Whether a jsonl file is a rollout dump: its first line has input, output and score."""
    try:
        with open(file, "rb") as stream:
            first = parse_json(stream.readline(10_000_000))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {"input", "output", "score"} <= first.keys()


def verl_samples(dumps: Sequence[Path]) -> dict[int, list[Row]]:
    """N.jsonl of rollout_data_dir. verl reorders a batch by length, so equal prompts are a group."""
    found: dict[int, list[Row]] = {}
    for file in dumps[-MAX_STEPS:]:
        prompts: dict[str, int] = {}
        sizes: dict[int, int] = {}
        for number, row in enumerate(lines_of(file)):
            step = step_in(row.get("step"))
            group = prompts.setdefault(text_of(row.get("input")), len(prompts))
            parts = {
                name: known
                for name, value in row.items()
                if name not in ("score", "step") and (known := finite(value)) is not None
            }
            found.setdefault(step, []).append(
                _row(step, number, group, row.get("input"), row.get("output"))
                | {
                    "sample": sizes.get(group, 0),
                    "answer": None if row.get("gts") is None else text_of(row["gts"]),
                    "reward": finite(row.get("score")),
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
        size = _group_size(draft)
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
