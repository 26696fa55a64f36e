"""`Learner`: the models of a run and how batches train them, as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gspo.learner.credit import Credit
from gspo.learner.policy.module import PolicyModule
from gspo.learner.reference import Reference, Teacher
from gspo.learner.step import Plan

if TYPE_CHECKING:
    from gspo.learner.critic import Critic


@dataclass(frozen=True)
class Learner:
    """The models, and how batches train them; every rank has one."""

    policy: PolicyModule
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None
    critic: Critic | None
    teacher: Teacher | None
    plan: Plan
    credit: Credit | None  # None: one advantage per sequence
    assembly: Mapping[str, Any]  # how rewards become advantages: keywords of `learner.credit.batch_with_advantages`
    threads: int

    def close(self) -> None:
        if self.teacher is not None:
            self.teacher.close()

    @property
    def trained(self) -> tuple[Any, ...]:
        """What a checkpoint holds: policy, its optimizer, and the critic with its optimizer or None."""
        return self.policy, self.optimizer, self.critic and self.critic.trained
