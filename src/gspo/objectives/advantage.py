"""Advantages: the reward of a completion relative to its group. Computed in float64, from rewards and group ids, [n].

Groups are given by id and not by reshaping, so groups of unequal size are handled correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.objectives.aggregate import TokenLayout, compute_dtype, keep_trained

SetOf = Literal["batch", "group"] | None

# The presets of `algorithms.py` as settings of `normalize`; each has a function below.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "group_std": {"mean_level": "group", "std_level": "group"},
    "group_mean": {"mean_level": "group", "std_level": None},
    "leave_one_out": {"mean_level": "group", "std_level": None, "leave_one_out": True},
    "batch": {"mean_level": None, "std_level": None},  # the rewards; `batch` normalises them over tokens, at the end
}
OVER_THE_BATCH: Mapping[str, Any] = {"mean_level": "batch", "std_level": "batch"}

# Rewards closer than this (relative to their size) count as equal: sums of parts can differ in the last bit.
SAME = 1e-6


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (r_i − mean_G r) / std_G r   (arXiv 2507.18071, eq. 6); unbiased std, nothing added to it.

    A group of equal rewards, or of one sample, gives exactly 0.
    """
    return normalize(rewards, groups, **PRESETS["group_std"])


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i − mean_G r   (Dr. GRPO, arXiv 2503.20783)."""
    return normalize(rewards, groups, **PRESETS["group_mean"])


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i − (1/(G−1)) Σ_{j≠i} r_j   (RLOO, arXiv 2402.14740, eq. 7)."""
    return normalize(rewards, groups, **PRESETS["leave_one_out"])


def batch(rewards: Tensor, num_tokens: Tensor) -> Tensor:
    """A_i = (r_i − mean r) / std r,  mean r = Σ_i |y_i| r_i / Σ_i |y_i|:  over the tokens of the rollout batch, each
    of which has its completion's reward   (REINFORCE++, arXiv 2501.03262)."""
    return normalize(rewards, torch.zeros_like(num_tokens), weight=num_tokens, **OVER_THE_BATCH)


