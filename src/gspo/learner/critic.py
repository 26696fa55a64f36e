"""The critic of PPO: a value per token, and its update.

V(x, y_<t) is computed from the hidden state that predicts y_t, on the same packed layout as the policy, so the G
completions of a prompt share the value of their common prefix. A new head is 0: an untrained critic predicts 0
everywhere, and the first advantages are plain returns.
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

from gspo.learner.credit import Batch, minibatches
from gspo.learner.optim import apply_update
from gspo.learner.policy.module import PolicyModule, packed_parts
from gspo.learner.policy.packing import Packed, by_sequence, gather
from gspo.objectives import value_loss


class ValueModule(nn.Module):
    """A language model whose head predicts one number instead of the next token."""

    def __init__(self, policy: PolicyModule) -> None:
        """Uses the model of `policy` and replaces its language-model head."""
        super().__init__()
        self.policy = policy
        weight = policy.model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
        # At least float32: differences between returns are below bfloat16's resolution.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # weight is [V, hidden]; the new head maps hidden to one value.
        head = nn.Linear(weight.shape[1], 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        policy.model.set_output_embeddings(head)

    @property
    def head(self) -> nn.Linear:
        return self.policy.model.get_output_embeddings()  # pyright: ignore[reportReturnType]

    def forward(self, packed: Packed) -> Tensor:
        """V at the source of every target, [M]."""
        hidden = self.policy.hidden(packed).index_select(0, packed.source)  # [M, hidden]
        # clone(): FSDP registers a hook on the output, and does not support a view there.
        return self.head(hidden.to(self.head.weight.dtype))[:, 0].clone()


@dataclass(frozen=True)
class Critic:
    """The value model, its optimizer, and the settings of its updates."""

    module: ValueModule
    optimizer: torch.optim.Optimizer
    num_minibatches: int
    max_tokens: int  # per micro-batch
    max_norm: float = 0.0
    eps_clip: float = 0.2

    @property
    def trained(self) -> tuple[ValueModule, torch.optim.Optimizer]:
        """What a checkpoint contains of it."""
        return self.module, self.optimizer


@dataclass
class CriticReport:
    """Results per update, [K], and token counts over all of them."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    num_clipped: int = 0


@torch.no_grad()
def token_values(critic: Critic, batch: Batch) -> dict[int, NDArray[Any]]:
    """V at the trained tokens of every trainable sequence, by sequence number; one forward pass, before any update."""
    stored: dict[int, NDArray[Any]] = {}
    for packed in _parts(critic, batch, batch.trainable):
        stored |= by_sequence(packed, critic.module(packed))
    return critic.module.policy.world.union(stored)


def train_critic(critic: Critic, batch: Batch, learning_rates: Sequence[float]) -> CriticReport:
    """K updates towards the batch's returns: the mean over tokens of `objectives.value.value_loss`."""
    assert batch.values is not None
    assert batch.returns is not None
    report, world = CriticReport(), critic.module.policy.world
    # The critic has its own number of mini-batches, so the policy's assignment cannot be used.
    by_trajectory = minibatches(batch.group_of[batch.is_first], len(batch.groups), critic.num_minibatches)
    member_of = by_trajectory[batch.trajectory_of]  # [n]
    for k in range(critic.num_minibatches):
        members = batch.trainable & (member_of == k)  # [n]
        # One number for the whole update, so that the split into micro-batches does not change the gradient.
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
    """The `critic/` metrics of docs/metrics.md; V is the one that the advantages were computed with."""
    assert batch.values is not None
    assert batch.returns is not None
    values, returns = (np.concatenate([np.zeros(0), *x.values()]) for x in (batch.values, batch.returns))
    # Equal returns have no variance to explain; the metric is then None.
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
    """Add the gradient of one micro-batch; returns its loss."""
    values = critic.module(packed)  # [M]
    if packed.is_filler:
        # Gradient 0, but a backward pass: FSDP's collectives in it need every rank.
        (values.sum() * 0.0).backward()
        return 0.0
    index = packed.index.cpu().numpy()  # [B] sequence numbers
    # [M] each
    start, target = (gather(x, index).to(values.device, values.dtype) for x in (start_values, returns))
    per_token, clipped = value_loss(values, start, target, critic.eps_clip)
    loss = per_token.sum() / denominator
    loss.backward()
    report.num_tokens += packed.num_targets
    report.num_clipped += int(clipped.sum())
    return float(loss.detach())


def _parts(critic: Critic, batch: Batch, which: NDArray[np.bool_]) -> list[Packed]:
    return packed_parts(critic.module.policy, batch.items(which), critic.max_tokens)
