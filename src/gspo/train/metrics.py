"""The numbers of a step, by the names of docs/metrics.md. Shares are of the population their line says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.objectives.diagnostics import clip_fractions, effective_sample_size, log_s_summary
from gspo.train.batch import Batch
from gspo.train.clock import Clock
from gspo.train.step import StepReport
from gspo.types import Score


def step_metrics(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """Everything but times, evaluation and the clip range."""
    lengths = batch.trained_tokens
    finished = np.array([s.finish != "length" for s in batch.samples])
    groups = [batch.advantages[batch.group_of == g] for g in range(len(batch.groups))]
    behind = [version - s.versions[s.mask] for s in batch.samples if s.mask.any()]
    oldest = [int(ages.max()) for ages in behind]
    out: dict[str, Any] = {
        "reward/mean": _mean(batch.rewards[batch.scored]),
        "reward/std": float(batch.rewards[batch.scored].std()) if batch.scored.any() else None,
        "reward/zero_variance_groups": float(np.mean([not a.any() for a in groups])) if groups else None,
        "reward/at_clip": None if batch.at_clip is None else _mean(batch.at_clip[batch.scored]),
        "reward/failures": int((~batch.scored).sum()),
        **_parts(batch),
        "length/mean": _mean(lengths),
        "length/max": int(lengths.max()) if len(lengths) else None,
        "length/clipped_mean": _mean(lengths[(report.clipped_low + report.clipped_high) > 0]),
        "length/truncated": float(1 - finished.mean()) if len(finished) else None,
        "staleness/mean": _mean(np.array(oldest)),
        "staleness/max": max(oldest, default=0),
        "staleness/token_mean": _mean(np.concatenate(behind)) if behind else None,
        "staleness/mixed": _mean(np.array([int(ages.min()) != int(ages.max()) for ages in behind])),
        "policy/entropy": _weighted(report.entropy, lengths),
        "policy/kl_behavior": _weighted(report.kl_behavior, lengths),
        "loss/mean": _mean(np.array(report.losses)),
        "grad/norm": _mean(np.array(report.grad_norms)),
        "grad/norm_max": max(report.grad_norms, default=None),
        "grad/skipped_updates": report.taken.count(False),
        "skipped/zero_advantage_sequences": report.num_skipped,
    }
    if batch.reference_logp is not None:
        out["policy/kl_reference"] = _weighted(report.kl_reference, lengths)
    if batch.kl_penalty is not None:
        out["reward/kl_penalty"] = _mean(batch.kl_penalty[batch.trainable])
    first, entered = batch.minibatch == 0, np.isfinite(report.log_s)
    # With one mini-batch all there is is the first; its ratios are 1 unless π_old is the sampler's.
    later = entered & (~first if batch.minibatch.max(initial=0) > 0 else True)
    out |= _ratio(report, lengths, later)
    opening = np.abs(report.log_s[first & entered])
    out["ratio/first_minibatch_max_abs"] = float(opening.max()) if len(opening) else None
    out |= _noise(report.noise_log_s[fresh(batch, version)])
    out |= _routing(batch, report, version)
    out |= _correction(report, lengths)
    return out


def time_metrics(
    batch: Batch, report: StepReport, clock: Clock, num_sampled: int, *, beside: bool = False
) -> dict[str, float]:
    """Seconds by part, and tokens per second; call it last.

    num_sampled: tokens sampled since the last step; beside: while the trainer did something else, too.
    """
    sampled = sum(len(s.tokens) for s in batch.samples)
    # As a plain trainer would count them: prompt and completion of every sequence, trained or skipped.
    whole = sum(len(batch.groups[g].prompt.tokens) for g in batch.group_of) + sampled
    seconds = clock.seconds
    return {
        **{f"time/{name}_s": value for name, value in (seconds | report.seconds).items()},
        "time/step_s": clock.total(),
        "throughput/rollout_tokens_s": num_sampled
        / max(clock.total() if beside else seconds.get("rollout", 0.0), 1e-9),
        "throughput/train_tokens_s": whole / max(seconds.get("train", 0.0), 1e-9),
    }


def fresh(batch: Batch, version: int) -> NDArray[np.bool_]:
    """Sequences whose every token was sampled by the current weights: only these measure noise."""
    return np.array([bool((s.versions == version).all()) for s in batch.samples], dtype=bool)


def noise_floor(report: StepReport, batch: Batch, version: int) -> float | None:
    """p95 of |log s| between sampler and trainer at the same weights; None where nothing measured it."""
    noise = report.noise_log_s[fresh(batch, version)]
    noise = noise[np.isfinite(noise)]
    return float(np.quantile(np.abs(noise), 0.95)) if len(noise) else None


def _ratio(report: StepReport, lengths: NDArray[np.int64], which: NDArray[np.bool_]) -> dict[str, Any]:
    log_s = torch.from_numpy(report.log_s[which])
    stats = {
        "num_tokens": torch.from_numpy(lengths[which].astype(np.float64)),
        "clipped_low": torch.from_numpy(report.clipped_low[which]),
        "clipped_high": torch.from_numpy(report.clipped_high[which]),
    }
    shares = clip_fractions(stats) if len(log_s) else {}
    return {
        **{f"ratio/log_s_{name}": float(value) if len(log_s) else None for name, value in log_s_summary(log_s).items()},
        "clip/sequences_low": float(shares["sequences_low"]) if shares else None,
        "clip/sequences_high": float(shares["sequences_high"]) if shares else None,
        "clip/tokens": float(shares["tokens"]) if shares else None,
        "ess/sequences": float(effective_sample_size(log_s)) if len(log_s) else None,
    }


def _noise(noise: NDArray[np.float64]) -> dict[str, Any]:
    noise = noise[np.isfinite(noise)]
    if not len(noise):
        return {"noise/log_s_mean": None, "noise/log_s_std": None, "noise/log_s_p95_abs": None}
    return {
        "noise/log_s_mean": float(noise.mean()),
        "noise/log_s_std": float(noise.std()),
        "noise/log_s_p95_abs": float(np.quantile(np.abs(noise), 0.95)),
    }


def _correction(report: StepReport, lengths: NDArray[np.int64]) -> dict[str, Any]:
    """The behavior weight π_old/μ, as it was before anything bounded it; nothing where the loss is not corrected."""
    seen = np.isfinite(report.correction_raw)
    if not seen.any():
        return {}
    raw = report.correction_raw[seen]
    return {
        "correction/raw_mean": float(raw.mean()),
        **{f"correction/raw_{name}": float(np.quantile(raw, q)) for name, q in (("p05", 0.05), ("p95", 0.95))},
        "correction/raw_max": float(raw.max()),
        "correction/weight_mean": float(report.correction[seen].mean()),
        "correction/outside": float(report.correction_outside[seen].sum() / max(lengths[seen].sum(), 1)),
    }


def _routing(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """How far a mixture's experts moved; nothing of a dense model."""
    if report.flips is None or report.flipped_tokens is None or report.sampler_flips is None:
        return {}
    lengths, now = batch.trained_tokens, fresh(batch, version)
    layers = range(report.flips.shape[1])
    return {
        "moe/expert_flip_rate": _weighted(report.flips.mean(1), lengths),
        "moe/tokens_with_flip": _weighted(report.flipped_tokens, lengths),
        "moe/sampler_flip_rate": _weighted(report.sampler_flips.mean(1)[now], lengths[now]),
        **{f"moe/flip_rate_layer_{i:02d}": _weighted(report.flips[:, i], lengths) for i in layers},
    }


