"""One step of a TRL run as a row of metrics.jsonl and rows of samples, by the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.learner.proximal import noise_of
from gspo.monitor.metrics import noise_metrics, ratio_metrics

Floats = NDArray[np.float64]
Record = Mapping[str, Any]  # one micro-batch: arrays [B] of `FIELDS`, and numbers `update` and `loss`
FIELDS = (
    "index", "log_s", "clipped_low", "clipped_high", "length", "entropy", "noise", "kl_reference", "truncated",
)  # fmt: skip


def columns(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """The records of a step as arrays [m]: one entry per sequence and pass, in the order of training."""
    out = {name: np.concatenate([np.asarray(record[name]) for record in records]) for name in FIELDS}
    out["update"] = np.concatenate([np.full(len(record["index"]), record["update"]) for record in records])
    return out


def audit_step_metrics(
    samples: Sequence[Mapping[str, Any]], records: Sequence[Record], *, group_size: int, clips: bool, with_kl: bool
) -> dict[str, Any]:
    """Metrics of a step. `samples`: prompt, reward, advantage … of its rollout batch, groups one after another."""
    rewards = np.array([_number(sample["reward"]) for sample in samples])  # [n]
    advantages = np.array([_number(sample["advantage"]) for sample in samples])
    equal = equal_groups(rewards, group_size)
    scored = rewards[np.isfinite(rewards)]
    out: dict[str, Any] = {
        "reward/mean": float(scored.mean()) if len(scored) else None,
        "reward/std": float(scored.std()) if len(scored) else None,
        "reward/zero_variance_groups": float(equal.mean()) if len(equal) else None,
        "reward/failures": int((~np.isfinite(rewards)).sum()),
        **_parts(samples),
    }
    if not records:
        return out
    seen = columns(records)
    index, lengths = seen["index"], seen["length"]
    # Sequences of groups with equal rewards give no gradient; only with a KL term do they count as trained.
    learns = ~np.repeat(equal, group_size)[index] & (advantages[index] != 0)
    entered = np.isfinite(seen["log_s"]) & (learns | with_kl)
    first = seen["update"] == 0
    later = entered & (~first if seen["update"].max(initial=0) > 0 else True)
    arrays = (seen[name][later] for name in ("log_s", "clipped_low", "clipped_high", "length"))
    out |= ratio_metrics(*arrays)
    if not clips:
        out |= dict.fromkeys(("clip/sequences_low", "clip/sequences_high", "clip/tokens"))
    opening = np.abs(seen["log_s"][first & entered])
    once = np.unique(index, return_index=True)[1]  # one entry per sequence
    clipped = np.nan_to_num(seen["clipped_low"] + seen["clipped_high"]) > 0
    out |= {
        "ratio/first_minibatch_max_abs": float(opening.max()) if len(opening) else None,
        **noise_metrics(noise_of(seen["noise"][once], lengths[once])),
        "policy/entropy": _weighted(seen["entropy"], lengths),
        "length/mean": float(lengths[once].mean()),
        "length/max": int(lengths[once].max()),
        "length/clipped_mean": float(lengths[clipped].mean()) if clipped.any() else None,
        "length/truncated": float(seen["truncated"][once].mean()),
    }
    if with_kl:
        out["policy/kl_reference"] = _weighted(seen["kl_reference"], lengths)
    losses = [sum(r["loss"] for r in records if r["update"] == update) for update in np.unique(seen["update"])]
    return out | {"loss/mean": float(np.mean(losses))}


def equal_groups(rewards: Floats, group_size: int) -> NDArray[np.bool_]:
    """[groups] True where the rewards of a group are equal (up to rounding) or missing.

    >>> equal_groups(np.array([0.1, 0.1, 0.0, 1.0]), 2).tolist()
    [True, False]
    """
    groups = rewards[: len(rewards) // group_size * group_size].reshape(-1, group_size)
    spread = np.nan_to_num(groups.max(1) - groups.min(1)) if groups.size else np.zeros(len(groups))
    return spread <= 1e-6 * np.maximum(1.0, np.nan_to_num(np.abs(groups)).max(1, initial=0.0))


def audit_sample_rows(
    step: int, samples: Sequence[Mapping[str, Any]], records: Sequence[Record], group_size: int, clips: bool
) -> list[dict[str, Any]]:
    """Rows of samples/step_*.jsonl; ratios are those of a sequence's last pass."""
    last: dict[int, dict[str, Any]] = {}
    seen = columns(records) if records else {}
    for at, index in enumerate(seen["index"].tolist() if seen else ()):
        last[index] = {name: values[at] for name, values in seen.items()}
    rows = []
    for number, sample in enumerate(samples):
        at = last.get(number, {})
        clipped = at.get("clipped_low", np.nan) + at.get("clipped_high", np.nan)
        rows.append(
            {
                "step": step,
                "sequence": number,
                "submission": (step - 1) * (len(samples) // group_size) + number // group_size,
                "sample": number % group_size,
                **sample,
                "failure": None if np.isfinite(_number(sample["reward"])) else "no reward function gave a value",
                "length": int(at["length"]) if at else None,
                "finish": ("length" if at["truncated"] else "stop") if at else None,
                "log_s": at.get("log_s"),
                "clipped": bool(clipped > 0) if clips and np.isfinite(clipped) else None,
                "minibatch": int(at["update"]) if at else None,
                "version": step - 1,
                "oldest_version": step - 1,
                "pieces": None,
            }
        )
    return rows


def text_of(message: Any) -> str:
    """A prompt or completion as text: a string, or the messages of a conversation.

    >>> text_of([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?'
    """
    if isinstance(message, str):
        return message
    if isinstance(message, Sequence):
        return "\n".join(text_of(part) for part in message)
    if isinstance(message, Mapping):
        content = message.get("content", message.get("text"))
        return f"{message['role']}: {text_of(content)}" if "role" in message else text_of(content)
    return "" if message is None else str(message)


def _parts(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.get("reward_parts") or {}).items():
            if np.isfinite(number := _number(value)):
                values.setdefault(name, []).append(number)
    return {f"reward/part_{name}": float(np.mean(found)) for name, found in values.items()}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def _weighted(values: Floats, lengths: NDArray[np.int64]) -> float | None:
    """Token mean from per-sequence token means."""
    seen = np.isfinite(values) & (lengths > 0)
    return float((values[seen] * lengths[seen]).sum() / lengths[seen].sum()) if seen.any() else None
