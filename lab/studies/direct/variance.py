"""The spread of token ratios, of their product and of their geometric mean by completion length, after training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gspo.config import Loaded
from gspo.learner import batch_with_advantages
from gspo.rollout import sample_groups
from gspo.system import Clock
from gspo.train import assembly, sampling_params
from lab.studies.direct.gradients import log_probs, opened, sampled


def measure(loaded: Loaded, settings: dict[str, Any], seed: int) -> dict[str, dict[str, float]]:
    """Standard deviations over pieces of each length, and the slopes of their logs over log length.

    The policy before training samples completions past EOS, so that all have the maximum length. Then the policy is
    trained for `steps` steps on its task, and the log-probs of the same tokens are computed with both policies.
    """
    lengths = [int(n) for n in settings["lengths"]]
    with opened(loaded) as loop:
        params = replace(
            sampling_params(loaded.config),
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            ignore_eos=True,
        )
        groups = sample_groups(
            [(10**6 + i, loop.parts.data.prompt(i)) for i in range(int(settings["prompts"]))],
            num_samples=int(settings["samples"]),
            params=params,
            sampler=loop.parts.sampler,
            rewards=loop.parts.rewards,
            decode=loop.parts.decode,
        )
        long = batch_with_advantages(groups, num_minibatches=1, **assembly(loaded))
        everything = np.ones(long.num_sequences, dtype=bool)
        before = log_probs(loop.parts.learner.policy, long, everything)
        for _ in range(int(settings["steps"])):
            batch = sampled(loop)
            loop.update(batch, Clock())
            loop.publish(Clock())
        after = log_probs(loop.parts.learner.policy, long, everything)
    d = np.stack([after[i].astype(np.float64) - before[i] for i in range(long.num_sequences)])  # [n, longest]
    out: dict[str, dict[str, float]] = {}
    for length in lengths:
        cut = d.reshape(-1, length)  # [pieces, length]; every length covers the same tokens
        out[str(length)] = {
            "length": length,
            "sd_log_w": float(cut.std(ddof=1)),
            "sd_sum_log_w": float(cut.sum(axis=1).std(ddof=1)),
            "sd_log_s": float(cut.mean(axis=1).std(ddof=1)),
            "mean_log_s": float(cut.mean()),
        }
    x = np.log(lengths)
    out["slope"] = {
        f"slope_{name}": float(np.polyfit(x, np.log([out[str(n)][name] for n in lengths]), 1)[0])
        for name in ("sd_log_w", "sd_sum_log_w", "sd_log_s")
    }
    longest = out[str(max(lengths))]
    out["slope"]["token_over_sequence"] = longest["sd_log_w"] / longest["sd_log_s"]
    return out
