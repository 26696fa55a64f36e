"""From scored groups to a batch with advantages: rewards become advantages, groups become mini-batches.

Sequences are numbered 0…n−1 in the order of groups and samples; every array here is [n]. A sample is one trajectory:
one completion, or an episode of one or more sequences. The sequences of an episode share its reward and its advantage,
and count as one trajectory in every denominator (`envs/episode.py`). Mini-batches are assigned before any sequence is
skipped, so that skipping cannot change a denominator. All sequences of a trajectory are in the same mini-batch.

`batch_with_advantages` turns scored groups into a `Batch`: one advantage per trajectory, or one per turn if the
environment gave rewards to turns. `with_token_advantages` then computes one advantage per token, if a critic, a
discount or a KL penalty needs that, and applies `actor.adv_norm`. The formulas are in `objectives/advantage.py`.
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

from gspo.errors import TrainingError
from gspo.learner.policy.packing import Completion, PackItem
from gspo.objectives import advantage, kl, token_layout
from gspo.rewards import overlong
from gspo.types import Group, Outcome, Sample, Score

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
    turn_rewards: Sequence[Mapping[int, float]] | None = None  # by trajectory, with a critic: turn → its reward
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


@dataclass(frozen=True)
class Shaping:
    """How a score becomes a reward, in this order: overlong penalty, bias, scaling, clip."""

    bias: float = 0.0
    scaling: float = 1.0
    clip: float = 20.0
    overlong_tokens: int = 0  # 0: no penalty
    overlong_factor: float = 1.0
    max_new_tokens: int = 0
    normalize_each: bool = False  # each part of the reward is normalised apart (`components`); the clip is not used


@dataclass(frozen=True)
class Credit:
    """Settings of `with_token_advantages`: what follows the reward at the end of a completion."""

    kl_coef: float = 0.0  # actor.kl_ctl, β: weight of the KL penalty in the reward
    kl_estimator: str = "k1"
    discount: float = 1.0
    gae_lambda: float = 1.0
    adv_norm: Mapping[str, Any] | None = None  # normalisation over trained tokens
    truncated_is_zero: bool = False  # the advantage of truncated completions, after everything else


def shape_scores(scores: Floats, lengths: NDArray[np.int64], how: Shaping) -> Floats:
    """clip( (score − penalty + bias) · scaling ); the penalty rises linearly over the last `overlong_tokens`."""
    out = scores.copy()
    if how.overlong_tokens:
        out = out + _overlong(lengths, how)
    return np.clip((out + how.bias) * how.scaling, -how.clip, how.clip)


def _overlong(lengths: NDArray[np.int64], how: Shaping) -> Floats:
    """The length penalty of each completion, 0 or negative, [m]."""
    longest, tail, factor = how.max_new_tokens, how.overlong_tokens, how.overlong_factor
    return np.array(
        [overlong("", num_tokens=n, max_tokens=longest, buffer_tokens=tail, factor=factor) for n in lengths.tolist()],
        dtype=np.float64,
    )


def components(
    outcomes: Sequence[Outcome], lengths: NDArray[np.int64], how: Shaping
) -> list[tuple[NDArray[np.bool_], Floats, Floats]]:
    """The parts of the rewards: per part, which of the m trajectories have it, and their values and weights.

    The overlong penalty is a part of its own. A score without parts is one part.
    """
    scores = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Score)}
    parts = {i: score.parts or {"": score.value} for i, score in scores.items()}
    names = dict.fromkeys(name for of in parts.values() for name in of)
    found: list[tuple[NDArray[np.bool_], Floats, Floats]] = []
    for name in names:
        has = np.array([name in parts.get(i, ()) for i in range(len(outcomes))], dtype=bool)  # [m]
        numbers = np.flatnonzero(has).tolist()
        values = np.array([parts[i][name] for i in numbers], dtype=np.float64)
        found.append((has, values, np.array([scores[i].weights.get(name, 1.0) for i in numbers], dtype=np.float64)))
    if how.overlong_tokens:
        scored = np.array([i in scores for i in range(len(outcomes))], dtype=bool)
        found.append((scored, _overlong(lengths[scored], how), np.ones(int(scored.sum()))))
    return found


def normalised_apart(
    outcomes: Sequence[Outcome],
    lengths: NDArray[np.int64],
    group_of: NDArray[np.int64],
    norm: str | Mapping[str, Any],
    how: Shaping,
) -> Floats:
    """A_i = Σ_k w_k · normalised(r_ik), [m]; 0 for a reward that failed   (GDPO, arXiv 2601.05242)."""
    total = np.zeros(len(outcomes))
    for has, values, weights in components(outcomes, lengths, how):
        total[has] += weights * normalised(values, group_of[has], norm)
    # Parts that cancel leave rounding errors, but callers skip sequences by `advantage != 0`.
    return np.where(np.abs(total) < 1e-9, 0.0, total)


def normalised(
    rewards: Floats,
    group_of: NDArray[np.int64],
    norm: str | Mapping[str, Any],
    weight: NDArray[np.int64] | None = None,
) -> Floats:
    """Advantages by the name of a preset (`group_std`, …) or by an explicit normalisation.

    `teacher` gives 0: `with_teacher_advantages` adds the teacher's. `gae` leaves rewards unchanged: the critic's values
    are subtracted later, in `with_token_advantages`. So does `one`: completions of a data set have the reward 1.
    weight: element i stands for so many equal values; None: 1.
    """
    if norm == "teacher":
        return np.zeros_like(rewards)
    if norm in ("gae", "one"):
        return rewards
    x, groups = torch.from_numpy(np.ascontiguousarray(rewards)), torch.from_numpy(np.ascontiguousarray(group_of))
    times = None if weight is None else torch.from_numpy(weight)
    how = advantage.PRESETS[norm] if isinstance(norm, str) else norm
    return advantage.normalize(x, groups, weight=times, **how).numpy()


def is_flat(group: Group, shaping: Shaping) -> bool:
    """Whether all rewards of a group are equal after shaping: every advantage is 0, so the group has no gradient."""
    if shaping.normalize_each:
        one = np.zeros(len(group.samples), dtype=np.int64)
        # Divided by the std: without it the parts of equal sums would cancel, as they do for `normalize: sum`.
        return not normalised_apart(group.outcomes, longest_turns(group.samples), one, "group_std", shaping).any()
    scored = [(o.value, s) for o, s in zip(group.outcomes, group.samples, strict=True) if isinstance(o, Score)]
    scores = np.array([value for value, _ in scored], dtype=np.float64)
    values = shape_scores(scores, longest_turns([sample for _, sample in scored]), shaping)
    # Centring gives exactly 0 for equal rewards, with the same tolerance as in training.
    return not normalised(values, np.zeros(len(values), dtype=np.int64), "group_mean").any()


def longest_turns(trajectories: Sequence[Sample]) -> NDArray[np.int64]:
    """[m] trained tokens of each trajectory's longest turn: the length that gconfig.max_new_tokens limits."""
    lengths = [
        max((int(n) for s in t.sequences for n in np.bincount(s.turns[s.mask].astype(np.int64))), default=0)
        for t in trajectories
    ]
    return np.array(lengths, dtype=np.int64)


