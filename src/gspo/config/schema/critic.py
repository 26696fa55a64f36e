"""`ref` and `critic`: the reference model and the value model."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key
from gspo.config.schema.optimizer import Optimizer


class Reference(Section):
    path: str | None = key(None, "Reference model.", unset="actor.path")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key("auto", "Data type of its weights.")


class Critic(Section):
    path: str | None = key(None, "Value model.", unset="actor.path with a new value head")
    optimizer: Optimizer = key(Optimizer, "Optimizer of the critic.")
    ppo_n_minibatches: int | None = key(
        None, "Critic updates per rollout batch.", unset="actor.ppo_n_minibatches", low=1
    )
    value_eps_clip: float = key(0.2, "Clip range of the value.", above=0.0)
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key("auto", "Data type of its weights.")
