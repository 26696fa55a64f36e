"""Held-out accuracy: avg@k and pass@k with intervals, from the same sampler and rewards as training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.data.mixture import Data
from gspo.faults import reached
from gspo.rewards.route import Rewards
from gspo.rollout.groups import refuse_failures, sample_groups
from gspo.rollout.workflow import Workflow, single_turn
from gspo.sampling.api import Sampler
from gspo.stats import share_interval
from gspo.system.clock import Every
from gspo.types import Group, Outcome, SamplingParams, Score

# The first submission index of evaluations: no training prompt gets there, so no draw is shared with training.
FIRST = 1 << 40


@dataclass(frozen=True)
class Evaluation:
    """avg@k and pass@k over `problems`, each with the half-width of its 95 % interval.

    >>> Evaluation(500, 1, 0.9, 0.026, 0.9, 0.026, 20.1, 0).accuracy
    0.9
    """

    problems: int
    k: int
    accuracy: float  # avg@k: share of correct samples
    accuracy_ci: float
    pass_at_k: float
    pass_at_k_ci: float
    length: float  # mean completion, tokens
    failures: int  # rewards that failed; they do not count in the shares

    def metrics(self) -> dict[str, float]:
        """Names as in docs/metrics.md."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_ci": self.accuracy_ci,
            "eval/pass_at_k": self.pass_at_k,
            "eval/k": self.k,
            "eval/problems": self.problems,
            "eval/length": self.length,
            "eval/reward_failures": self.failures,
        }


def evaluate(
    data: Data,
    *,
    num_problems: int | None,
    num_samples: int,
    params: SamplingParams,
    sampler: Sampler,
    rewards: Rewards,
    decode: Callable[[Sequence[int]], str],
    workflow: Workflow = single_turn,
) -> tuple[Evaluation, list[Group]]:
    """Sample the first `num_problems` rows of held-out data `num_samples` times each (None: all rows)."""
    reached("eval.begin")
    count = len(data) if num_problems is None else min(num_problems, len(data))
    prompts = [(FIRST + row, data.prompt(row)) for row in range(count)]
    groups = sample_groups(
        prompts,
        num_samples=num_samples,
        params=params,
        sampler=sampler,
        rewards=rewards,
        decode=decode,
        workflow=workflow,
    )
    return summarise(groups, num_samples), groups


class Evaluator:
    """Evaluates a run in training, with the sampler and the rewards of training.

    how: keywords of `evaluate`; every: when; max_failure_fraction: the share of failed rewards that ends the run.
    """

    def __init__(self, data: Data, *, at_start: bool, every: Every, max_failure_fraction: float, **how: Any) -> None:
        self._data, self._how, self._every = data, how, every
        self._max_failure_fraction = max_failure_fraction
        self._last_time = time.monotonic()
        self.at_start = at_start

    def is_due(self, step: int) -> bool:
        return self._every.is_due(step, time.monotonic() - self._last_time)

    def evaluate(self) -> Evaluation:
        self._last_time = time.monotonic()
        result, groups = evaluate(self._data, **self._how)
        # An accuracy over few scored samples would be misleading, so many failures raise an error.
        refuse_failures(groups, self._max_failure_fraction)
        return result


def is_correct(outcome: Outcome) -> bool | None:
    """Whether the first reward function gave 1 or more; None where the reward failed."""
    if not isinstance(outcome, Score):
        return None
    # The first part is the task's correctness; a weighted sum with format or length rewards would not be.
    return next(iter(outcome.parts.values()), outcome.value) >= 1 - 1e-9


def summarise(groups: Sequence[Group], k: int) -> Evaluation:
    """Shares with 95 % intervals over problems (samples of one problem are not independent)."""
    # marks[i]: one boolean per scored sample of problem i; failed rewards are left out.
    marks = [[m for m in map(is_correct, group.outcomes) if m is not None] for group in groups]
    answered = [m for m in marks if m]
    avg, avg_ci = _mean([sum(m) / len(m) for m in answered])
    best, best_ci = _mean([float(any(m)) for m in answered])
    lengths = [sum(int(s.mask.sum()) for s in t.sequences) for group in groups for t in group.samples]
    failures = sum(len(group.outcomes) for group in groups) - sum(map(len, marks))
    return Evaluation(len(groups), k, avg, avg_ci, best, best_ci, sum(lengths) / max(len(lengths), 1), failures)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and the longer arm of its 95 % interval."""
    mean, low, high = share_interval(values)
    return mean, max(mean - low, high - mean)
