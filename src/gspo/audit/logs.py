"""Metrics that other trainers wrote, by our names: one row per rollout batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Any

from gspo.audit.foreign import Draft

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
    entries = [(log["step"], log) for log in history if isinstance(log, dict) and isinstance(log.get("step"), int)]
    return _update_rows(entries, draft, unknown)


def swift_rows(history: Sequence[Mapping[str, Any]], draft: Draft, unknown: list[str]) -> list[Row]:
    """Rows of logging.jsonl, whose step is written as `global_step/max_steps: 10/100`, by Megatron as `iteration`."""
    entries = []
    for log in history:
        step = str(log.get("global_step/max_steps") or log.get("iteration")).partition("/")[0]
        if step.isdecimal():
            entries.append((int(step), log))
    return _update_rows(entries, draft, unknown)


def verl_rows(lines: Sequence[Mapping[str, Any]], draft: Draft) -> list[Row]:
    """Rows of verl's file logger: {"step": 1, "data": {…}}; a step of verl is a rollout batch, as here."""
    rows = []
    for line in lines:
        step, data = line.get("step"), line.get("data")
        if isinstance(step, int) and step > 0 and isinstance(data, dict):
            row = {ours: _number(data[name]) for name, ours in VERL.items() if name in data}
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
        parts = {name for _, log in logs for name in log if name.startswith("rewards/") and name.endswith("/mean")}
        for name in sorted(parts):
            label = name.removeprefix("rewards/").removesuffix("/mean")
            row[f"reward/part_{label}"] = _mean([log.get(name) for _, log in logs])
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


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return float(value) if is_number else None


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [number for value in values if (number := _number(value)) is not None]
    return sum(numbers) / len(numbers) if numbers else None
