"""From prompts to scored groups: requests to the sampler, completions to the rewards, as they come."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspo.errors import RewardError, RolloutError, TrainingError
from gspo.faults import reached
from gspo.rewards.router import Rewards
from gspo.rewards.spec import RewardItem
from gspo.rollout.engine import Sampler
from gspo.train.clock import Clock
from gspo.train.watchdog import beat
from gspo.types import Failure, Group, Outcome, Prompt, Request, Sample, SampleId, SamplingParams, Score

# A workflow turns requests into finished samples by means of a sampler, in any order; every request gets one sample
# with its id. The default asks once and takes what comes; an episode asks again, turn by turn.
Workflow = Callable[[Sequence[Request], Sampler], Iterable[Sample]]


def single_turn(requests: Sequence[Request], sampler: Sampler, deadline_s: float | None = None) -> Iterator[Sample]:
    """One completion per prompt, all within the deadline (rollout.request_timeout)."""
    sampler.submit(requests)
    yield from sampler.completed(deadline_s)


# Says whether to train on a group, given what AReaL's filters are given: `rewards` [G] (NaN where one failed), and
# beside it `prompt`, `completions`, `lengths` [G] and the row's `data`.
Filter = Callable[[Mapping[str, Any]], bool]

# Why a group is not trained on, as the words after "groups"; None: it is.
Keeps = Callable[[Group], str | None]


def fill(
    draw: Callable[[int], Sequence[Group]], num_groups: int, keeps: Keeps | None, rounds: int
) -> tuple[list[Group], int]:
    """`num_groups` groups worth training on, and how many were drawn in vain (dynamic sampling, arXiv 2503.14476).

    The rejected are replaced by the next prompts of the stream, in as many rounds as it takes, at most `rounds`.
    """
    if keeps is None:
        return list(draw(num_groups)), 0
    groups: list[Group] = []
    rejected: Counter[str] = Counter()
    for _ in range(rounds):
        for group in draw(num_groups - len(groups)):
            if (why := keeps(group)) is None:
                groups.append(group)
            else:
                rejected[why] += 1
        if len(groups) == num_groups:
            return groups, rejected.total()
    reasons = "; ".join(f"{count} groups {why}" for why, count in rejected.most_common())
    raise TrainingError(
        f"{rounds} rounds of sampling (actor.max_refills) gave {len(groups)} of {num_groups} groups to train on: "
        + reasons
    )


def filtered(function: Filter, key: str, group: Group) -> str | None:
    """`Keeps` by a user's function; what it raises ends the run with its name and its words."""
    rewards = [outcome.value if isinstance(outcome, Score) else np.nan for outcome in group.outcomes]
    view = {
        "rewards": np.array(rewards, dtype=np.float64),
        "prompt": group.prompt.text,
        "completions": group.texts,
        "lengths": np.array([int(sample.mask.sum()) for sample in group.samples], dtype=np.int64),
        "data": group.prompt.data,
    }
    try:
        kept = function(view)
        if not isinstance(kept, bool | np.bool_):
            raise TypeError(f"it returned {kept!r}; a filter answers True (train on the group) or False")
    except Exception as cause:
        raise TrainingError(
            f"{key} failed on submission {group.submission}: {type(cause).__name__}: {cause}"
        ) from cause
    return None if kept else f"were rejected by {key}: it rejects too much, or set actor.max_refills higher"


def sample_groups(
    prompts: Sequence[tuple[int, Prompt]],
    *,
    num_samples: int,
    params: SamplingParams,
    sampler: Sampler,
    rewards: Rewards,
    decode: Callable[[Sequence[int]], str],
    workflow: Workflow = single_turn,
    attempt: int = 0,
    clock: Clock | None = None,
) -> list[Group]:
    """Groups in the order of `prompts` (submission index, prompt), whatever the order of completion."""
    requests = [
        Request(SampleId(submission, i, attempt=attempt), prompt.tokens, params)
        for submission, prompt in prompts
        for i in range(num_samples)
    ]
    by_submission = dict(prompts)
    arrived: dict[int, dict[int, Sample]] = {submission: {} for submission, _ in prompts}
    whole: dict[int, tuple[tuple[Sample, ...], tuple[str, ...]]] = {}
    for sample in workflow(requests, sampler):
        submission, number = sample.id.submission, sample.id.sample
        if not 0 <= number < num_samples or number in arrived.get(submission, {number: None}):
            raise RolloutError(f"the sampler returned {sample.id}, which was not asked for or came twice")
        arrived[submission][number] = sample
        beat("a finished sample")
        if len(arrived[submission]) == num_samples:
            samples = tuple(arrived[submission][i] for i in range(num_samples))
            texts = tuple(decode(s.tokens.tolist()) for s in samples)
            whole[submission] = samples, texts
            # A whole group goes to the rewards at once: scoring runs beside sampling.
            reached("reward.submit")
            rewards.submit(submission, _item(by_submission[submission], samples, texts))
    if missing := [submission for submission, _ in prompts if submission not in whole]:
        raise RolloutError(
            f"the sampler ended with {len(missing)} of {len(prompts)} groups unfinished; if it needs longer, set "
            "rollout.request_timeout higher"
        )
    # What is left of scoring once sampling is done; the rest ran beside it.
    with clock("reward") if clock is not None else contextlib.nullcontext():
        reached("reward.wait")
        outcomes: dict[Any, tuple[Outcome, ...]] = dict(rewards.completed())
    return [
        Group(submission, prompt, *whole[submission], outcomes=outcomes[submission]) for submission, prompt in prompts
    ]


def refuse_failures(groups: Sequence[Group], max_fraction: float) -> list[Failure]:
    """The failures of a batch; RewardError where they are too many to go on."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures and (len(failures) > max_fraction * len(outcomes) or len(failures) == len(outcomes)):
        raise RewardError(
            f"{len(failures)} of {len(outcomes)} rewards failed in one batch (allowed: reward.max_failure_fraction = "
            f"{max_fraction}). The first: {failures[0].kind}: {failures[0].message}"
        )
    return failures


def _item(prompt: Prompt, samples: Sequence[Sample], texts: tuple[str, ...]) -> RewardItem:
    return RewardItem(
        prompt.text,
        texts,
        prompt_ids=prompt.tokens,
        completion_ids=tuple(s.tokens.tolist() for s in samples),
        data=prompt.data,
        messages=prompt.messages,
        source=prompt.source,
    )
