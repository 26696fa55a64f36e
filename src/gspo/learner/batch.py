"""A rollout batch, ready to train: its sequences, rewards, advantages and mini-batches.

Sequences are numbered 0…n−1 in the order of groups and samples; every array here is [n]. A sample is one trajectory:
one completion, or an episode of one or more sequences. The sequences of an episode share its reward and its advantage,
and count as one trajectory in every denominator (`envs/episode.py`). Mini-batches are assigned before any sequence is
skipped, so that skipping cannot change a denominator. All sequences of a trajectory are in the same mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.learner.policy.packing import Completion, PackItem
from gspo.types import Group, Sample

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Batch:
    """n sequences of one rollout batch, ready to train."""

    groups: tuple[Group, ...]
    group_of: NDArray[np.int64]  # position of the sequence's group in `groups`
    trajectory_of: NDArray[np.int64]  # number of the sequence's sample, in the order of groups
    scored: NDArray[np.bool_]  # False: the reward failed; the sequence is left out of every count
    rewards: Floats  # the score; NaN where the reward failed
    shaped: Floats  # after length penalty, bias, scaling, clip
    advantages: Floats  # final; 0 where not scored
    in_denominator: NDArray[np.bool_]  # scored, and not in a group dropped for equal rewards
    minibatch: NDArray[np.int64]
    at_clip: NDArray[np.bool_] | None = None  # the shaped reward is at ±actor.reward_clip: larger ones look the same
    # By sequence number, each [|y_i|]: values at the trained tokens of every trainable sequence; None if not needed.
    reference_logp: Mapping[int, NDArray[Any]] | None = None
    token_advantages: Mapping[int, Floats] | None = None  # if set, `advantages` holds their mean over the sequence
    kl_penalty: Floats | None = None  # [n], the KL penalty subtracted from the reward, summed over tokens
    teacher_kl: Floats | None = None  # [n], token mean of log μ − log π_teacher; NaN where not computed
    values: Mapping[int, NDArray[Any]] | None = None  # V of the critic, at the start of the batch
    returns: Mapping[int, Floats] | None = None  # the critic's targets

    @cached_property
    def samples(self) -> list[Sample]:
        """The n sequences."""
        return [sequence for group in self.groups for sample in group.samples for sequence in sample.sequences]

    def prompt(self, i: int) -> tuple[int, ...]:
        """The tokens before the first token of sequence i."""
        own = self.samples[i].prompt
        return self.groups[self.group_of[i]].prompt.tokens if own is None else own

    @cached_property
    def is_first(self) -> NDArray[np.bool_]:
        """True at the first sequence of each trajectory: counts and means over trajectories use these."""
        # Sequences of a trajectory are neighbours. Numbers start at 0, so −1 makes the first one differ.
        return np.diff(self.trajectory_of, prepend=-1) != 0

    @cached_property
    def token_share(self) -> Floats:
        """|y_ij| / |y_i|: each sequence's share of its trajectory's trained tokens; 1 if it is the only sequence."""
        total = np.bincount(self.trajectory_of, self.trained_tokens, minlength=1)
        # Exactly 1 for an only sequence, even without trained tokens: `_units` in step.py then needs no weights.
        alone = np.bincount(self.trajectory_of, minlength=1) == 1
        each = self.trained_tokens / np.maximum(total[self.trajectory_of], 1)
        return np.where(alone[self.trajectory_of], 1.0, each)

    @cached_property
    def trained_tokens(self) -> NDArray[np.int64]:
        """|y_i|: the number of trained tokens of each sequence."""
        return np.array([int(sample.mask.sum()) for sample in self.samples], dtype=np.int64)

    @property
    def num_sequences(self) -> int:
        return len(self.group_of)

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """Sequences that can have a loss: in the denominator, with at least one trained token."""
        return self.in_denominator & (self.trained_tokens > 0)

    @property
    def has_gradient(self) -> NDArray[np.bool_]:
        """Sequences that can change the policy's gradient: trainable, and the advantage is not 0."""
        if self.token_advantages is None:
            return self.trainable & (self.advantages != 0)
        # Token advantages that are not 0 can have the mean 0, so the mean in `advantages` is not enough.
        nonzero = {i for i, advantage in self.token_advantages.items() if advantage.any()}
        return self.trainable & np.array([i in nonzero for i in range(self.num_sequences)], dtype=bool)

    def items(self, which: NDArray[np.bool_]) -> list[PackItem]:
        """The chosen sequences as pack items: each prompt with its completions, an episode's sequences as a tree."""
        together: dict[tuple[int, Any], list[int]] = {}
        # Number of the first sequence in the trajectory of each sequence.
        first = np.maximum.accumulate(np.where(self.is_first, np.arange(self.num_sequences), 0))  # [n]
        for i in np.flatnonzero(which).tolist():
            first_prompt, own = self.prompt(int(first[i])), self.prompt(i)
            # A sequence whose prompt does not begin with its trajectory's first prompt (an edited conversation) shares
            # a prefix with sequences of the same trajectory only.
            same = own is first_prompt or own[: len(first_prompt)] == first_prompt
            root = first_prompt if same else int(self.trajectory_of[i])
            together.setdefault((int(self.group_of[i]), root), []).append(i)
        return [item for numbers in together.values() for item in self._items(numbers)]

    def _items(self, numbers: Sequence[int]) -> list[PackItem]:
        """One item: the common prefix of the prompts is its prompt; the rest of each prompt is an untrained span."""
        prompts = [self.prompt(i) for i in numbers]
        # The common prefix of the smallest and the largest prompt (in sorted order) is common to all.
        low, high = (prompts[0], prompts[0]) if len(set(map(id, prompts))) == 1 else (min(prompts), max(prompts))
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
        root = low if low is high else tuple(token for token, _ in pairs)
        # Nothing in common: each sequence is an item of its own.
        if not root and len(numbers) > 1:
            return [item for i in numbers for item in self._items([i])]
        completions = [self._completion(i, len(root)) for i in numbers]
        shown = self.groups[self.group_of[numbers[0]]].prompt.shown
        return [PackItem(np.asarray(root, dtype=np.int64), tuple(completions), shown)]

    def _completion(self, i: int, begin: int) -> Completion:
        """Sequence i after the first `begin` tokens of its prompt."""
        sample, between = self.samples[i], np.asarray(self.prompt(i)[begin:], dtype=np.int32)
        # Share 1: no other sequence of the trajectory has trained tokens, so there is no tree.
        family = int(self.trajectory_of[i]) if self.token_share[i] != 1 else None
        # The rest of the prompt is input and never a target.
        mask = np.concatenate([np.zeros(len(between), dtype=np.bool_), sample.mask])
        return Completion(np.concatenate([between, sample.tokens]), mask, i, family, sample.trained_kept)


def minibatches(group_of: NDArray[np.int64], num_groups: int, num: int) -> NDArray[np.int64]:
    """The mini-batch of each trajectory, [m].

    Whole groups if `num` divides the number of groups (a prompt is then computed once), else equal runs of
    trajectories.
    """
    if num_groups % num == 0:
        return group_of // max(num_groups // num, 1)
    return np.arange(len(group_of)) * num // max(len(group_of), 1)
