"""The metrics of a step, and the alarms about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner import Batch, Noise, StepReport, noise_of
from gspo.objectives import clip_fractions, effective_sample_size, log_s_summary
from gspo.stats import COLLAPSE
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


# Steps in a row before a check warns. It warns again after 2, 4, 8, … times as many.
PATIENCE = 20


REPLACED_SETTINGS = (
    "note: the agent sets temperature, top_p, top_k or min_p, and the run's values are used instead (gconfig.*): the "
    "trainer needs one known distribution; agent/settings_replaced counts these requests"
)


def first_step_message(metrics: Mapping[str, Any]) -> str | None:
    """What to say at once if no group of the first batch has different rewards: the likely cause, by evidence."""
    if metrics.get("step") != 1 or metrics.get("reward/zero_variance_groups") != 1.0:
        return None
    mean, is_equal = metrics.get("reward/mean"), metrics.get("reward/std") == 0.0
    nothing = "nothing was learnt from the first batch, because the samples of every prompt earn the same"
    if metrics.get("length/truncated") == 1.0:
        why = "every completion was truncated; set gconfig.max_new_tokens higher, or train the model to end its answers"
    elif is_equal and mean == 0.0 and metrics.get("reward/part_format") == 0.0:
        why = "no completion has the wanted format (reward/part_format is 0); show it in the prompt, or train it first"
    elif is_equal and mean == 0.0:
        why = (
            "every reward of the first batch is 0: the reward does not match the completions, or the problems are too "
            "hard (`gspo preview` shows completions and rewards, `gspo doctor --reward` checks the reward)"
        )
    elif is_equal and mean is not None and mean >= 1.0:
        why = "every completion is correct: the problems are too easy for this model"
    else:
        why = "prompts are either too easy or too hard; set gconfig.n_samples or gconfig.temperature higher"
    return f"{nothing}: {why}"


def alarms(
    metrics: Mapping[str, Any],
    counts: dict[str, int],
    *,
    clips: bool,
    num_updates: int,
    own_forward: bool,
    noise_is_forced: bool = False,
    by_sequence: bool = True,
    history: Callable[[], Sequence[Mapping[str, Any]]] = list,
) -> Iterator[str]:
    """Warnings of this step. `counts` (steps in a row, by alarm) belongs to the caller and is in the checkpoint.

    own_forward: π_old of mini-batch 1 is its own detached forward pass, so its ratios must be 1.
    noise_is_forced: the user has allowed a π_old that is noisier than the clip range.
    by_sequence: one ratio per sequence. With one per token, a few clipped tokens in every sequence are usual, and
    `actor.eps_clip: auto` is an error.
    history: reads the metrics of all steps; called only if a warning needs them.
    """
    if (at_clip := metrics.get("reward/at_clip") or 0.0) > 0.01:
        counts["rewards clipped"] = counts.get("rewards clipped", 0) + 1
        # bit_count() == 1 is true for powers of two: the warning is repeated after 1, 2, 4, 8, … steps.
        if counts["rewards clipped"].bit_count() == 1:  # at once: no other metric shows it
            yield (
                f"{at_clip:.0%} of the rewards are at or beyond actor.reward_clip and look equal to the trainer; set "
                "actor.reward_clip higher or actor.reward_scaling lower"
            )
    if own_forward and (worst := metrics.get("ratio/first_minibatch_max_abs")) is not None and worst > 1e-6:
        yield f"mini-batch 1 has a ratio other than 1 (|log s| up to {worst:.2e}): π_old is not its own forward pass"
    lasting = _lasting_conditions(metrics, clips, num_updates, noise_is_forced, by_sequence)
    for name, (holds, message) in lasting.items():
        # Warn after PATIENCE, 2·PATIENCE, 4·PATIENCE, … steps in a row.
        counts[name] = counts.get(name, 0) + 1 if holds else 0
        if (
            holds
            and counts[name] >= PATIENCE
            and (counts[name] // PATIENCE).bit_count() == 1
            and not counts[name] % PATIENCE
        ):
            fall = _fall(history(), counts[name]) if name == "nothing to learn" else None
            yield fall or message.format(n=counts[name])


def _fall(rows: Sequence[Mapping[str, Any]], num: int) -> str | None:
    """What to say if the reward was higher before the last `num` steps; None: it was not."""
    seen = [row for row in rows if row["step"] > 0 and row.get("reward/mean") is not None]
    before, since = [row["reward/mean"] for row in seen[:-num]], seen[-num:]
    # The median, because single steps of a task that is too hard earn something by luck.
    if not before or median(before) <= 0 or since[-1]["reward/mean"] >= COLLAPSE * median(before):
        return None
    first = since[0]
    return (
        f"the reward fell from {max(before):.3g} to {first['reward/mean']:.3g} at step {first['step']}, and every "
        f"group has had equal rewards for {num} steps; likely the update was too large: the learning rate is "
        f"{first['optimizer/lr']:g}; set actor.optimizer.lr lower and start a new run"
    )


def _lasting_conditions(
    metrics: Mapping[str, Any], clips: bool, num_updates: int, noise_is_forced: bool, by_sequence: bool
) -> dict[str, tuple[bool, str]]:
    """By alarm: whether its condition holds in this step, and the warning after {n} such steps in a row."""
    clipped = (metrics.get("clip/sequences_low") or 0.0) + (metrics.get("clip/sequences_high") or 0.0)
    seen = metrics.get("ratio/log_s_std") is not None
    age = metrics.get("staleness/max") or 0
    entropy = metrics.get("policy/entropy")  # 0.0 is a value, so no `or` here
    noise = (metrics.get("noise/log_s_p95_abs") or 0.0) if metrics.get("policy/proximal") == "rollout" else 0.0
    whole, auto = ("sequence", ", or actor.eps_clip=auto") if by_sequence else ("token", "")
    many = clipped if by_sequence else metrics.get("clip/tokens") or 0.0
    # Without a clip range ε is infinite, and no noise is above it.
    eps = min(metrics.get("clip/eps_low") or math.inf, metrics.get("clip/eps_high") or math.inf)
    return {
        "noise above the clip range": (
            noise > eps and not noise_is_forced,
            "the sampler's log-probs are used as π_old, and their noise was above the clip range for {n} steps "
            f"(noise/log_s_p95_abs); set actor.prox_logp_method=recompute or actor.eps_clip higher{auto}",
        ),
        "nothing clipped": (
            clips and num_updates > 1 and seen and clipped == 0 and metrics.get("clip/sequences_low") is not None,
            f"no {whole} was clipped" + " for {n} steps: the clip range is wider than the policy's drift; "
            f"set actor.eps_clip lower{auto}",
        ),
        "most clipped": (
            clips and many > 0.5,
            f"more than half of the {whole}s were clipped"
            + " for {n} steps: "
            + (
                f"the ratio compares with weights up to {age} versions old, so it is not 1 before any update; set "
                "actor.use_decoupled_loss=true, which clips against the trainer's own π_old and weights by π_old/μ"
                if age and metrics.get("policy/proximal") == "rollout"
                else f"set actor.eps_clip higher or actor.optimizer.lr lower{auto}"
            ),
        ),
        "ratio stuck at 1": (
            num_updates > 1 and seen and metrics.get("ratio/log_s_max_abs") == 0.0,
            "every ratio was exactly 1 for {n} steps: π_old is the policy that is being trained, or no weight "
            "changes (learning rate 0?)",
        ),
        "nothing to learn": (
            metrics.get("reward/zero_variance_groups") == 1.0,
            "every group had equal rewards for {n} steps: the task is too hard, too easy, or the reward is broken; "
            "check samples/ and gconfig.n_samples",
        ),
        "entropy collapsed": (
            entropy is not None and entropy < 1e-3,
            "the policy's entropy has been below 0.001 for {n} steps: it no longer explores; set "
            "gconfig.temperature higher, or stop earlier",
        ),
    }
