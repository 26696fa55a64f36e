"""The reference policy: the initial weights of the run (or another model), never trained.

Its log-probs are computed once per batch. It is a second, frozen model; if the policy is a LoRA adapter on frozen
weights, it is the policy with its adapter switched off. It is always loaded from the start of the run and not from a
checkpoint, so a resumed run has the same reference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.learner.credit import Batch
from gspo.learner.policy.module import PolicyModule, packed_parts
from gspo.learner.policy.packing import by_sequence
from gspo.learner.world import World
from gspo.system import by_name


@dataclass(frozen=True)
class Reference:
    """The reference policy and how to compute with it."""

    policy: PolicyModule
    temperature: float  # the sampler's: KL is between the two tempered distributions
    max_tokens: int  # per micro-batch
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # switches the adapter off


@dataclass(frozen=True)
class Teacher:
    """The teacher of distillation: a frozen policy here or on a server, and how it is used."""

    logp: Callable[[Batch], dict[int, NDArray[Any]]]  # as `reference_logp`
    coef: float
    exact_kl: float | None  # share of the forward KL in an exact KL as a loss; None: log-ratios as advantages
    policy: PolicyModule | None  # None: on a server
    close: Callable[[], None] = lambda: None


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
    return reference.policy.world.union(stored)


def served_teacher(url: str, tokenizer: Any, world: World, *, timeout_s: float, coef: float) -> Teacher:
    """A teacher on a server, which has answered and has the vocabulary of `tokenizer`."""
    server = by_name("gspo.sampling.remote.scores:open_scores")(url, timeout_s=timeout_s)
    try:
        server.check_vocabulary(tokenizer)
    except BaseException:
        server.close()
        raise
    return Teacher(partial(served_logp, server.score, world), coef, None, None, server.close)


def served_logp(
    score: Callable[[list[list[int]]], list[NDArray[Any]]], world: World, batch: Batch
) -> dict[int, NDArray[Any]]:
    """As `reference_logp`, by a server that scores whole sequences (`sampling/remote/scores.py`)."""
    own = np.flatnonzero(batch.trainable)[world.rank :: world.size].tolist()  # every rank asks for its share
    rows = score([[*batch.prompt(i), *batch.samples[i].tokens.tolist()] for i in own])
    # A row begins with the second token of the prompt.
    stored = {i: row[len(batch.prompt(i)) - 1 :][batch.samples[i].mask] for i, row in zip(own, rows, strict=True)}
    return world.union(stored)
