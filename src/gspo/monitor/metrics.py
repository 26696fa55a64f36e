"""The metrics of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner import Batch, Noise, StepReport, noise_of
from gspo.objectives import clip_fractions, effective_sample_size, log_s_summary
from gspo.system import Clock
from gspo.types import Failure, Score


def step_metrics(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """All metrics of a step except times, evaluation and the clip range."""
    # Per-sequence arrays have shape [n]; `groups` and `behind` are lists of arrays.
    lengths = batch.trained_tokens
    scored = batch.scored & batch.is_first  # one reward per trajectory
    finished = np.array([s.finish != "length" for s in batch.samples])
    groups = [batch.advantages[batch.group_of == g] for g in range(len(batch.groups))]
    behind = [version - s.versions[s.mask] for s in batch.samples if s.mask.any()]
    oldest = [int(ages.max()) for ages in behind]
    out: dict[str, Any] = {
        "reward/mean": _mean(batch.rewards[scored]),
        "reward/std": float(batch.rewards[scored].std()) if scored.any() else None,
        "reward/zero_variance_groups": float(np.mean([not a.any() for a in groups])) if groups else None,
        "reward/at_clip": None if batch.at_clip is None else _mean(batch.at_clip[scored]),
        "reward/failures": int((~batch.scored & batch.is_first).sum()),
        **_parts(batch),
        "length/mean": _mean(lengths),
        "length/max": int(lengths.max()) if len(lengths) else None,
        "length/clipped_mean": _mean(lengths[(report.clipped_low + report.clipped_high) > 0]),
        "length/truncated": float(1 - finished.mean()) if len(finished) else None,
        "staleness/mean": _mean(np.array(oldest)),
        "staleness/max": max(oldest, default=0),
        "staleness/token_mean": _mean(np.concatenate(behind)) if behind else None,
        "staleness/mixed": _mean(np.array([int(ages.min()) != int(ages.max()) for ages in behind])),
        "policy/entropy": token_mean(report.entropy, lengths),
        "policy/kl_behavior": token_mean(report.kl_behavior, lengths),
        "loss/mean": _mean(np.array(report.losses)),
        "grad/norm": _mean(np.array(report.grad_norms)),
        "grad/norm_max": max(report.grad_norms, default=None),
        "grad/skipped_updates": report.applied.count(False),
        "skipped/zero_advantage_sequences": report.num_skipped,
    }
    if batch.reference_logp is not None:
        out["policy/kl_reference"] = token_mean(report.kl_reference, lengths)
    if batch.teacher_kl is not None:
        out["policy/kl_teacher"] = token_mean(batch.teacher_kl, lengths)
    if batch.kl_penalty is not None:
        out["reward/kl_penalty"] = _mean(batch.kl_penalty[batch.trainable])
    # Sequences that were skipped have log_s NaN.
    first, entered = batch.minibatch == 0, np.isfinite(report.log_s)
    # With one mini-batch only the first exists; its ratios are 1 unless π_old is the sampler's. In a second pass the
    # weights have changed for all mini-batches.
    later = entered & (~first if batch.minibatch.max(initial=0) > 0 and report.num_epochs == 1 else True)
    out |= ratio_metrics(report.log_s[later], report.clipped_low[later], report.clipped_high[later], lengths[later])
    # In the first update the weights are unchanged, so ratios that differ from 1 show an error or sampler noise.
    opening = np.abs(report.log_s_at_start[np.isfinite(report.log_s_at_start)])
    out["ratio/first_minibatch_max_abs"] = float(opening.max()) if len(opening) else None
    out |= noise_metrics(measured_noise(report.noise_log_s, batch, version))
    out |= _kept(batch, report, version)
    out |= _routing(batch, report, version)
    out |= _correction(report, lengths)
    out |= _episodes(batch)
    return out


# Names that have no meaning if the completions come from the data set: nothing was sampled, scored or clipped.
_OF_SAMPLES = (
    "reward/", "staleness/", "ratio/", "clip/", "noise/", "ess/", "episode/", "correction/", "skipped/",
    "policy/kl_behavior", "policy/proximal", "length/clipped_mean", "length/truncated", "moe/",
    "throughput/rollout", "time/rollout_s", "time/reward_s", "time/proximal_s",
)  # fmt: skip


def supervised_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step that have a meaning in supervised fine-tuning."""
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_SAMPLES)}


def _episodes(batch: Batch) -> dict[str, Any]:
    """Turns and sequences of episodes; empty if every sample is one completion."""
    trajectories = [sample for group in batch.groups for sample in group.samples]
    kinds = Counter(s.outcome.kind for s in trajectories if isinstance(s.outcome, Failure))
    if not any(s.is_episode for s in trajectories):
        return {}
    # turns: distinct turn numbers among the model's tokens; words: tokens that the environment wrote.
    turns = [len({int(t) for s in sample.sequences for t in s.turns[s.mask]}) for sample in trajectories]
    words = [sum(int((~s.mask).sum()) for s in sample.sequences) for sample in trajectories]
    return {
        "episode/turns_mean": float(np.mean(turns)),
        "episode/turns_max": max(turns),
        "episode/sequences_mean": float(np.mean([1 + len(s.rest) for s in trajectories])),
        "episode/environment_tokens_mean": float(np.mean(words)),
        **{f"episode/failures_{kind}": kinds[kind] for kind in ("crash", "timeout", "limit", "infra")},
    }


