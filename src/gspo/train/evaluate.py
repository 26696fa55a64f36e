"""Held-out accuracy and reward with intervals, from the sampler and rewards of training; and held-out loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo.data import Data
from gspo.faults import reached
from gspo.learner import Learner, Reference, batch_with_advantages, reference_logp
from gspo.monitor import images_of, question_of, turns_of
from gspo.rollout import refuse_failures, sample_groups
from gspo.stats import mean_interval, share_interval
from gspo.system import Every
from gspo.types import Group, Outcome, Score

# The first submission index of evaluations: no training prompt gets there, so no draw is shared with training.
FIRST = 1 << 40
EPS = 1e-9  # rounding of rewards that should be 0 or 1


@dataclass(frozen=True)
class Evaluation:
    """Scores of `problems` with k samples each; each `_ci` is the longer side of a 95 % interval over problems."""

    problems: int
    k: int
    accuracy: float  # avg@k: share of correct samples
    accuracy_ci: float
    reward: float  # mean of the problems' mean rewards
    reward_ci: float
    graded: float  # share of scored samples whose first reward is neither 0 nor 1; above 0, accuracy says little
    pass_at_k: float
    length: float  # mean completion, tokens
    failures: int  # rewards that failed; they do not count in the shares
    sources: Mapping[str, Evaluation] = field(default_factory=dict)  # the sources of a mixture, by name

    def metrics(self) -> dict[str, float]:
        """Names as in docs/metrics.md."""
        found = self._metrics("eval/")
        for name, source in self.sources.items():
            found |= source._metrics(f"eval/{name}/")
        return found

    def _metrics(self, prefix: str) -> dict[str, float]:
        names = ("accuracy", "accuracy_ci", "reward", "reward_ci", "graded", "pass_at_k", "k", "problems", "length")
        return {**{f"{prefix}{name}": getattr(self, name) for name in names}, f"{prefix}reward_failures": self.failures}


def evaluate(
    data: Data,
    *,
    num_problems: int | None,
    num_samples: int,
    **how: Any,
) -> tuple[Evaluation, list[Group]]:
    """Sample the first `num_problems` rows of held-out data `num_samples` times each (None: all rows).

    how: further keywords of `rollout.sample_groups`.
    """
    reached("eval.begin")
    count = len(data) if num_problems is None else min(num_problems, len(data))
    prompts = [(FIRST + row, data.prompt(row)) for row in range(count)]
    groups = sample_groups(prompts, num_samples=num_samples, **how)
    return summarise_groups(groups, num_samples), groups


class Evaluator:
    """Evaluates a run in training, with the sampler and the rewards of training.

    data: the held-out problems, None: they are not answered; rows: held-out rows with completions, whose loss is
    measured (supervised fine-tuning); how: keywords of `evaluate`; every: when; max_failure_fraction: the share of
    failed rewards that ends the run; best: the metric of the best checkpoint, None: chosen by `State.compare_best`.
    """

    def __init__(
        self,
        data: Data | None,
        *,
        rows: Sequence[Group] = (),
        at_start: bool,
        every: Every,
        best: str | None,
        max_failure_fraction: float,
        **how: Any,
    ) -> None:
        self._data, self._how, self._every = data, how, every
        self.rows, self.at_start, self.best = rows, at_start, best
        self._max_failure_fraction, self._last_time = max_failure_fraction, time.monotonic()

    def is_due(self, step: int) -> bool:
        return self._every.is_due(step, time.monotonic() - self._last_time)

    def evaluate(self) -> tuple[dict[str, float], list[Group]]:
        """Scores of the sampled answers as metrics, and the answers; both are empty if nothing is sampled."""
        self._last_time = time.monotonic()
        if self._data is None:
            return {}, []
        result, groups = evaluate(self._data, **self._how)
        # Scores over few scored samples would be misleading, so many failures raise an error.
        refuse_failures(groups, self._max_failure_fraction)
        return result.metrics(), groups


def given_groups(data: Data, num: int | None, decode: Callable[[Sequence[int]], str]) -> list[Group]:
    """The first `num` held-out rows (None: all) with the completions of the data set."""
    prompts = [data.prompt(row) for row in range(len(data) if num is None else min(num, len(data)))]
    return [
        Group(FIRST + row, prompt, (sample,), (decode(sample.last_turn.tolist()),), (Score(1.0),))
        for row, prompt in enumerate(prompts)
        if (sample := prompt.target) is not None
    ]


def held_out_loss(learner: Learner, groups: Sequence[Group]) -> dict[str, float]:
    """`eval/loss`: −Σ log π_θ(y_it) / Σ|y_i| over held-out completions, also by source. All ranks call it together."""
    batch = batch_with_advantages(groups, num_minibatches=1, **learner.assembly)
    current = Reference(learner.policy, learner.plan.temperature, learner.plan.max_tokens)
    logp = reference_logp(current, batch)
    by_source: dict[str, list[int]] = {}
    for i in logp:
        by_source.setdefault(batch.groups[batch.group_of[i]].prompt.source, []).append(i)

    def mean(numbers: Iterable[int]) -> float:
        return -float(np.concatenate([logp[i] for i in sorted(numbers)]).mean(dtype=np.float64))

    parts = {f"eval/{name}/loss": mean(numbers) for name, numbers in by_source.items()} if len(by_source) > 1 else {}
    return {"eval/loss": mean(logp), **parts}


def first_reward(outcome: Score) -> float:
    """The value of the first reward function, which is the task's own; later ones add format or length terms."""
    return next(iter(outcome.parts.values()), outcome.value)


