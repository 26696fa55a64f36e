"""From prompts to scored groups: requests go to the sampler, completed groups go to the rewards at once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo.errors import RewardError, RolloutError, TrainingError
from gspo.faults import reached
from gspo.rewards import RewardItem, Rewards
from gspo.sampling import Sampler
from gspo.system import Clock, beat, described
from gspo.types import Failure, Group, Outcome, Prompt, Request, Sample, SampleId, SamplingParams, Score

# A workflow turns requests into finished samples by means of a sampler, in any order; every request gets one sample
# with its id. The default sends one request per sample; an episode sends one per turn.
Workflow = Callable[[Sequence[Request], Sampler], Iterable[Sample]]


def single_turn(requests: Sequence[Request], sampler: Sampler, deadline_s: float | None = None) -> Iterator[Sample]:
    """One completion per prompt, all within the deadline (rollout.request_timeout)."""
    sampler.submit(requests)
    yield from sampler.completed(deadline_s)


def from_data(requests: Sequence[Request], sampler: Sampler) -> Iterator[Sample]:
    """Supervised fine-tuning: the completion of the prompt's own row, as if the current weights had sampled it."""
    for request in requests:
        assert request.origin is not None
        assert request.origin.target is not None, "a data set that was made with `supervised`"
        parts = [
            replace(part, id=request.id, versions=np.full_like(part.versions, sampler.version))
            for part in request.origin.target.sequences
        ]
        yield replace(parts[0], rest=tuple(parts[1:]))


def is_single_turn(workflow: Workflow) -> bool:
    """Whether the producer may submit requests and collect samples itself, without calling the workflow."""
    # `functools.partial` binds the deadline; its function is in `func`.
    return getattr(workflow, "func", workflow) is single_turn


# Decides whether to train on a group. It gets what AReaL's filters get: `rewards` [G] (NaN where a reward failed),
# and also `prompt`, `completions`, `lengths` [G] and the row's `data`.
Filter = Callable[[Mapping[str, Any]], bool]

# Why a group is rejected, as the words after "groups"; None: it is trained on.
RejectReason = Callable[[Group], str | None]


def reject_by_filter(function: Filter, key: str, group: Group) -> str | None:
    """`RejectReason` from a user's filter; an exception in the filter ends the run with the filter's name."""
    rewards = [outcome.value if isinstance(outcome, Score) else np.nan for outcome in group.outcomes]
    view = {
        "rewards": np.array(rewards, dtype=np.float64),  # [G]
        "prompt": group.prompt.text,
        "completions": group.texts,
        # [G] trained tokens
        "lengths": np.array([sum(int(s.mask.sum()) for s in t.sequences) for t in group.samples], dtype=np.int64),
        "data": copy.deepcopy(dict(group.prompt.data)),  # a filter may change it
    }
    try:
        accepted = function(view)
        # A filter without a return statement would otherwise reject every group.
        if not isinstance(accepted, bool | np.bool_):
            raise TypeError(f"it returned {accepted!r}; a filter returns True (train on the group) or False")
    except Exception as cause:
        raise TrainingError(f"{key} failed on submission {group.submission}: {described(cause)}") from cause
    return None if accepted else f"were rejected by {key}: it rejects too much, or set actor.max_refills higher"


class GroupAssembler:
    """Collects samples into groups; a group is complete when its last sample arrives."""

    def __init__(self, num_samples: int, params: SamplingParams, decode: Callable[[Sequence[int]], str]) -> None:
        self._num_samples, self._params, self._decode = num_samples, params, decode
        self._prompts: dict[int, Prompt] = {}
        self._samples: dict[int, dict[int, Sample]] = {}  # by submission index, then by number within the group

    def __len__(self) -> int:
        """Groups that are incomplete."""
        return len(self._samples)

    def expect(self, prompts: Iterable[tuple[int, Prompt]], attempt: int = 0) -> list[Request]:
        """The requests for these prompts (submission index, prompt), `num_samples` for each."""
        requests = []
        for submission, prompt in prompts:
            self._prompts[submission], self._samples[submission] = prompt, {}
            for i in range(self._num_samples):
                id = SampleId(submission, i, attempt=attempt)
                requests.append(Request(id, prompt.tokens, self._params, origin=prompt))
        return requests

    def add(self, sample: Sample) -> Group | None:
        """The group that this sample completes, not scored yet; None while samples are missing."""
        submission, number = sample.id.submission, sample.id.sample
        arrived = self._samples.get(submission)
        # A sample that was not requested would end up in the wrong group, or be trained on twice.
        if arrived is None or not 0 <= number < self._num_samples or number in arrived:
            raise RolloutError(f"the sampler returned {sample.id}, which was not requested or was returned before")
        arrived[number] = sample
        beat("a finished sample")
        if len(arrived) < self._num_samples:
            return None
        del self._samples[submission]
        # In the order of their numbers, not of arrival: a run must not depend on timing.
        samples = tuple(arrived[i] for i in range(self._num_samples))
        texts = tuple(self._decode(s.last_turn.tolist()) for s in samples)
        return Group(submission, self._prompts.pop(submission), samples, texts, outcomes=())

    def refuse_missing(self, num_groups: int) -> None:
        """Raise an error if a group is incomplete; call it when the sampler has returned everything."""
        if self._samples:
            raise RolloutError(
                f"the sampler ended with {len(self._samples)} of {num_groups} groups unfinished; if it needs longer, "
                "set rollout.request_timeout higher"
            )


def submit_rewards(rewards: Rewards, group: Group) -> None:
    """Submit a complete group for scoring at once, so that scoring overlaps with sampling."""
    reached("reward.submit")
    prompt = group.prompt
    item = RewardItem(
        prompt.text,
        group.texts,
        prompt_ids=prompt.tokens,
        completion_ids=tuple(s.last_turn.tolist() for s in group.samples),
        data=prompt.data,
        reference=prompt.reference,
        messages=prompt.messages,
        source=prompt.source,
        given=tuple(s.outcome for s in group.samples),
    )
    rewards.submit(group.submission, item)


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
    assembler = GroupAssembler(num_samples, params, decode)
    complete: dict[int, Group] = {}
    for sample in workflow(assembler.expect(prompts, attempt), sampler):
        if (group := assembler.add(sample)) is not None:
            complete[group.submission] = group
            submit_rewards(rewards, group)
    assembler.refuse_missing(len(prompts))
    # The time that scoring takes after sampling has ended; the rest overlapped with sampling.
    with clock("reward") if clock is not None else contextlib.nullcontext():
        reached("reward.wait")
        outcomes: dict[Any, tuple[Outcome, ...]] = dict(rewards.completed())
    return [replace(complete[submission], outcomes=outcomes[submission]) for submission, _ in prompts]


def refuse_failures(groups: Sequence[Group], max_fraction: float) -> list[Failure]:
    """The failed rewards of a batch; RewardError if their share is above `max_fraction`, or all failed."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    # If all rewards failed there is nothing to train on, whatever fraction is allowed.
    if failures and (len(failures) > max_fraction * len(outcomes) or len(failures) == len(outcomes)):
        raise RewardError(
            f"{len(failures)} of {len(outcomes)} rewards failed in one batch (allowed: reward.max_failure_fraction = "
            f"{max_fraction}). The first: {failures[0].kind}: {failures[0].message}"
        )
    return failures