def batch_with_advantages(
    groups: Sequence[Group],
    *,
    norm: str | Mapping[str, Any],
    shaping: Shaping,
    num_minibatches: int,
    zero_variance: str = "count",
    truncated_is_zero: bool = False,
    turn_discount: float = 1.0,
) -> Batch:
    """Scored groups to a batch: rewards, advantages and mini-batches.

    norm: the preset's normalisation over groups; zero_variance: `drop` takes groups of equal rewards out of the
    denominator, `count` leaves them in; truncated_is_zero: a truncated completion gets 0 in place of its normalised
    reward, as in AReaL (a KL penalty, a critic and actor.adv_norm still apply to it).
    """
    groups = tuple(groups)
    trajectories = [sample for group in groups for sample in group.samples]
    # The arrays below are per trajectory, [m]; `[of]` at the end repeats them per sequence, [n].
    group_of = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]).astype(np.int64)
    # Rewards. NaN marks a reward that failed; the trajectory is then in no count and has advantage 0.
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    rewards = np.array([o.value if isinstance(o, Score) else np.nan for o in outcomes], dtype=np.float64)
    scored = ~np.isnan(rewards)
    lengths = longest_turns(trajectories)
    shaped = shape_scores(rewards, lengths, shaping)
    # A trajectory without a reward leaves its group: the mean and the std are over the scored ones.
    if shaping.normalize_each:
        advantages = normalised_apart(outcomes, lengths, group_of, norm, shaping)
    else:
        advantages = np.zeros(len(rewards))
        advantages[scored] = normalised(shaped[scored], group_of[scored], norm)
    truncated = np.array([truncated_is_zero and s.ending == "length" for s in trajectories], dtype=bool)
    advantages[truncated] = 0.0
    # Denominator, and the step from trajectories [m] to sequences [n]: an episode can have several.
    in_denominator = scored & ~_flat_groups(rewards, shaped, advantages, group_of, norm, zero_variance)
    of = np.repeat(np.arange(len(trajectories)), [1 + len(s.rest) for s in trajectories]).astype(np.int64)  # [n]
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
    # One advantage per trajectory is enough unless turns have rewards or a discount.
    has_rewards = any(s.turn_rewards for s in trajectories)
    if norm == "gae" and has_rewards:  # `with_token_advantages` places them
        earned = turn_rewards(trajectories, shaping.scaling)
        return replace(batch, turn_rewards=[{} if truncated[i] else each for i, each in enumerate(earned)])
    if norm == "gae" or not (turn_discount < 1 or has_rewards):
        return batch
    if shaping.normalize_each:
        raise TrainingError(
            "reward.normalize: each cannot be combined with rewards of turns (env.turn_discount, or an environment "
            "that returns them): set reward.normalize: sum"
        )
    return by_turns(batch, norm, turn_discount, shaping.scaling, truncated)


