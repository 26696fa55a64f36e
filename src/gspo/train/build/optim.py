"""Optimizers and learning rates."""

from __future__ import annotations

import torch

from gspo.config.schema import Config, Optimizer
from gspo.learner.optim import learning_rate, make_optimizer
from gspo.learner.policy.module import PolicyModule


def make_trained_optimizer(config: Config, policy: PolicyModule) -> torch.optim.Optimizer:
    return optimizer_of(config.actor.optimizer, policy)


def optimizer_of(o: Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(
        module.parameters(),
        kind=o.type,
        lr=float(o.lr or 0.0),
        weight_decay=o.weight_decay,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )


def learning_rates(o: Optimizer, first: int, count: int, total: int) -> list[float]:
    """The rates of `count` updates from number `first` on."""
    return [
        learning_rate(
            first + k,
            total,
            peak=float(o.lr or 0.0),
            schedule=o.lr_scheduler_type,
            warmup_proportion=o.warmup_steps_proportion,
            min_ratio=o.min_lr_ratio,
        )
        for k in range(count)
    ]
