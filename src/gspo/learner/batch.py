"""A rollout batch with everything decided before the first update: rewards, advantages, mini-batches.

Sequences are numbered 0…n−1 in the order of groups and samples; every array here is [n]. A sample is one trajectory: a
completion, or an episode of one or more sequences, which share its reward and its advantage and count as one in every
denominator (`envs/episode.py`). Membership in mini-batches is fixed before anything is skipped, so that no skip can
change a denominator; a trajectory is never divided between two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner.policy.packing import Completion, PackItem
from gspo.objectives import advantage, rows
from gspo.objectives.kl import kl
from gspo.types import Group, Sample, Score

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Batch:
    """n sequences of one rollout batch, ready to train."""

    groups: tuple[Group, ...]
    group_of: NDArray[np.int64]  # position of the sequence's group in `groups`
    trajectory_of: NDArray[np.int64]  # number of its sample, in the order of groups
    scored: NDArray[np.bool_]  # False: the reward failed; the sequence is out of every count
    rewards: Floats  # as scored; NaN where it failed
    shaped: Floats  # after length penalty, bias, scaling, clip
    advantages: Floats  # final; 0 where not scored
    in_denominator: NDArray[np.bool_]  # in the denominator: scored, and not in a dropped group
    minibatch: NDArray[np.int64]
    at_clip: NDArray[np.bool_] | None = None  # shaped rewards at ±actor.reward_clip: told apart no longer
    # By sequence number, at the trained tokens of every sequence that is counted; None where nothing asks for them.
    reference_logp: Mapping[int, NDArray[Any]] | None = None
    token_advantages: Mapping[int, Floats] | None = None  # then `advantages` holds their mean over the sequence
    kl_penalty: Floats | None = None  # [n], what KL in the reward took from each sequence, all tokens together
    values: Mapping[int, NDArray[Any]] | None = None  # the critic's, at the start of the batch
    returns: Mapping[int, Floats] | None = None  # what they should have been

    @cached_property
    def samples(self) -> list[Sample]:
        """The sequences."""
        return [sequence for group in self.groups for sample in group.samples for sequence in sample.sequences]

    def prompt(self, i: int) -> tuple[int, ...]:
        """The tokens that sequence i follows."""
        own = self.samples[i].prompt
        return self.groups[self.group_of[i]].prompt.tokens if own is None else own

    @cached_property
    def is_first(self) -> NDArray[np.bool_]:
        """The first sequence of each trajectory: counts and means over trajectories take these."""
        return np.diff(self.trajectory_of, prepend=-1) != 0

    @cached_property
    def token_share(self) -> Floats:
        """|y_ij| / |y_i|: each sequence's share of its trajectory's trained tokens; 1 where it is the only one."""
        total = np.bincount(self.trajectory_of, self.trained_tokens, minlength=1)
        alone = np.bincount(self.trajectory_of, minlength=1) == 1
        each = self.trained_tokens / np.maximum(total[self.trajectory_of], 1)
        return np.where(alone[self.trajectory_of], 1.0, each)

    @cached_property
    def trained_tokens(self) -> NDArray[np.int64]:
        """|y_i|: trained tokens of each sequence."""
        return np.array([int(sample.mask.sum()) for sample in self.samples], dtype=np.int64)

    @property
    def num_sequences(self) -> int:
        return len(self.group_of)

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """Sequences that a loss can reach: counted, with a token to carry it."""
        return self.in_denominator & (self.trained_tokens > 0)

    @property
    def has_gradient(self) -> NDArray[np.bool_]:
        """Sequences that can change the policy's gradient: those with an advantage."""
        if self.token_advantages is None:
            return self.trainable & (self.advantages != 0)
        # Their mean may be 0 where they are not.
        some = {i for i, advantage in self.token_advantages.items() if advantage.any()}
        return self.trainable & np.array([i in some for i in range(self.num_sequences)], dtype=bool)

    def items(self, which: NDArray[np.bool_]) -> list[PackItem]:
        """The chosen sequences as pack items: each prompt with what follows it, an episode's sequences as a tree."""
        kin: dict[tuple[int, Any], list[int]] = {}
        first = np.maximum.accumulate(np.where(self.is_first, np.arange(self.num_sequences), 0))
        for i in np.flatnonzero(which).tolist():
            head, own = self.prompt(int(first[i])), self.prompt(i)
            # What begins otherwise than its trajectory did is packed with its trajectory's like alone.
            root = head if own is head or own[: len(head)] == head else int(self.trajectory_of[i])
            kin.setdefault((int(self.group_of[i]), root), []).append(i)
        return [item for numbers in kin.values() for item in self._items(numbers)]

    def _items(self, numbers: Sequence[int]) -> list[PackItem]:
        """Sequences after what all of their prompts begin with; the rest of each prompt conditions, untrained."""
        prompts = [self.prompt(i) for i in numbers]
        # What the first and the last of them in order have in common, all have.
        low, high = (prompts[0], prompts[0]) if len(set(map(id, prompts))) == 1 else (min(prompts), max(prompts))
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
        root = low if low is high else tuple(token for token, _ in pairs)
        if not root and len(numbers) > 1:
            return [item for i in numbers for item in self._items([i])]
        completions = [self._completion(i, len(root)) for i in numbers]
        return [PackItem(np.asarray(root, dtype=np.int64), tuple(completions))]

    def _completion(self, i: int, begin: int) -> Completion:
        sample, between = self.samples[i], np.asarray(self.prompt(i)[begin:], dtype=np.int32)
        family = int(self.trajectory_of[i]) if self.token_share[i] != 1 else None
        if not len(between):
            return Completion(sample.tokens, sample.mask, i, family)
        mask = np.concatenate([np.zeros(len(between), dtype=np.bool_), sample.mask])
        return Completion(np.concatenate([between, sample.tokens]), mask, i, family)