def is_correct(outcome: Outcome) -> bool | None:
    """Whether the first reward function gave 1 or more; None where the reward failed."""
    return first_reward(outcome) >= 1 - EPS if isinstance(outcome, Score) else None


def is_graded_score(outcome: Score) -> bool:
    """Whether the first reward function gave another value than 0 and 1."""
    value = first_reward(outcome)
    return abs(value) > EPS and abs(value - 1) > EPS


def summarise_groups(groups: Sequence[Group], k: int) -> Evaluation:
    """Scores with 95 % intervals over problems (samples of one problem are not independent)."""
    scored = [[o for o in group.outcomes if isinstance(o, Score)] for group in groups]
    answered = [scores for scores in scored if scores]
    every = [score for scores in answered for score in scores]
    correct = [[bool(is_correct(score)) for score in scores] for scores in answered]
    accuracy, accuracy_ci = _with_ci(share_interval([sum(marks) / len(marks) for marks in correct]))
    reward, reward_ci = _with_ci(mean_interval([sum(s.value for s in scores) / len(scores) for scores in answered]))
    lengths = [sum(int(s.mask.sum()) for s in t.sequences) for group in groups for t in group.samples]
    names = list(dict.fromkeys(group.prompt.source for group in groups))
    return Evaluation(
        problems=len(groups),
        k=k,
        accuracy=accuracy,
        accuracy_ci=accuracy_ci,
        reward=reward,
        reward_ci=reward_ci,
        graded=sum(map(is_graded_score, every)) / max(len(every), 1),
        pass_at_k=share_interval([float(any(marks)) for marks in correct])[0],
        length=sum(lengths) / max(len(lengths), 1),
        failures=sum(len(group.outcomes) for group in groups) - len(every),
        sources={name: summarise_groups([g for g in groups if g.prompt.source == name], k) for name in names}
        if len(names) > 1
        else {},
    )


def _with_ci(ends: tuple[float, float, float]) -> tuple[float, float]:
    """Mean, and the longer side of its interval."""
    mean, low, high = ends
    return mean, max(mean - low, high - mean)


def answer_rows(group: Group, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """The answers to one held-out problem, one object per sample; fields as in docs/run-directory.md."""
    rows = []
    for sample, text, outcome in zip(group.samples, group.texts, group.outcomes, strict=True):
        # An episode is shown by its last sequence, whose prompt holds what came before it.
        last = sample.sequences[-1]
        rows.append(
            {
                "sample": sample.id.sample,
                "completion": text if not sample.is_episode else decode(last.tokens.tolist()),
                "reward": outcome.value if isinstance(outcome, Score) else None,
                "reward_parts": dict(outcome.parts) if isinstance(outcome, Score) else None,
                "failure": None if isinstance(outcome, Score) else f"{outcome.kind}: {outcome.message}",
                "correct": is_correct(outcome),
                "length": sum(int(s.mask.sum()) for s in sample.sequences),
                "finish": sample.ending,
                **turns_of(sample, last, len(sample.rest), None, 0, decode),
            }
        )
    return rows


def problem_of(group: Group) -> dict[str, Any]:
    """A held-out problem: its row, source, prompt and answer."""
    prompt = group.prompt
    return {
        "row": prompt.row,
        "source": prompt.source,
        "prompt": prompt.text,
        **question_of(prompt),
        **images_of(prompt),
        "answer": prompt.answer,
    }
