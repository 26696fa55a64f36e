"""The critic of PPO: a trunk of its own with a scalar head, trained on the returns that followed each token.

V(x, y_<t) is read from the hidden state that predicts y_t, on the policy's own packed layout: the G completions of a
prompt share the value of their common beginning. A new head is 0, so an untrained critic says 0 everywhere and the
first advantages are plain returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo.learner.batch import Batch, minibatches
from gspo.learner.optim import apply_update
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Packed
from gspo.learner.step import by_sequence, gather, packed_parts
from gspo.objectives.value import value_loss


class ValueModule(nn.Module):
    """A language model whose head predicts one number instead of the next token."""

    def __init__(self, policy: PolicyModule) -> None:
        """Takes over `policy`, probed or not; its language-model head is replaced."""
        super().__init__()
        self.policy = policy
        weight = policy.model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
        # At least float32: returns differ by less than bfloat16 can tell.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        head = nn.Linear(weight.shape[1], 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        policy.model.set_output_embeddings(head)

    @property
    def head(self) -> nn.Linear:
        return self.policy.model.get_output_embeddings()  # pyright: ignore[reportReturnType]

    def forward(self, packed: Packed) -> Tensor:
        """V at the source of every target, [M]."""
        hidden = self.policy.hidden(packed).index_select(0, packed.source)
        # A copy, because FSDP hangs its gather on the output and mistrusts a view.
        return self.head(hidden.to(self.head.weight.dtype))[:, 0].clone()


@dataclass(frozen=True)
class Critic:
    """The value model, its optimizer, and what stays the same from step to step."""

    module: ValueModule
    optimizer: torch.optim.Optimizer
    num_minibatches: int
    max_tokens: int  # per micro-batch
    min_micro_batches: int = 1
    max_norm: float = 0.0
    eps_clip: float = 0.2
    loss_coef: float = 1.0

    @property
    def trained(self) -> tuple[ValueModule, torch.optim.Optimizer]:
        """What a checkpoint holds of it."""
        return self.module, self.optimizer


@dataclass
class CriticReport:
    """What happened to every update, [K]; and to tokens, as sums."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    num_clipped: int = 0


@torch.no_grad()
def token_values(critic: Critic, batch: Batch) -> dict[int, NDArray[Any]]:
    """V at the trained tokens of every sequence that a loss can reach; one forward, before any update."""
    stored: dict[int, NDArray[Any]] = {}
    for packed in _parts(critic, batch, batch.trainable):
        stored |= by_sequence(packed, critic.module(packed))
    return critic.module.policy.world.union(stored)


def train_critic(critic: Critic, batch: Batch, learning_rates: Sequence[float]) -> CriticReport:
    """K updates towards the batch's returns: the mean over tokens of `objectives.value.value_loss`."""
    assert batch.values is not None
    assert batch.returns is not None
    report, world = CriticReport(), critic.module.policy.world
    by_trajectory = minibatches(batch.group_of[batch.is_first], len(batch.groups), critic.num_minibatches)
    member_of = by_trajectory[batch.trajectory_of]
    for k in range(critic.num_minibatches):
        members = batch.trainable & (member_of == k)
        # One number for the whole update: no split into micro-batches can change the gradient.
        denominator = max(int(batch.trained_tokens[members].sum()), 1)
        loss = 0.0
        for packed in _parts(critic, batch, members):
            loss += _backward(critic, packed, batch.values, batch.returns, denominator, report)
        loss = world.all_reduce_sum(loss)
        norm, applied = apply_update(
            critic.optimizer, lr=learning_rates[k], max_norm=critic.max_norm, is_finite=math.isfinite(loss)
        )
        report.losses.append(loss)
        report.grad_norms.append(norm)
        report.applied.append(applied)
    report.num_tokens, report.num_clipped = (
        int(world.all_reduce_sum(n)) for n in (report.num_tokens, report.num_clipped)
    )
    return report


def critic_metrics(batch: Batch, report: CriticReport, learning_rate: float) -> dict[str, float | None]:
    """The `critic/` names of docs/metrics.md; values are those the advantages were made from."""
    assert batch.values is not None
    assert batch.returns is not None
    values, returns = (np.concatenate([np.zeros(0), *x.values()]) for x in (batch.values, batch.returns))
    spread = float(returns.var()) if len(returns) else 0.0
    return {
        "critic/loss": float(np.mean(report.losses)),
        "critic/grad_norm": float(np.mean(report.grad_norms)),
        "critic/clipped": report.num_clipped / max(report.num_tokens, 1),
        "critic/value_mean": float(values.mean()) if len(values) else None,
        "critic/return_mean": float(returns.mean()) if len(returns) else None,
        "critic/explained_variance": 1 - float((returns - values).var()) / spread if spread > 0 else None,
        "critic/lr": learning_rate,
    }


def _backward(
    critic: Critic,
    packed: Packed,
    start_values: Mapping[int, NDArray[Any]],
    returns: Mapping[int, NDArray[Any]],
    denominator: int,
    report: CriticReport,
) -> float:
    values = critic.module(packed)
    if packed.is_filler:
        (values.sum() * 0.0).backward()
        return 0.0
    index = packed.index.cpu().numpy()
    start, target = (gather(x, index).to(values.device, values.dtype) for x in (start_values, returns))
    per_token, clipped = value_loss(values, start, target, critic.eps_clip)
    loss = critic.loss_coef * per_token.sum() / denominator
    loss.backward()
    report.num_tokens += packed.num_targets
    report.num_clipped += int(clipped.sum())
    return float(loss.detach())


def _parts(critic: Critic, batch: Batch, which: NDArray[np.bool_]) -> list[Packed]:
    return packed_parts(critic.module.policy, batch.items(which), critic.max_tokens, critic.min_micro_batches)