@dataclass(frozen=True)
class Credit:
    """How the reward at the end of a completion becomes an advantage at each of its tokens (see `assign`)."""

    kl_coef: float = 0.0  # actor.kl_ctl: the penalty for leaving the reference, token by token
    kl_estimator: str = "k1"
    discount: float = 1.0
    gae_lambda: float = 1.0
    adv_norm: Mapping[str, Any] | None = None  # over tokens
    truncated_is_zero: bool = False


@dataclass(frozen=True)
class Shaping:
    """How a score becomes a reward, in this order: overlong penalty, bias, scaling, clip."""

    bias: float = 0.0
    scaling: float = 1.0
    clip: float = 20.0
    overlong_tokens: int = 0  # 0: no penalty
    overlong_factor: float = 1.0
    max_new_tokens: int = 0


def shape(scores: Floats, lengths: NDArray[np.int64], how: Shaping) -> Floats:
    """clip( (score − penalty + bias) · scaling ), the penalty rising linearly over the last `overlong_tokens`.

    (DAPO, arXiv 2503.14476, eq. 13: 0 up to L − tail, then (L − tail − |y|)/tail.)
    """
    out = scores.copy()
    if how.overlong_tokens:
        over = np.clip((lengths - (how.max_new_tokens - how.overlong_tokens)) / how.overlong_tokens, 0.0, 1.0)
        out = out - how.overlong_factor * over
    return np.clip((out + how.bias) * how.scaling, -how.clip, how.clip)


def normalised(rewards: Floats, group_of: NDArray[np.int64], norm: str | Mapping[str, Any]) -> Floats:
    """Advantages by a preset's name (`group_std`, …) or by an explicit normalisation.

    `gae` leaves rewards as they are: what they are worth is for the critic to say (`assign`).
    """
    if norm == "gae":
        return rewards
    x, groups = torch.from_numpy(np.ascontiguousarray(rewards)), torch.from_numpy(np.ascontiguousarray(group_of))
    return advantage.normalize(x, groups, **(advantage.PRESETS[norm] if isinstance(norm, str) else norm)).numpy()