def turn_rewards(trajectories: Sequence[Sample], scaling: float) -> list[dict[int, float]]:
    """By trajectory: the reward of each turn that has trained tokens, in the order of turns.

    The reward of any other turn is part of the final reward: no token of its own could be credited with it.
    """
    turns = [np.unique(np.concatenate([s.turns[s.mask] for s in each.sequences])).tolist() for each in trajectories]
    return [
        {turn: scaling * each.turn_rewards.get(turn, 0.0) for turn in own}
        for each, own in zip(trajectories, turns, strict=True)
    ]


def _flat_groups(
    rewards: Floats,
    shaped: Floats,
    advantages: Floats,
    group_of: NDArray[np.int64],
    norm: str | Mapping[str, Any],
    zero_variance: str,
) -> NDArray[np.bool_]:
    """[m] True where `zero_variance: drop` removes the trajectory's group: all of its advantages are 0."""
    if zero_variance != "drop":
        return np.zeros(len(rewards), dtype=bool)
    scored = ~np.isnan(rewards)
    # Advantages that are not compared within the group are not 0 for equal rewards: these show after centring.
    how = advantage.PRESETS.get(norm) if isinstance(norm, str) else norm
    if norm == "gae" or (how is not None and how["mean_level"] != "group"):
        advantages = np.zeros(len(rewards))
        advantages[scored] = normalised(shaped[scored], group_of[scored], "group_mean")
    num_groups = int(group_of.max(initial=-1)) + 1
    has_signal = np.bincount(group_of[scored & (advantages != 0)], minlength=num_groups) > 0  # [groups]
    return ~has_signal[group_of]


def by_turns(
    batch: Batch, norm: str | Mapping[str, Any], discount: float, scaling: float, truncated: NDArray[np.bool_]
) -> Batch:
    """One advantage per turn (`objectives.advantage.by_turn`), stored at each token of the turn.

    A sequence ratio takes the mean over its unit: with actor.sequence_unit turn that is the turn's own advantage.
    """
    trajectories = [sample for group in batch.groups for sample in group.samples]
    # `advantage.by_turn` receives scored trajectories only, so their numbers are mapped to positions among these.
    scored = batch.scored[batch.is_first]  # [m]
    place = np.cumsum(scored) - 1  # [m] position among the scored trajectories
    of_turns = turn_rewards(trajectories, scaling)
    # (trajectory, position of the turn in it, turn number) of every trained turn, [K] entries
    entries = [(i, k, turn) for i in np.flatnonzero(scored) for k, turn in enumerate(of_turns[i])]
    earned = [of_turns[i][turn] for i, _, turn in entries]  # [K]
    total = np.zeros(len(trajectories))  # [m] sum of turn rewards
    np.add.at(total, [i for i, _, _ in entries], earned)
    # Turn rewards are part of the trajectory's reward; what remains after subtracting them is the reward at its end.
    settings = advantage.PRESETS[norm] if isinstance(norm, str) else norm
    values = advantage.by_turn(
        torch.from_numpy((batch.shaped[batch.is_first] - total)[scored]),
        torch.tensor(earned, dtype=torch.float64),
        torch.from_numpy(batch.group_of[batch.is_first][scored]),
        torch.tensor([int(place[i]) for i, _, _ in entries], dtype=torch.int64),
        torch.tensor([k for _, k, _ in entries], dtype=torch.int64),
        discount=discount,
        **settings,
    ).numpy()  # [K]
    # Back to tokens: by (trajectory, turn number), then by sequence, each [|y_i|].
    of_turn = {
        (int(i), turn): 0.0 if truncated[i] else float(v) for (i, _, turn), v in zip(entries, values, strict=True)
    }
    numbers = np.flatnonzero(batch.trainable).tolist()
    by_token = {
        n: np.array([of_turn[int(batch.trajectory_of[n]), t] for t in s.turns[s.mask].tolist()])
        for n in numbers
        for s in (batch.samples[n],)
    }
    return replace(batch, advantages=_sequence_means(by_token, batch.num_sequences), token_advantages=by_token)


