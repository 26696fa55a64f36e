"""The reference policy: the initial weights of the run (or another model), never trained.

Its log-probs are computed once per batch. It is a second, frozen model; if the policy is a LoRA adapter on frozen
weights, it is the policy with its adapter switched off. It is always loaded from the start of the run and not from a
checkpoint, so a resumed run has the same reference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from gspo.learner.batch import Batch
from gspo.learner.policy.module import PolicyModule, packed_parts
from gspo.learner.policy.packing import by_sequence


@dataclass(frozen=True)
class Reference:
    """The reference policy and how to compute with it."""

    policy: PolicyModule
    temperature: float  # the sampler's: KL is between the two tempered distributions
    max_tokens: int  # per micro-batch
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # switches the adapter off


@dataclass(frozen=True)
class Teacher:
    """The teacher of distillation: a frozen policy, and how it is used."""

    reference: Reference
    coef: float
    exact_kl: float | None  # share of the forward KL in an exact KL as a loss; None: log-ratios as advantages


@torch.no_grad()
def reference_logp(reference: Reference, batch: Batch) -> dict[int, NDArray[Any]]:
    """log π_ref at the trained tokens of every trainable sequence, by sequence number.

    Sequences with advantage 0 are included: their KL has a gradient in the loss, or is a penalty in the reward.
    """
    stored: dict[int, NDArray[Any]] = {}
    items = batch.items(batch.trainable)
    with reference.context():
        for packed in packed_parts(reference.policy, items, reference.max_tokens):
            out = reference.policy(packed, temperature=reference.temperature, with_entropy=False)
            stored |= by_sequence(packed, out.logp)
    # Each rank has computed its own part of the sequences.
    return reference.policy.world.union(stored)