def assemble(
    groups: Sequence[Group],
    *,
    norm: str | Mapping[str, Any],
    shaping: Shaping,
    num_minibatches: int,
    adv_norm: Mapping[str, Any] | None = None,
    zero_variance: str = "count",
    truncated_is_zero: bool = False,
    turn_discount: float = 1.0,
) -> Batch:
    """Scores to advantages, and sequences to mini-batches."""
    groups = tuple(groups)
    trajectories = [sample for group in groups for sample in group.samples]
    # By trajectory, [m], to the end of this function; its sequences take its values.
    group_of = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]).astype(np.int64)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    rewards = np.array([o.value if isinstance(o, Score) else np.nan for o in outcomes], dtype=np.float64)
    scored = ~np.isnan(rewards)
    shaped = shape(rewards, longest_turns(trajectories), shaping)
    advantages = np.zeros(len(rewards))
    # A failed reward leaves its group: the others are compared among themselves.
    advantages[scored] = normalised(shaped[scored], group_of[scored], norm)
    if adv_norm is not None and scored.any():
        advantages[scored] = normalised(advantages[scored], group_of[scored], adv_norm)
    truncated = np.array([truncated_is_zero and s.ending == "length" for s in trajectories], dtype=bool)
    advantages[truncated] = 0.0  # last: a normalisation after it would give them an advantage again
    in_denominator = scored.copy()
    if zero_variance == "drop":
        judged = advantages
        if norm == "gae":
            judged = np.zeros(len(rewards))
            judged[scored] = normalised(shaped[scored], group_of[scored], "group_mean")
        flat = np.array([not (judged[(group_of == g) & scored] != 0).any() for g in range(len(groups))])
        in_denominator &= ~flat[group_of] if len(groups) else in_denominator
    of = np.repeat(np.arange(len(trajectories)), [1 + len(s.rest) for s in trajectories]).astype(np.int64)
    batch = Batch(
        groups=groups,
        group_of=group_of[of],
        trajectory_of=of,
        scored=scored[of],
        rewards=rewards[of],
        shaped=shaped[of],
        advantages=advantages[of],
        in_denominator=in_denominator[of],
        minibatch=minibatches(group_of, len(groups), num_minibatches)[of],
        at_clip=(scored & (np.abs(shaped) >= shaping.clip))[of],
    )
    if norm == "gae" or not (turn_discount < 1 or any(s.turn_rewards for s in trajectories)):
        return batch
    return by_turns(batch, norm, adv_norm, turn_discount, shaping.scaling, truncated)


def by_turns(
    batch: Batch,
    norm: str | Mapping[str, Any],
    adv_norm: Mapping[str, Any] | None,
    discount: float,
    scaling: float,
    truncated: NDArray[np.bool_],
) -> Batch:
    """Advantages that differ from turn to turn (`objectives.advantage.by_turn`), at each turn's tokens.

    A sequence ratio takes their mean over its unit: with actor.sequence_unit turn that is the turn's own.
    """
    trajectories = [sample for group in batch.groups for sample in group.samples]
    scored = batch.scored[batch.is_first]
    place = np.cumsum(scored) - 1  # of each trajectory among the scored
    turns = [np.unique(np.concatenate([s.turns[s.mask] for s in sample.sequences])) for sample in trajectories]
    kept = [(i, k, int(turn)) for i in np.flatnonzero(scored) for k, turn in enumerate(turns[i].tolist())]
    # A reward for a turn that is not trained (its answer was lost) counts at the end.
    earned = [scaling * trajectories[i].turn_rewards.get(turn, 0.0) for i, _, turn in kept]
    total = np.zeros(len(trajectories))
    np.add.at(total, [i for i, _, _ in kept], earned)
    settings = advantage.PRESETS[norm] if isinstance(norm, str) else norm
    values = advantage.by_turn(
        torch.from_numpy((batch.shaped[batch.is_first] - total)[scored]),
        torch.tensor(earned, dtype=torch.float64),
        torch.from_numpy(batch.group_of[batch.is_first][scored]),
        torch.tensor([int(place[i]) for i, _, _ in kept], dtype=torch.int64),
        torch.tensor([k for _, k, _ in kept], dtype=torch.int64),
        discount=discount,
        **settings,
    ).numpy()
    of_turn = {(int(i), turn): 0.0 if truncated[i] else float(v) for (i, _, turn), v in zip(kept, values, strict=True)}
    numbers = np.flatnonzero(batch.trainable).tolist()
    by_token = {
        n: np.array([of_turn[int(batch.trajectory_of[n]), t] for t in s.turns[s.mask].tolist()])
        for n in numbers
        for s in (batch.samples[n],)
    }
    if adv_norm is not None and numbers:
        lengths = batch.trained_tokens[numbers]
        flat = normalised(
            np.concatenate([by_token[n] for n in numbers]), np.repeat(batch.group_of[numbers], lengths), adv_norm
        )
        cuts = np.cumsum(lengths)[:-1]
        by_token = {
            n: np.zeros_like(part) if truncated[batch.trajectory_of[n]] else part
            for n, part in zip(numbers, np.split(flat, cuts), strict=True)
        }
    mean = np.zeros(batch.num_sequences)
    mean[numbers] = [by_token[n].mean() for n in numbers]
    return replace(batch, advantages=mean, token_advantages=by_token)


def longest_turns(trajectories: Sequence[Sample]) -> NDArray[np.int64]:
    """Trained tokens of each trajectory's longest turn: what gconfig.max_new_tokens bounds."""
    lengths = [
        max((int(n) for s in t.sequences for n in np.bincount(s.turns[s.mask].astype(np.int64))), default=0)
        for t in trajectories
    ]
    return np.array(lengths, dtype=np.int64)