def with_token_advantages(batch: Batch, how: Credit) -> Batch:
    """The last steps to the final advantages: one per token if a KL penalty, a critic or a discount needs that, then
    `actor.adv_norm`, then 0 for truncated completions.

        A_it ← ( A_it − mean A ) / std A      over all trained tokens of the batch, or of the group

    That is the normalisation of AReaL and verl: a completion counts by its trained tokens, whether its advantage
    differs between them or not.
    """
    if how.kl_coef or how.discount < 1 or batch.values is not None:
        batch = _by_gae(batch, how)
    numbers = np.flatnonzero(batch.trainable)
    lengths, group_of, by_token = batch.trained_tokens[numbers], batch.group_of[numbers], batch.token_advantages
    if how.adv_norm is not None and len(numbers):
        if by_token is None:  # one value stands for all tokens of its sequence
            own = normalised(batch.advantages[numbers], group_of, how.adv_norm, lengths)
            batch = replace(batch, advantages=_filled(batch.num_sequences, numbers, own))
        else:
            flat = _joined([by_token[i] for i in numbers.tolist()]).numpy()
            flat = normalised(flat, np.repeat(group_of, lengths), how.adv_norm)
            by_token = dict(zip(numbers.tolist(), np.split(flat, np.cumsum(lengths)[:-1]), strict=True))
    if how.truncated_is_zero:
        # Last: a normalisation after it would make them non-zero again.
        truncated = np.array([sample.finish == "length" for sample in batch.samples], dtype=bool)
        batch = replace(batch, advantages=np.where(truncated, 0.0, batch.advantages))
        if by_token is not None:
            by_token = {i: np.zeros_like(own) if truncated[i] else own for i, own in by_token.items()}
    if by_token is None or by_token is batch.token_advantages:
        return batch
    return replace(batch, advantages=_sequence_means(by_token, batch.num_sequences), token_advantages=by_token)


def _by_gae(batch: Batch, how: Credit) -> Batch:
    """From one reward per sequence to one advantage per token, with the reference's log-probs and the critic's values.

        r_it = −β k_it + Σ_l [t = t_l] r_il + [t = |y_i|] (R_i − Σ_l r_il)
        δ_it = r_it + γ V_i,t+1 − V_it        V after the last token is 0
        A_it = Σ_u≥t (γλ)^(u−t) δ_iu          returns A_it + V_it are the critic's targets

    k_it is of (log μ, log π_ref) at token t, by `objectives.kl`; r_il is the reward of turn l, at its last token t_l.
    R_i is the shaped reward if there is a critic, else the group (or batch) advantage A_i. Without a critic V = 0 and
    λ = 1, so  A_it = γ^(|y_i|−t) A_i − β Σ_u≥t γ^(u−t) k_iu:  a token is penalised for the divergence of all tokens
    from it on, as in AReaL. A sequence ratio takes the mean over t: with γ = 1,  A_i − (β/|y_i|) Σ_u u k_iu.
    μ is the policy that sampled the tokens: its log-probs need no forward pass, and the mean of k is an unbiased
    estimate of its KL. Groups are normalised before the penalty, so it applies to groups of equal rewards, too.
    """
    if batch.values is not None and batch.token_advantages is not None:
        raise TrainingError(
            "actor.reward_norm cannot be combined with a critic and rewards of turns: it has one value per episode; "
            "remove it (actor.adv_norm normalises the advantages)"
        )
    numbers, values = np.flatnonzero(batch.trainable).tolist(), batch.values
    lengths = batch.trained_tokens[numbers]
    # The trained tokens of all trainable sequences, end to end: N tokens, sequence b at cuts[b]:cuts[b+1].
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rewards = np.zeros(int(cuts[-1]))  # [N]
    if how.kl_coef:
        assert batch.reference_logp is not None
        # [N] each
        behavior = _joined([batch.samples[i].behavior_logp[batch.samples[i].mask] for i in numbers])
        reference = _joined([batch.reference_logp[i] for i in numbers])
        rewards -= how.kl_coef * kl(behavior, reference, how.kl_estimator).numpy()
    # [n] Σ_t β k_it, for the metrics: taken before R_i is added to the token rewards.
    penalty = np.zeros(batch.num_sequences)
    penalty[numbers] = [-rewards[cuts[b] : cuts[b + 1]].sum() for b in range(len(numbers))]
    # A trainable sequence has at least one trained token, so no two sequences have the same last index.
    if batch.token_advantages is None:
        rewards[cuts[1:] - 1] += batch.advantages[numbers]  # R_i, at the last token
    for b, i in enumerate(numbers) if batch.turn_rewards is not None else ():
        _place_turn_rewards(batch, i, rewards[cuts[b] : cuts[b + 1]])
    # GAE over all sequences in one packed call. Without a critic it reduces to discounted sums of the rewards.
    value = torch.from_numpy(np.zeros_like(rewards)) if values is None else _joined([values[i] for i in numbers])
    layout = token_layout(torch.from_numpy(rewards), None, torch.from_numpy(cuts))
    gae_lambda = how.gae_lambda if values is not None else 1.0
    advantages, returns = (
        x.numpy() for x in advantage.gae(torch.from_numpy(rewards), value, layout, how.discount, gae_lambda)
    )
    if batch.token_advantages is not None:  # `by_turns` has credited the rewards; GAE above saw only the penalty
        advantages = advantages + _joined([batch.token_advantages[i] for i in numbers]).numpy()
    # Back to one array per sequence.
    by_token = {i: advantages[cuts[b] : cuts[b + 1]] for b, i in enumerate(numbers)}
    return replace(
        batch,
        advantages=_sequence_means(by_token, batch.num_sequences),
        token_advantages=by_token,
        kl_penalty=penalty if how.kl_coef else None,
        returns=None if values is None else {i: returns[cuts[b] : cuts[b + 1]] for b, i in enumerate(numbers)},
    )


