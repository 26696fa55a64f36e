"""Signal and noise of the gradient: GSPO and GRPO on the same groups, by length, drift and progress of a run.

At some points of a run the policy samples many groups. The policy then moves away by updates on other groups, as the
later mini-batches of a batch see it. The gradient g_j of each group j is computed with the log-probs at sampling as
π_old. Over n groups:

    noise = tr Cov(g) = (Σ_j |g_j|² − n |ḡ|²) / (n − 1)
    signal = |E g|² = |ḡ|² − noise / n                  (unbiased)

The signal-to-noise ratio belongs to the mean of one training batch of B groups: B · signal / noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from gspo.config import Loaded
from gspo.learner import Batch, Learner, batch_with_advantages
from gspo.rollout import sample_groups
from gspo.system import Clock
from gspo.train import Leader, assembly, sampling_params
from gspo.types import Group
from lab.studies.direct.gradients import LogProbs, cosine, gradient, log_probs, opened


def measure(loaded: Loaded, settings: dict[str, Any], seed: int) -> dict[str, dict[str, float]]:
    """Per algorithm, task, progress and drift: signal-to-noise ratio, cosine of two halves, spread of log s, clipping.

    tasks       name → [data path, max_new_tokens]; none: the task of the config
    trained     steps of training before each measurement
    drifts      batches that the policy is updated on between sampling and gradient
    groups      groups per measurement; even, because they are halved
    algorithms  name → [preset, ε_low, ε_high]
    """
    out: dict[str, dict[str, float]] = {}
    tasks = settings.get("tasks") or {"": None}
    for task, chosen in tasks.items():
        here = loaded if chosen is None else _on_task(loaded, *chosen)
        with opened(here) as loop:
            prompts = count()  # every prompt is used once
            for trained in settings["trained"]:
                while loop.parts.state.step < trained:
                    loop.update(loop.assemble(loop.sample(Clock()), Clock()), Clock())
                    loop.publish(Clock())
                found = at_this_point(loop, here, settings, prompts)
                out |= {", ".join(filter(None, (name, task, f"step {trained}"))): found[name] for name in found}
    return out


def at_this_point(
    loop: Leader, loaded: Loaded, settings: dict[str, Any], prompts: Iterator[int]
) -> dict[str, dict[str, float]]:
    """Sample, then move away and measure after each drift; the moves are undone."""
    learner, size = loop.parts.learner, loaded.config.train_dataset.batch_size
    fresh = _sampled(loop, loaded, list(islice(prompts, settings["groups"])))
    away = [_sampled(loop, loaded, list(islice(prompts, size))) for _ in range(max(settings["drifts"]))]
    batches = [batch_with_advantages([group], num_minibatches=1, **assembly(loaded)) for group in fresh]
    old = [log_probs(learner.policy, batch) for batch in batches]
    kept = copy.deepcopy((learner.policy.state_dict(), learner.optimizer.state_dict()))
    found, drift = {}, 0
    for target in sorted(settings["drifts"]):
        for groups in away[drift:target]:
            loop.update(loop.assemble(groups, Clock()), Clock())
        drift = target
        for name, (preset, low, high) in settings["algorithms"].items():
            measured = _signal(learner, batches, old, preset, clip_low=low, clip_high=high)
            found[f"{name}, drift {drift}"] = {**measured, "snr": size * measured["snr"]}
    learner.policy.load_state_dict(kept[0])
    learner.optimizer.load_state_dict(kept[1])
    return found


def _sampled(loop: Leader, loaded: Loaded, prompts: list[int]) -> list[Group]:
    data = loop.parts.data
    return sample_groups(
        [(10**6 + i, data.prompt(i)) for i in prompts],
        num_samples=loaded.config.gconfig.n_samples,
        params=sampling_params(loaded.config),
        sampler=loop.parts.sampler,
        rewards=loop.parts.rewards,
        decode=loop.parts.decode,
    )


def _signal(
    learner: Learner, batches: Sequence[Batch], old: Sequence[LogProbs], preset: str, **edges: float
) -> dict[str, float]:
    half = [torch.zeros(0), torch.zeros(0)]
    squares, log_s, clipped, num = 0.0, [], [], len(batches)
    for i, (batch, proximal) in enumerate(zip(batches, old, strict=True)):
        # One gradient at a time: of a large model only two sums fit into memory.
        g = gradient(learner.policy, batch, preset, proximal, **edges)
        half[i % 2] = g.flat if not len(half[i % 2]) else half[i % 2].add_(g.flat)
        squares += float(g.flat.square().sum())
        log_s.append(g.log_s[batch.has_gradient])
        clipped.append(g.clipped[batch.has_gradient])
    mean = float(((half[0] + half[1]) / num).square().sum())
    noise = (squares - num * mean) / (num - 1)
    signal = mean - noise / num
    spread = np.concatenate(log_s)
    return {
        "snr": signal / noise,
        "halves": cosine(half[0], half[1]),
        "log_s_std": float(spread.std()),
        "clip_sequences": float(np.concatenate(clipped).mean()),
        "tokens": float(np.mean([batch.trained_tokens.mean() for batch in batches])),
    }


def _on_task(loaded: Loaded, path: str, max_new_tokens: int) -> Loaded:
    config = loaded.config
    data = config.train_dataset.model_copy(update={"path": path})
    sampling = config.gconfig.model_copy(update={"max_new_tokens": max_new_tokens})
    return replace(loaded, config=config.model_copy(update={"train_dataset": data, "gconfig": sampling}))