def assign(batch: Batch, how: Credit) -> Batch:
    """From one reward per sequence to one advantage per token, with the reference's and the critic's help.

        r_it = −β k_it + [t = |y_i|] R_i          k_it of (log μ, log π_ref) at token t, by `objectives.kl`
        δ_it = r_it + γ V_i,t+1 − V_it            V after the last token is 0
        A_it = Σ_u≥t (γλ)^(u−t) δ_iu              returns A_it + V_it are the critic's targets

    R_i is the shaped reward where there is a critic, and the group (or batch) advantage A_i where there is none; then
    V = 0 and λ = 1, which leaves  A_it = γ^(|y_i|−t) A_i − β Σ_u≥t γ^(u−t) k_iu:  a token pays for the divergence that
    follows it, as in AReaL. A sequence ratio takes the mean over t: with γ = 1,  A_i − (β/|y_i|) Σ_u u k_iu.
    μ is the policy that sampled the tokens: its log-probs need no forward pass, and the k's are its KL without bias.
    Groups were compared before the penalty, so a group of equal rewards still feels it. `adv_norm` comes last and is
    over tokens; a truncated completion's advantages are 0 after it where that is asked.
    """
    numbers, values = np.flatnonzero(batch.trainable).tolist(), batch.values
    lengths = batch.trained_tokens[numbers]
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rewards = np.zeros(int(cuts[-1]))
    if how.kl_coef:
        assert batch.reference_logp is not None
        behavior = [batch.samples[i].behavior_logp[batch.samples[i].mask] for i in numbers]
        rewards -= how.kl_coef * _joined_kl(behavior, [batch.reference_logp[i] for i in numbers], how.kl_estimator)
    penalty = np.zeros(batch.num_sequences)
    penalty[numbers] = [-rewards[cuts[b] : cuts[b + 1]].sum() for b in range(len(numbers))]
    if batch.token_advantages is None:
        rewards[cuts[1:] - 1] += batch.advantages[numbers]
    value = np.zeros_like(rewards) if values is None else np.concatenate([np.zeros(0), *(values[i] for i in numbers)])
    layout = rows(torch.from_numpy(rewards), None, torch.from_numpy(cuts))
    gae_lambda = how.gae_lambda if values is not None else 1.0
    advantages, returns = (
        x.numpy()
        for x in advantage.gae(torch.from_numpy(rewards), torch.from_numpy(value), layout, how.discount, gae_lambda)
    )
    if batch.token_advantages is not None:  # turns were credited already; the penalty comes on top
        advantages = advantages + np.concatenate([np.zeros(0), *(batch.token_advantages[i] for i in numbers)])
    if how.adv_norm is not None and len(advantages):
        advantages = normalised(advantages, np.repeat(batch.group_of[numbers], lengths), how.adv_norm)
    by_token = {i: advantages[cuts[b] : cuts[b + 1]] for b, i in enumerate(numbers)}
    if how.truncated_is_zero:
        by_token |= {i: np.zeros_like(by_token[i]) for i in numbers if batch.samples[i].finish == "length"}
    mean = np.zeros(batch.num_sequences)
    mean[numbers] = [by_token[i].mean() for i in numbers]
    return replace(
        batch,
        advantages=mean,
        token_advantages=by_token,
        kl_penalty=penalty if how.kl_coef else None,
        returns=None if values is None else {i: returns[cuts[b] : cuts[b + 1]] for b, i in enumerate(numbers)},
    )


def _joined_kl(behavior: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]], estimator: str) -> Floats:
    ours, theirs = (torch.from_numpy(np.concatenate([np.zeros(0), *parts])) for parts in (behavior, reference))
    return kl(ours, theirs, estimator).numpy()


def is_flat(group: Group, shaping: Shaping) -> bool:
    """Whether all rewards of a group are the same after shaping, so that it teaches nothing."""
    scored = [(o.value, s) for o, s in zip(group.outcomes, group.samples, strict=True) if isinstance(o, Score)]
    scores = np.array([value for value, _ in scored], dtype=np.float64)
    values = shape(scores, longest_turns([sample for _, sample in scored]), shaping)
    return not normalised(values, np.zeros(len(values), dtype=np.int64), "group_mean").any()


def minibatches(group_of: NDArray[np.int64], num_groups: int, num: int) -> NDArray[np.int64]:
    """Whole groups per mini-batch where that divides (a prompt is then computed once), else runs of sequences."""
    if num_groups % num == 0:
        return group_of // max(num_groups // num, 1)
    return np.arange(len(group_of)) * num // max(len(group_of), 1)