def normalize(
    x: Tensor,
    groups: Tensor,
    *,
    mean_level: SetOf,
    std_level: SetOf,
    leave_one_out: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """(x − mean) / std, [n]; mean and std over the batch, over the element's group, or not used (None).

    weight [n], integers: element i stands for w_i equal values; None: 1 each. mean = Σ w x / Σ w and
    std² = Σ w (x − mean)² / (Σ w − 1) are then those of the Σ w values. If the values of a set are all equal
    (range ≤ SAME · max(1, |x|)), the centred value and the quotient are exactly 0.
    """
    if x.ndim != 1 or groups.shape != x.shape:
        raise ValueError(f"x and groups are [n], got {tuple(x.shape)} and {tuple(groups.shape)}")
    out = x.to(torch.float64)  # [n]
    # One id for all elements: the batch is then a single set.
    whole_batch = torch.zeros_like(groups)  # [n]
    if mean_level is not None:
        ids = groups if mean_level == "group" else whole_batch
        count, mean, same = _set_statistics(x.to(torch.float64), ids, weight)
        out = out - mean
        if leave_one_out:
            # r_i − mean of the others = (r_i − mean) · G/(G − 1). clamp: a set of one sample has no others.
            out = out * count / (count - 1).clamp(min=1)
        # Exactly 0: callers skip sequences by `advantage != 0`, and a rounding error of the mean must not pass that
        # test.
        out = torch.where(same, 0.0, out)
    if std_level is not None:
        # The std is that of x, not of the centred values: with leave_one_out these are larger by G/(G − 1).
        out = _divided(out, x.to(torch.float64), groups if std_level == "group" else whole_batch, weight)
    return out.to(compute_dtype(x.dtype))


def by_turn(
    final: Tensor,
    turn_rewards: Tensor,
    groups: Tensor,
    trajectory: Tensor,
    turn: Tensor,
    *,
    discount: float = 1.0,
    mean_level: SetOf = "group",
    std_level: SetOf = "group",
    leave_one_out: bool = False,
) -> Tensor:
    """One advantage per turn of an episode, [K]:

        A_ik = ( γ^(n_i−k) (f_i − mean f) + G_ik − mean_k G ) / std R
        G_ik = Σ_{l ≥ k} γ^(l−k) r_il,    R_i = f_i + Σ_l r_il

    f_i [n] is trajectory i's reward at its end, r_il [K] the reward of its turn l, n_i its last turn;
    γ discounts by turns. mean_k is over the trajectories (of the group or batch) that have a turn k: a turn gets no
    credit for rewards before it, and an episode that ends early lacks the rewards that the others still earn. Without
    turn rewards A_ik = γ^(n_i−k) A_i; with a single turn A_i is `normalize` of R.

    groups [n]; trajectory [K] (ascending) and turn [K] (0, 1, … within each trajectory) belong to turn_rewards [K].
    """
    final, turn_rewards = final.to(torch.float64), turn_rewards.to(torch.float64)
    last = torch.zeros_like(trajectory, dtype=torch.bool)  # [K] True at the last turn of each trajectory
    last[:-1], last[-1:] = trajectory[1:] != trajectory[:-1], True
    # Step 1: what each turn leads to. Baselines come after the sums: a turn that was not reached is worth 0.
    at_end, ahead = final, _to_go(turn_rewards, last, discount)  # [n], [K]
    if mean_level is not None:
        # One set id per (group, turn number): turn k is compared only with turn k of the other trajectories.
        num_turns = int(turn.max()) + 1 if len(turn) else 1
        peers = turn if mean_level == "batch" else groups[trajectory] * num_turns + turn  # [K]
        centre = {"std_level": None, "leave_one_out": leave_one_out}
        at_end = normalize(final, groups, mean_level=mean_level, **centre)
        ahead = normalize(ahead, peers, mean_level="group", **centre)
    # Step 2: the final reward is earned at the last turn.
    out = ahead + _to_go(torch.where(last, at_end[trajectory], 0.0), last, discount)  # [K]
    if std_level is None:
        return out
    # Step 3: divide. The std is that of the undiscounted R, so all turns of a trajectory have the same scale.
    total = final.index_add(0, trajectory, turn_rewards)  # [n] R
    ids = groups if std_level == "group" else torch.zeros_like(groups)
    scale = _divided(torch.ones_like(total), total, ids)  # [n] 1 / std R
    return out * scale[trajectory]


def _to_go(earned: Tensor, last: Tensor, discount: float) -> Tensor:
    """Discounted sums from each turn to the end of its trajectory, [K]."""
    values, is_last = earned.tolist(), last.tolist()
    # A last turn does not read values[k + 1], which belongs to the next trajectory.
    for k in reversed(range(len(values) - 1)):  # backwards over turns, once per rollout batch
        if not is_last[k]:
            values[k] += discount * values[k + 1]
    return earned.new_tensor(values)


def gae(
    rewards: Tensor, values: Tensor, layout: TokenLayout, discount: float = 1.0, gae_lambda: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} − V_t,  V after the last token 0   (arXiv 1506.02438, eq. 16).

    Token-shaped rewards and values in; advantages and returns A + V out, 0 at masked tokens. Time counts trained
    tokens only: a masked span between two turns takes no time.
    """
    if layout.cu_seqlens is not None:
        # The recursion over time needs [B, T]. Reading the lengths waits for the device, once per rollout batch.
        lengths = layout.cu_seqlens.diff()  # [B]
        column = torch.arange(int(lengths.max()) if len(lengths) else 0, device=rewards.device)
        inside = column < lengths.unsqueeze(-1)  # [B, T]
        # [B, T] each. masked_scatter fills the True positions row by row, which is the order of the packed tokens.
        padded = [inside.new_zeros(inside.shape, dtype=t.dtype).masked_scatter(inside, t) for t in (rewards, values)]
        trained = inside if layout.mask is None else torch.zeros_like(inside).masked_scatter(inside, layout.mask)
        flat = TokenLayout(trained, None, layout.num_tokens, inside.shape)
        advantages, returns = gae(padded[0], padded[1], flat, discount, gae_lambda)
        return advantages[inside], returns[inside]  # [N] each
    # What a masked token holds, even NaN, must not enter the recursion.
    rewards, values = keep_trained(rewards, layout), keep_trained(values, layout)
    trained = torch.ones_like(rewards, dtype=torch.bool) if layout.mask is None else layout.mask
    # [B] V after the last token. The second form is for T = 0, where column 0 does not exist.
    next_value = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.new_zeros(rewards.shape[0])
    running = torch.zeros_like(next_value)  # [B]
    advantages = torch.zeros_like(rewards)  # [B, T]
    for t in reversed(range(rewards.shape[1])):  # all [B]
        # At a masked token `running` and `next_value` do not change, so it takes no time step.
        delta = rewards[:, t] + discount * next_value - values[:, t]
        running = torch.where(trained[:, t], delta + discount * gae_lambda * running, running)
        next_value = torch.where(trained[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(trained[:, t], running, 0.0)
    return advantages, keep_trained(advantages + values, layout)


def _divided(out: Tensor, x: Tensor, ids: Tensor, weight: Tensor | None = None) -> Tensor:
    """out / (unbiased std of x over each set), exactly 0 if the values of the set are all equal."""
    count, mean, same = _set_statistics(x, ids, weight)
    squares = (x - mean).square()
    # clamp: one sample has no unbiased std. Its set counts as `same`, so the value is not used.
    std = (_set_sum(squares if weight is None else weight * squares, ids) / (count - 1).clamp(min=1)).sqrt()  # [n]
    # The inner where avoids a division by 0, the outer one gives exactly 0.
    return torch.where(same, 0.0, out / torch.where(same, 1.0, std))


def _set_sum(x: Tensor, ids: Tensor) -> Tensor:
    """[n] the sum over each element's set."""
    # [n] sets numbered from 0. There are at most n sets, so a tensor [n] has room for all sums.
    _, index = ids.unique(return_inverse=True)
    return torch.zeros_like(x).index_add(0, index, x)[index]


def _set_statistics(x: Tensor, ids: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and whether all values are equal, of each element's set, [n] each."""
    weight = torch.ones_like(x) if weight is None else weight.to(x.dtype)
    _, index = ids.unique(return_inverse=True)
    low = torch.full_like(x, torch.inf).scatter_reduce(0, index, x, "amin")[index]
    high = torch.full_like(x, -torch.inf).scatter_reduce(0, index, x, "amax")[index]
    # The tolerance is relative for large rewards and absolute for rewards below 1.
    size = torch.maximum(low.abs(), high.abs()).clamp(min=1)
    count = _set_sum(weight, ids)
    return count, _set_sum(weight * x, ids) / count, high - low <= SAME * size
