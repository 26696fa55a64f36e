"""The numbers of a step, by the names of docs/metrics.md. Shares are of the population their line says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner.batch import Batch
from gspo.learner.proximal import Noise, noise_of
from gspo.learner.step import StepReport
from gspo.objectives.diagnostics import clip_fractions, effective_sample_size, log_s_summary
from gspo.system.clock import Clock
from gspo.types import Failure, Sample, Score


def step_metrics(batch: Batch, report: StepReport, version: int) -> dict[str, Any]:
    """Everything but times, evaluation and the clip range."""
    lengths = batch.trained_tokens
    scored = batch.scored & batch.is_first  # rewards are of trajectories
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
        "policy/entropy": _weighted(report.entropy, lengths),
        "policy/kl_behavior": _weighted(report.kl_behavior, lengths),
        "loss/mean": _mean(np.array(report.losses)),
        "grad/norm": _mean(np.array(report.grad_norms)),
        "grad/norm_max": max(report.grad_norms, default=None),
        "grad/skipped_updates": report.applied.count(False),
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
    out |= _noise(measured_noise(report.noise_log_s, batch, version))
    out |= _routing(batch, report, version)
    out |= _correction(report, lengths)
    out |= _episodes(batch)
    return out


def _episodes(batch: Batch) -> dict[str, Any]:
    """Turns and sequences of episodes; nothing where every sample is one completion."""
    trajectories = [sample for group in batch.groups for sample in group.samples]
    kinds = Counter(s.outcome.kind for s in trajectories if isinstance(s.outcome, Failure))
    if not any(s.is_episode for s in trajectories):
        return {}
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
    batch: Batch, report: StepReport, clock: Clock, num_sampled: int, *, beside: bool = False
) -> dict[str, float]:
    """Seconds by part, and tokens per second; call it last.

    num_sampled: tokens sampled since the last step; beside: while the trainer did something else, too.
    """
    # As a plain trainer would count them: prompt and completion of every sequence, trained or skipped.
    whole = sum(len(batch.prompt(i)) + len(s.tokens) for i, s in enumerate(batch.samples))
    seconds = clock.seconds
    return {
        **{f"time/{name}_s": value for name, value in (seconds | report.seconds).items()},
        "time/step_s": clock.total(),
        "throughput/rollout_tokens": num_sampled,
        "throughput/rollout_tokens_s": num_sampled
        / max(clock.total() if beside else seconds.get("rollout", 0.0), 1e-9),
        "throughput/train_tokens_s": whole / max(seconds.get("train", 0.0), 1e-9),
    }


def fresh(batch: Batch, version: int) -> NDArray[np.bool_]:
    """Sequences whose every token was sampled by the current weights: only these measure noise."""
    return np.array([bool((s.versions == version).all()) for s in batch.samples], dtype=bool)


def measured_noise(log_s: NDArray[np.float64], batch: Batch, version: int) -> Noise | None:
    """Sampler against trainer at the same weights, of `StepReport.noise_log_s`; None where nothing measured it."""
    which = fresh(batch, version)
    return noise_of(log_s[which], batch.trained_tokens[which])


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


def _noise(noise: Noise | None) -> dict[str, Any]:
    return {
        "noise/log_s_mean": None if noise is None else noise.mean,
        "noise/log_s_std": None if noise is None else noise.std,
        "noise/log_s_p95_abs": None if noise is None else noise.p95,
        "noise/log_s_centred_p95_abs": None if noise is None else noise.centred_p95,
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
            for branch, sequence in enumerate(sample.sequences):
                clipped = report.clipped_low[index] + report.clipped_high[index]
                versions = sequence.versions
                rows.append(
                    {
                        "step": step,
                        "sequence": index,
                        "submission": sample.id.submission,
                        "sample": sample.id.sample,
                        "prompt": group.prompt.text if sequence.prompt is None else decode(list(sequence.prompt)),
                        "completion": text
                        if sequence.mask.all() and not sample.rest
                        else decode(sequence.tokens.tolist()),
                        "answer": group.prompt.data.get("answer"),
                        "reward": batch.rewards[index],
                        "reward_parts": dict(outcome.parts) if isinstance(outcome, Score) else None,
                        "failure": None if isinstance(outcome, Score) else f"{outcome.kind}: {outcome.message}",
                        "advantage": batch.advantages[index],
                        "length": int(batch.trained_tokens[index]),
                        "finish": sequence.finish,
                        "log_s": report.log_s[index],
                        "clipped": bool(clipped > 0) if np.isfinite(clipped) else None,
                        "minibatch": int(batch.minibatch[index]),
                        "version": int(versions[-1]) if len(versions) else None,
                        "oldest_version": int(versions.min()) if len(versions) else None,
                        "pieces": [piece(t) for t in sequence.tokens[sequence.mask].tolist()]
                        if index in report.logp
                        else None,
                        **_turns(sample, sequence, branch, batch.token_advantages, index, decode),
                    }
                )
                index += 1
    return rows


def _turns(
    sample: Sample,
    sequence: Sample,
    branch: int,
    advantages: Mapping[int, NDArray[Any]] | None,
    index: int,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """What a row says of an episode: who spoke, in order; nothing of a plain completion."""
    if not sample.is_episode:
        return {}
    spans: list[dict[str, Any]] = []
    # A span is a run of tokens of one turn, sampled or the environment's.
    marks = np.stack([sequence.turns.astype(np.int64), sequence.mask.astype(np.int64)])
    cuts = [0, *(np.flatnonzero((np.diff(marks) != 0).any(0)) + 1).tolist(), len(sequence.tokens)]
    place = np.cumsum(sequence.mask) - 1  # of a token among the trained
    for begin, end in pairwise(cuts):
        if begin == end:
            continue
        trained, turn = bool(sequence.mask[begin]), int(sequence.turns[begin])
        span: dict[str, Any] = {"turn": turn, "by": "model" if trained else "environment"}
        span |= {"text": decode(sequence.tokens[begin:end].tolist()), "length": end - begin}
        if trained:
            span["reward"] = sample.turn_rewards.get(turn)
            if advantages is not None and index in advantages:
                span["advantage"] = float(advantages[index][place[begin]])
        spans.append(span)
    return {"branch": branch, "turns": spans}


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
