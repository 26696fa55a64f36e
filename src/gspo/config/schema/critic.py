"""`ref` and `critic`: the reference model and the value model."""

from __future__ import annotations

from gspo.config.schema.key import Section, key


class Reference(Section):
    path: str | None = key(None, "Reference model.", unset="actor.path")


class CriticOptimizer(Section):
    lr: float | None = key(
        None, "Learning rate of the critic; everything else is as in actor.optimizer.", unset="1e-5", low=0.0
    )


class Critic(Section):
    path: str | None = key(None, "Value model.", unset="actor.path with a new value head")
    optimizer: CriticOptimizer = key(CriticOptimizer, "Optimizer of the critic.")
    value_eps_clip: float = key(0.2, "Clip range of the value.", above=0.0)
