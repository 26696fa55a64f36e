"""Held-out accuracy: avg@k and pass@k with intervals, from the same sampler and rewards as training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo.data.mixture import Data
from gspo.faults import reached
from gspo.rewards.route import Rewards
from gspo.rollout.groups import Workflow, sample_groups, single_turn
from gspo.sampling.api import Sampler
from gspo.stats import share_interval
from gspo.types import Group, Outcome, SamplingParams, Score

# Submission indices of evaluations: no training prompt ever gets there, so no draw is shared with training.
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
    failures: int  # rewards that did not answer; out of the shares

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
    """The first `num_problems` rows of held-out data, each answered `num_samples` times."""
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


def is_correct(outcome: Outcome) -> bool | None:
    """Whether the first reward function gave full marks; None where it did not answer."""
    if not isinstance(outcome, Score):
        return None
    return next(iter(outcome.parts.values()), outcome.value) >= 1 - 1e-9


def summarise(groups: Sequence[Group], k: int) -> Evaluation:
    """Shares with 95 % intervals over problems (samples of one problem are not independent)."""
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
