"""Optimizers, learning rates and updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gspo.config.schema import Config, Optimizer
from gspo.learner.batch import Batch
from gspo.learner.learner import Learner
from gspo.learner.optim import learning_rate, make_optimizer
from gspo.learner.policy.module import PolicyModule
from gspo.learner.proximal import AutoClip
from gspo.learner.step_report import StepReport
from gspo.train.build.objective import narrowest_clip
from gspo.train.update import Rates, Updater, UpdateSettings


def make_trained_optimizer(config: Config, policy: PolicyModule) -> torch.optim.Optimizer:
    return optimizer_of(config.actor.optimizer, policy)


def critic_optimizer(config: Config) -> Optimizer:
    """The actor's optimizer with the critic's learning rate."""
    assert config.critic is not None
    return config.actor.optimizer.model_copy(update={"lr": config.critic.optimizer.lr})


def optimizer_of(o: Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(
        module.parameters(),
        kind=o.type,
        lr=float(o.lr or 0.0),
        weight_decay=o.weight_decay,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        offload=o.offload,
    )


def make_rates(o: Optimizer, count: int, total_steps: int) -> Rates:
    """The learning rates of a step's `count` updates, from the number of its first update in the run."""
    return lambda first: [
        learning_rate(
            first + k,
            total_steps * count,
            peak=float(o.lr or 0.0),
            schedule=o.lr_scheduler_type,
            warmup_proportion=o.warmup_steps_proportion,
        )
        for k in range(count)
    ]


def make_updater(
    config: Config,
    learner: Learner,
    total_steps: int,
    say: Callable[[str], None],
    save_samples: Callable[[Batch, StepReport, int], None] | None = None,
) -> Updater:
    """`save_samples` None: a rank other than 0, which does not check updates."""
    actor = config.actor
    settings = UpdateSettings(
        auto_clip=AutoClip() if actor.eps_clip == "auto" else None,
        choose_proximal=actor.prox_logp_method == "auto",
        narrowest_clip=partial(narrowest_clip, config),
        allow_noise=actor.prox_logp_force,
        keeps_token_values=bool(config.rollout.dump_to_file),
        entropy_target=actor.entropy_target,
    )
    rates = make_rates(actor.optimizer, learner.plan.num_updates, total_steps)
    critic_rates = rates
    if learner.critic is not None:
        critic_rates = make_rates(critic_optimizer(config), learner.critic.num_minibatches, total_steps)
    return Updater(
        learner,
        settings,
        rates=rates,
        critic_rates=critic_rates,
        say=say,
        checkpoints=config.run_path / "checkpoints",
        save_samples=save_samples,
    )
