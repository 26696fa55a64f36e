"""How GSPO's gradient changes when the sampler's log-probs are used as π_old, for samplers of different error.

The sampler is the policy with rounded weights (computed in float32), or the policy itself with noise added to its
log-probs. It samples a batch, and the policy is updated on this batch with the trainer's own π_old. Then the gradient
of the whole batch is computed twice, with π_old from the trainer and from the sampler, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.config import Loaded
from gspo.learner import AutoClip, Batch, clip_range, next_eps
from gspo.system import Clock
from gspo.train import Leader
from lab.studies.direct.gradients import LogProbs, cosine, gradient, log_probs, opened, sampled

FIXED = (2e-3, 2.5e-3)  # ε of the quick-start
EDGES = {"fixed ε": FIXED, "paper's ε": (3e-4, 4e-4)}


def measure(loaded: Loaded, settings: dict[str, Any], seed: int) -> dict[str, dict[str, float]]:
    """Per sampler, centring and ε: cosine to the exact gradient, clipped fractions by sign, and the noise itself."""
    out: dict[str, dict[str, float]] = {}
    for sampler in settings["samplers"]:
        with opened(_sampled_by(loaded, sampler)) as loop:
            batch = _noisy(loop, sampled(loop), sampler, seed)
            behavior = {i: s.behavior_logp[s.mask].astype(np.float64) for i, s in enumerate(batch.samples)}
            exact = log_probs(loop.parts.learner.policy, batch)
            noise = {i: behavior[i] - exact[i] for i in exact}
            loop.update(batch, Clock())  # with the trainer's own π_old: prox_logp_method is recompute
            # The mean of log μ − log π_old per token, which mini-batch 1 of a run could measure at no extra cost.
            shift = float(np.concatenate(list(noise.values())).mean())
            own = {i: behavior[i] for i in exact}
            for edge, values in _compared(loop, batch, exact, own).items():
                out[f"{sampler}, {edge}"] = {**values, **_noise(noise, shift)}
            if sampler != "exact":  # its mean error is only rounding
                centred = {i: behavior[i] - shift for i in exact}
                for edge, values in _compared(loop, batch, exact, centred).items():
                    out[f"{sampler}, {edge}, re-centred"] = {**values, **_noise(noise, shift)}
    return out


def _compared(loop: Leader, batch: Batch, exact: LogProbs, proximal: LogProbs) -> dict[str, dict[str, float]]:
    policy, found = loop.parts.learner.policy, {}
    free = gradient(policy, batch, "gspo", proximal, clip_low=1.0, clip_high=1e6).log_s
    how = AutoClip()
    log_noise = np.array([float((proximal[i] - exact[i]).mean()) for i in exact])
    # As `eps_clip: auto` after its first step: ε from a quantile of |log s|, and at least the noise of π_old.
    eps = next_eps(None, free, batch.advantages, how)
    auto = clip_range(eps, float(np.quantile(np.abs(log_noise), 0.95)), how)
    for name, (low, high) in {**EDGES, "auto ε": auto}.items():
        edges = {"clip_low": low, "clip_high": high}
        ideal = gradient(policy, batch, "gspo", exact, **edges)
        got = gradient(policy, batch, "gspo", proximal, **edges)
        negative, positive = batch.has_gradient & (batch.advantages < 0), batch.has_gradient & (batch.advantages > 0)
        same = got.clipped[batch.has_gradient] == ideal.clipped[batch.has_gradient]
        found[name] = {
            "cosine": cosine(got.flat, ideal.flat) if float(got.flat.norm()) and float(ideal.flat.norm()) else 0.0,
            "clip_negative": float(got.clipped[negative].mean()),
            "clip_positive": float(got.clipped[positive].mean()),
            "clip_negative_exact": float(ideal.clipped[negative].mean()),
            "clip_positive_exact": float(ideal.clipped[positive].mean()),
            "clip_negative_excess": float(got.clipped[negative].mean() - ideal.clipped[negative].mean()),
            "decisions_changed": float(1 - same.mean()),
            "eps_low": low,
        }
    return found


def _noise(noise: Mapping[int, NDArray[np.float64]], shift: float) -> dict[str, float]:
    by_sequence = np.array([values.mean() for values in noise.values()])
    return {"noise_mean": shift, "noise_sd": float(by_sequence.std()), "noise_p95": _p95(by_sequence)}


def _p95(values: NDArray[np.float64]) -> float:
    return float(np.quantile(np.abs(values), 0.95))


def _sampled_by(loaded: Loaded, sampler: str) -> Loaded:
    """The config; if `sampler` is the name of a number format, with the sampler's weights rounded to it."""
    if sampler not in ("bf16", "int8"):
        return loaded
    rollout = loaded.config.rollout.model_copy(update={"sampler_precision": sampler})
    return replace(loaded, config=loaded.config.model_copy(update={"rollout": rollout}))


def _noisy(loop: Leader, batch: Batch, sampler: str, seed: int) -> Batch:
    """The batch; if `sampler` is `noise SD`, with zero-mean noise of this std added to its behavior log-probs."""
    kind, _, size = sampler.partition(" ")
    if kind != "noise":
        return batch
    groups = []
    for group in batch.groups:
        noisy = []
        for sample in group.samples:
            draws = rng.uniform(seed, "study noise", group.submission, sample.id.sample, np.arange(len(sample.tokens)))
            # Uniform with this standard deviation: zero-mean, bounded.
            error = (2 * draws - 1) * np.sqrt(3.0) * float(size)
            noisy.append(replace(sample, behavior_logp=(sample.behavior_logp + error).astype(np.float32)))
        groups.append(replace(group, samples=tuple(noisy)))
    return loop.assemble(groups, Clock())
