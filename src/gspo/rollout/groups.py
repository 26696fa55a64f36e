"""From prompts to scored groups: requests to the sampler, completions to the rewards, as they come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo.errors import RewardError, RolloutError, TrainingError
from gspo.faults import reached
from gspo.rewards.route import Rewards
from gspo.rewards.spec import RewardItem
from gspo.sampling.api import Sampler
from gspo.system.clock import Clock
from gspo.system.heartbeat import beat
from gspo.types import Failure, Group, Outcome, Prompt, Request, Sample, SampleId, SamplingParams, Score

# A workflow turns requests into finished samples by means of a sampler, in any order; every request gets one sample
# with its id. The default asks once and takes what comes; an episode asks again, turn by turn.
Workflow = Callable[[Sequence[Request], Sampler], Iterable[Sample]]


def single_turn(requests: Sequence[Request], sampler: Sampler, deadline_s: float | None = None) -> Iterator[Sample]:
    """One completion per prompt, all within the deadline (rollout.request_timeout)."""
    sampler.submit(requests)
    yield from sampler.completed(deadline_s)


def is_single_turn(workflow: Workflow) -> bool:
    """Whether requests may be submitted and collected without the workflow's help."""
    return getattr(workflow, "func", workflow) is single_turn


# Says whether to train on a group, given what AReaL's filters are given: `rewards` [G] (NaN where one failed), and
# beside it `prompt`, `completions`, `lengths` [G] and the row's `data`.
Filter = Callable[[Mapping[str, Any]], bool]

# Why a group is not trained on, as the words after "groups"; None: it is.
Keeps = Callable[[Group], str | None]


def filtered(function: Filter, key: str, group: Group) -> str | None:
    """`Keeps` by a user's function; what it raises ends the run with its name and its words."""
    rewards = [outcome.value if isinstance(outcome, Score) else np.nan for outcome in group.outcomes]
    view = {
        "rewards": np.array(rewards, dtype=np.float64),
        "prompt": group.prompt.text,
        "completions": group.texts,
        "lengths": np.array([sum(int(s.mask.sum()) for s in t.sequences) for t in group.samples], dtype=np.int64),
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


class Arrivals:
    """Samples on their way to becoming groups; a group is whole when its last sample is there."""

    def __init__(self, num_samples: int, params: SamplingParams, decode: Callable[[Sequence[int]], str]) -> None:
        self._num_samples, self._params, self._decode = num_samples, params, decode
        self._prompts: dict[int, Prompt] = {}
        self._samples: dict[int, dict[int, Sample]] = {}

    def __len__(self) -> int:
        """Groups that are not whole."""
        return len(self._samples)

    def expect(self, prompts: Iterable[tuple[int, Prompt]], attempt: int = 0) -> list[Request]:
        """The requests that these prompts (submission index, prompt) are to be answered by."""
        requests = []
        for submission, prompt in prompts:
            self._prompts[submission], self._samples[submission] = prompt, {}
            for i in range(self._num_samples):
                id = SampleId(submission, i, attempt=attempt)
                requests.append(Request(id, prompt.tokens, self._params, origin=prompt))
        return requests

    def add(self, sample: Sample) -> Group | None:
        """The group that this sample completes, not yet scored."""
        submission, number = sample.id.submission, sample.id.sample
        arrived = self._samples.get(submission)
        if arrived is None or not 0 <= number < self._num_samples or number in arrived:
            raise RolloutError(f"the sampler returned {sample.id}, which was not asked for or came twice")
        arrived[number] = sample
        beat("a finished sample")
        if len(arrived) < self._num_samples:
            return None
        del self._samples[submission]
        samples = tuple(arrived[i] for i in range(self._num_samples))
        texts = tuple(self._decode(s.last_turn.tolist()) for s in samples)
        return Group(submission, self._prompts.pop(submission), samples, texts, outcomes=())

    def refuse_missing(self, num_groups: int) -> None:
        """To be called when the sampler has ended."""
        if self._samples:
            raise RolloutError(
                f"the sampler ended with {len(self._samples)} of {num_groups} groups unfinished; if it needs longer, "
                "set rollout.request_timeout higher"
            )


def hand_in(rewards: Rewards, group: Group) -> None:
    """A whole group goes to the rewards at once: scoring runs beside sampling."""
    reached("reward.submit")
    rewards.submit(group.submission, _item(group))


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
    """Scored groups in the order of `prompts` (submission index, prompt), whatever the order of completion."""
    arrivals = Arrivals(num_samples, params, decode)
    whole: dict[int, Group] = {}
    for sample in workflow(arrivals.expect(prompts, attempt), sampler):
        if (group := arrivals.add(sample)) is not None:
            whole[group.submission] = group
            hand_in(rewards, group)
    arrivals.refuse_missing(len(prompts))
    # What is left of scoring once sampling is done; the rest ran beside it.
    with clock("reward") if clock is not None else contextlib.nullcontext():
        reached("reward.wait")
        outcomes: dict[Any, tuple[Outcome, ...]] = dict(rewards.completed())
    return [replace(whole[submission], outcomes=outcomes[submission]) for submission, _ in prompts]


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


def _item(group: Group) -> RewardItem:
    prompt = group.prompt
    return RewardItem(
        prompt.text,
        group.texts,
        prompt_ids=prompt.tokens,
        completion_ids=tuple(s.last_turn.tolist() for s in group.samples),
        data=prompt.data,
        messages=prompt.messages,
        source=prompt.source,
        given=tuple(s.outcome for s in group.samples),
    )
