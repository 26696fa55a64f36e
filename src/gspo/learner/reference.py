"""The reference policy: the weights a run started from (or any other model), asked once per batch, never trained.

It is a second, frozen model, or, where the policy is an adapter on frozen weights, the policy with its adapter off.
Either way it is read from where the run started and not from a checkpoint, so a resumed run has the same reference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from gspo.learner.batch import Batch
from gspo.learner.policy.module import PolicyModule
from gspo.learner.step import by_sequence, packed_parts


@dataclass(frozen=True)
class Reference:
    """A policy to compare with, and how to ask it."""

    policy: PolicyModule
    temperature: float  # the sampler's: KL is between the two tempered distributions
    max_tokens: int  # per micro-batch
    min_micro_batches: int = 1
    asking: Callable[[], AbstractContextManager[Any]] = nullcontext  # switches the adapter off


@torch.no_grad()
def reference_logp(reference: Reference, batch: Batch) -> dict[int, NDArray[Any]]:
    """log π_ref at the trained tokens of every sequence that a loss can reach, by sequence number.

    A sequence whose advantage is 0 is among them: its KL has a gradient in the loss, and a penalty in the reward.
    """
    stored: dict[int, NDArray[Any]] = {}
    items = batch.items(batch.trainable)
    with reference.asking():
        for packed in packed_parts(reference.policy, items, reference.max_tokens, reference.min_micro_batches):
            out = reference.policy(packed, temperature=reference.temperature, with_entropy=False)
            stored |= by_sequence(packed, out.logp)
    return reference.policy.world.union(stored)