def _place_turn_rewards(batch: Batch, i: int, rewards: Floats) -> None:
    """Move the rewards of turns from the last token of sequence i to the last tokens of their turns, in place.

    A turn that is in another sequence of the episode goes to the last token before it: rewards that are still to come
    are credited to this sequence, and rewards of turns before its first one are not.
    """
    assert batch.turn_rewards is not None
    sample = batch.samples[i]
    turns = sample.turns[sample.mask]  # [|y_i|], ascending
    for turn, earned in batch.turn_rewards[batch.trajectory_of[i]].items():
        rewards[-1] -= earned
        at = int(np.searchsorted(turns, turn, side="right")) - 1  # the last token of the turns up to this one
        if at >= 0:
            rewards[at] += earned


def with_teacher_advantages(batch: Batch, teacher_logp: Mapping[int, NDArray[Any]], coef: float) -> Batch:
    """Distillation:  A_it + coef · (log π_teacher(y_it) − log μ(y_it)),  A_it the advantage of a reward or 0.

    Its expectation over samples of μ is −coef · KL(μ ‖ π_teacher), token by token. coef 0: the KL is measured only.
    """
    by_token, gap = dict[int, Floats](), np.full(batch.num_sequences, np.nan)
    for i in np.flatnonzero(batch.trainable).tolist():
        sample = batch.samples[i]
        own = batch.advantages[i] if batch.token_advantages is None else batch.token_advantages[i]
        d = np.asarray(teacher_logp[i], dtype=np.float64) - sample.behavior_logp[sample.mask]  # [|y_i|]
        by_token[i], gap[i] = own + coef * d, -d.mean()
    if not coef:
        return replace(batch, teacher_kl=gap)
    means = _sequence_means(by_token, batch.num_sequences)
    return replace(batch, advantages=means, token_advantages=by_token, teacher_kl=gap)


def _joined(parts: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Arrays end to end as one float64 tensor; empty if there are none."""
    # The empty array sets float64, and allows an empty list of parts.
    return torch.from_numpy(np.concatenate([np.zeros(0), *parts]))


def _sequence_means(by_token: Mapping[int, Floats], num_sequences: int) -> Floats:
    """[n] mean of each sequence's token values; 0 where it has none."""
    return _filled(num_sequences, list(by_token), [own.mean() for own in by_token.values()])


def _filled(num_sequences: int, numbers: Any, values: Any) -> Floats:
    """[n] the values at these sequence numbers, else 0."""
    out = np.zeros(num_sequences)
    out[numbers] = values
    return out