def _parts(batch: Batch) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for outcome in group.outcomes:
            for name, value in outcome.parts.items() if isinstance(outcome, Score) else ():
                values.setdefault(name, []).append(value)
    return {f"reward/part_{name}": float(np.mean(v)) for name, v in values.items()}


def sample_rows(
    batch: Batch, report: StepReport, step: int, decode: Callable[[Sequence[int]], str]
) -> list[Mapping[str, Any]]:
    """One object per sample, for samples/step_*.jsonl."""
    piece = cache(lambda token: decode([token]))
    rows: list[Mapping[str, Any]] = []
    index = 0
    for group in batch.groups:
        for sample, text, outcome in zip(group.samples, group.texts, group.outcomes, strict=True):
            clipped = report.clipped_low[index] + report.clipped_high[index]
            rows.append(
                {
                    "step": step,
                    "sequence": index,
                    "submission": sample.id.submission,
                    "sample": sample.id.sample,
                    "prompt": group.prompt.text,
                    "completion": text,
                    "answer": group.prompt.data.get("answer"),
                    "reward": batch.rewards[index],
                    "reward_parts": dict(outcome.parts) if isinstance(outcome, Score) else None,
                    "failure": None if isinstance(outcome, Score) else f"{outcome.kind}: {outcome.message}",
                    "advantage": batch.advantages[index],
                    "length": int(batch.trained_tokens[index]),
                    "finish": sample.finish,
                    "log_s": report.log_s[index],
                    "clipped": bool(clipped > 0) if np.isfinite(clipped) else None,
                    "minibatch": int(batch.minibatch[index]),
                    "version": int(sample.versions[-1]) if len(sample.versions) else None,
                    "oldest_version": int(sample.versions.min()) if len(sample.versions) else None,
                    "pieces": [piece(t) for t in sample.tokens[sample.mask].tolist()] if index in report.logp else None,
                }
            )
            index += 1
    return rows


def token_tensors(batch: Batch, report: StepReport) -> dict[str, np.ndarray]:
    """Per-token values of the kept sequences: `<sequence>/tokens`, `/behavior_logp`, `/logp`, `/entropy`."""
    out: dict[str, np.ndarray] = {}
    for index in sorted(report.logp):
        sample = batch.samples[index]
        out[f"{index}/tokens"] = np.ascontiguousarray(sample.tokens[sample.mask])
        out[f"{index}/behavior_logp"] = np.ascontiguousarray(sample.behavior_logp[sample.mask])
        out[f"{index}/logp"] = report.logp[index]
        out[f"{index}/entropy"] = report.token_entropy[index]
    return out


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _weighted(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float | None:
    """Token mean from per-sequence token means, over the sequences that entered the model."""
    seen = np.isfinite(values)
    total = weights[seen].sum()
    return float((values[seen] * weights[seen]).sum() / total) if total else None
