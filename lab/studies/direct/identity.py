"""Measure that GSPO, GSPO-token and GRPO have the same gradient on-policy: in float64, on sampled completions."""

from __future__ import annotations

from typing import Any

from gspo.config import Loaded
from gspo.system import Clock
from lab.studies.direct.gradients import gradient, opened, relative_difference, sampled


def measure(loaded: Loaded, settings: dict[str, Any], seed: int) -> dict[str, dict[str, float]]:
    """Largest difference from GSPO's gradient, relative to its largest entry; before and after one step of training."""
    # The same wide clip range for all. The sequences have different lengths, so that the aggregations can differ.
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    out: dict[str, dict[str, float]] = {}
    with opened(loaded) as loop:
        batch, policy = sampled(loop), loop.parts.learner.policy
        ours = gradient(policy, batch, "gspo", None, **wide).flat
        for name in ("gspo_token", "grpo", "dapo"):
            theirs = gradient(policy, batch, name, None, **wide).flat
            out[f"{name}, on-policy"] = {"difference": relative_difference(theirs, ours)}
        # The same batch after updates of the policy; π_old is the sampler's policy, before the updates.
        behavior = {i: batch.samples[i].behavior_logp[batch.samples[i].mask] for i in range(batch.num_sequences)}
        loop.update(batch, Clock())
        ours = gradient(policy, batch, "gspo", behavior, **wide).flat
        for name in ("gspo_token", "grpo"):
            theirs = gradient(policy, batch, name, behavior, **wide).flat
            out[f"{name}, after {settings['updates']} updates"] = {"difference": relative_difference(theirs, ours)}
    return out