def time_metrics(
    batch: Batch, report: StepReport, clock: Clock, num_sampled: int, *, background: bool = False
) -> dict[str, float]:
    """Seconds by part, and tokens per second; call it last.

    num_sampled: tokens sampled since the last step; background: sampling ran while the trainer trained.
    """
    # Counted as in a trainer without prefix sharing: prompt and completion of every sequence, trained or skipped.
    whole = sum(len(batch.prompt(i)) + len(s.tokens) for i, s in enumerate(batch.samples))
    seconds = clock.seconds
    return {
        **{f"time/{name}_s": value for name, value in (seconds | report.seconds).items()},
        "time/step_s": clock.total(),
        "throughput/rollout_tokens": num_sampled,
        "throughput/rollout_tokens_s": num_sampled
        / max(clock.total() if background else seconds.get("rollout", 0.0), 1e-9),
        "throughput/train_tokens_s": whole / max(seconds.get("train", 0.0), 1e-9),
    }


def fresh(batch: Batch, version: int) -> NDArray[np.bool_]:
    """[n] True where the current weights sampled every token: only these sequences measure noise."""
    return np.array([bool((s.versions == version).all()) for s in batch.samples], dtype=bool)


def measured_noise(log_s: NDArray[np.float64], batch: Batch, version: int) -> Noise | None:
    """Sampler against trainer at equal weights, from `StepReport.noise_log_s`; None if no sequence measured it."""
    which = fresh(batch, version)
    return noise_of(log_s[which], batch.trained_tokens[which])


def ratio_metrics(
    log_s: NDArray[np.float64],
    clipped_low: NDArray[np.float64],
    clipped_high: NDArray[np.float64],
    lengths: NDArray[np.int64],
) -> dict[str, Any]:
    """`ratio/`, `clip/` and `ess/` metrics of sequences [m]; clipped_low and clipped_high count tokens."""
    log_weight = torch.from_numpy(log_s)
    stats = {
        "num_tokens": torch.from_numpy(lengths.astype(np.float64)),
        "clipped_low": torch.from_numpy(clipped_low),
        "clipped_high": torch.from_numpy(clipped_high),
    }
    # A function of the user may not say what it clips.
    is_known = bool(np.isfinite(clipped_low).any())
    fractions, summary = clip_fractions(stats) if is_known else {}, log_s_summary(log_weight)
    return {
        **{f"ratio/log_s_{name}": float(value) if len(log_s) else None for name, value in summary.items()},
        "clip/sequences_low": float(fractions["sequences_low"]) if fractions else None,
        "clip/sequences_high": float(fractions["sequences_high"]) if fractions else None,
        "clip/tokens": float(fractions["tokens"]) if fractions else None,
        "clip/num_sequences": len(log_s),
        "ess/sequences": float(effective_sample_size(log_weight)) if len(log_s) else None,
    }


def noise_metrics(noise: Noise | None) -> dict[str, Any]:
    return {
        "noise/log_s_mean": None if noise is None else noise.mean,
        "noise/log_s_std": None if noise is None else noise.std,
        "noise/log_s_p95_abs": None if noise is None else noise.p95,
    }


def _correction(report: StepReport, lengths: NDArray[np.int64]) -> dict[str, Any]:
    """The behavior weight π_old/μ before and after truncation; empty without a correction."""
    # NaN where a sequence did not enter the model.
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


def _kept(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """The kept sets of truncated sampling; empty if nothing was recorded."""
    if report.kept_mass is None or report.kept_mass_at_start is None:
        return {}
    lengths, now = batch.trained_tokens, fresh(batch, version)
    sizes = np.concatenate([kept.counts for s in batch.samples if (kept := s.trained_kept) is not None])
    outside = token_mean(1 - report.kept_mass, lengths)
    return {
        "kept/tokens_mean": _mean(sizes),
        "kept/tokens_max": int(sizes.max(initial=0)),
        "kept/unknown_samples": sum(len(s.tokens) > 0 and not s.mask.any() for s in batch.samples),
        "kept/mass": token_mean(report.kept_mass_at_start[now], lengths[now]),
        "kept/mass_outside": outside,
    }


def _routing(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """Expert changes of a mixture of experts; empty for a dense model."""
    if report.flips is None or report.flipped_tokens is None or report.sampler_flips is None:
        return {}
    lengths, now = batch.trained_tokens, fresh(batch, version)
    # flips: [n, layers].
    layers = range(report.flips.shape[1])
    return {
        "moe/expert_flip_rate": token_mean(report.flips.mean(1), lengths),
        "moe/tokens_with_flip": token_mean(report.flipped_tokens, lengths),
        "moe/sampler_flip_rate": token_mean(report.sampler_flips.mean(1)[now], lengths[now]),
        **{f"moe/flip_rate_layer_{i:02d}": token_mean(report.flips[:, i], lengths) for i in layers},
    }


def _parts(batch: Batch) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for outcome in group.outcomes:
            for name, value in outcome.parts.items() if isinstance(outcome, Score) else ():
                values.setdefault(name, []).append(value)
    return {f"reward/part_{name}": float(np.mean(v)) for name, v in values.items()}


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def token_mean(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float | None:
    """Token mean from per-sequence token means, over the sequences that entered the model."""
    seen = np.isfinite(values)
    total = weights[seen].sum()
    return float((values[seen] * weights[seen]).sum() / total) if total else None
