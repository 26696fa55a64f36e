"""How requests become samples (`Workflow`), and which groups are trained on (`Filter`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo.errors import TrainingError
from gspo.sampling.api import Sampler
from gspo.system.imports import described
from gspo.types import Group, Request, Sample, Score

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
