"""A rollout batch with everything decided before the first update: rewards, advantages, mini-batches.

Sequences are numbered 0…n−1 in the order of groups and samples; every array here is [n]. Membership in mini-batches is
fixed before anything is skipped, so that no skip can change a denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.objectives import advantage, rows
from gspo.objectives.kl import kl
from gspo.train.packing import Completion, PackItem
from gspo.types import Group, Sample, Score

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Batch:
    """n sequences of one rollout batch, ready to train."""

    groups: tuple[Group, ...]
    group_of: NDArray[np.int64]  # position of the sequence's group in `groups`
    scored: NDArray[np.bool_]  # False: the reward failed; the sequence is out of every count
    rewards: Floats  # as scored; NaN where it failed
    shaped: Floats  # after length penalty, bias, scaling, clip
    advantages: Floats  # final; 0 where not scored
    counted: NDArray[np.bool_]  # in the denominator: scored, and not in a dropped group
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
        return [sample for group in self.groups for sample in group.samples]

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
        return self.counted & (self.trained_tokens > 0)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Sequences that can change the policy's gradient: those with an advantage."""
        if self.token_advantages is None:
            return self.trainable & (self.advantages != 0)
        # Their mean may be 0 where they are not.
        some = {i for i, advantage in self.token_advantages.items() if advantage.any()}
        return self.trainable & np.array([i in some for i in range(self.num_sequences)], dtype=bool)

    def items(self, which: NDArray[np.bool_]) -> list[PackItem]:
        """The chosen sequences as pack items, each prompt with its completions."""
        items, index = [], 0
        for group in self.groups:
            numbers = range(index, index + len(group.samples))
            chosen = [
                Completion(sample.tokens, sample.mask, i)
                for i, sample in zip(numbers, group.samples, strict=True)
                if which[i]
            ]
            if chosen:
                items.append(PackItem(np.asarray(group.prompt.tokens, dtype=np.int64), tuple(chosen)))
            index += len(group.samples)
        return items


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
    if isinstance(norm, str):
        kinds = {
            "group_std": advantage.group_std,
            "group_mean": advantage.group_mean,
            "leave_one_out": advantage.leave_one_out,
            "batch": advantage.batch,
        }
        return kinds[norm](x, groups).numpy()
    return advantage.normalize(x, groups, **norm).numpy()


def assemble(
    groups: Sequence[Group],
    *,
    norm: str | Mapping[str, Any],
    shaping: Shaping,
    num_minibatches: int,
    adv_norm: Mapping[str, Any] | None = None,
    zero_variance: str = "count",
    truncated_is_zero: bool = False,
) -> Batch:
    """Scores to advantages, and sequences to mini-batches."""
    groups = tuple(groups)
    group_of = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]).astype(np.int64)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([o.value if isinstance(o, Score) else np.nan for o in outcomes], dtype=np.float64)
    scored = ~np.isnan(rewards)
    lengths = np.array([int(s.mask.sum()) for s in samples], dtype=np.int64)
    shaped = shape(rewards, lengths, shaping)
    advantages = np.zeros(len(rewards))
    # A failed reward leaves its group: the others are compared among themselves.
    advantages[scored] = normalised(shaped[scored], group_of[scored], norm)
    if adv_norm is not None and scored.any():
        advantages[scored] = normalised(advantages[scored], group_of[scored], adv_norm)
    if truncated_is_zero:
        # Last: a normalisation after it would give them an advantage again.
        advantages[np.array([s.finish == "length" for s in samples], dtype=bool)] = 0.0
    counted = scored.copy()
    if zero_variance == "drop":
        judged = advantages
        if norm == "gae":
            judged = np.zeros(len(rewards))
            judged[scored] = normalised(shaped[scored], group_of[scored], "group_mean")
        flat = np.array([not (judged[(group_of == g) & scored] != 0).any() for g in range(len(groups))])
        counted &= ~flat[group_of] if len(groups) else counted
    return Batch(
        groups=groups,
        group_of=group_of,
        scored=scored,
        rewards=rewards,
        shaped=shaped,
        advantages=advantages,
        counted=counted,
        minibatch=minibatches(group_of, len(groups), num_minibatches),
        at_clip=scored & (np.abs(shaped) >= shaping.clip),
    )


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
    rewards[cuts[1:] - 1] += batch.advantages[numbers]
    value = np.zeros_like(rewards) if values is None else np.concatenate([np.zeros(0), *(values[i] for i in numbers)])
    layout = rows(torch.from_numpy(rewards), None, torch.from_numpy(cuts))
    gae_lambda = how.gae_lambda if values is not None else 1.0
    advantages, returns = (
        x.numpy()
        for x in advantage.gae(torch.from_numpy(rewards), torch.from_numpy(value), layout, how.discount, gae_lambda)
    )
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
    lengths = np.array([sample.mask.sum() for _, sample in scored], dtype=np.int64)
    values = shape(scores, lengths, shaping)
    return not normalised(values, np.zeros(len(values), dtype=np.int64), "group_mean").any()


def minibatches(group_of: NDArray[np.int64], num_groups: int, num: int) -> NDArray[np.int64]:
    """Whole groups per mini-batch where that divides (a prompt is then computed once), else runs of sequences."""
    if num_groups % num == 0:
        return group_of // max(num_groups // num, 1)
    return np.arange(len(group_of)) * num // max(len(group_of), 1)
