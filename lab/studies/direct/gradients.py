"""Policy gradients of one batch with a given π_old, for studies that measure without training runs.

Policy, sampler, rewards and batches are the trainer's own; none of them is implemented a second time here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo import objectives
from gspo.config import Loaded
from gspo.learner import Batch, PolicyModule, by_sequence, gather, packed_parts
from gspo.system import Clock
from gspo.train import Leader, Trainer

LogProbs = Mapping[int, NDArray[Any]]  # by sequence number


@dataclass(frozen=True)
class Gradient:
    """The gradient of one objective on one batch, and the ratio and clipping of each sequence."""

    flat: Tensor  # [parameters]
    log_s: NDArray[np.float64]  # [n], NaN where a sequence did not enter
    clipped: NDArray[np.bool_]  # [n], True if any token was clipped


@contextlib.contextmanager
def opened(loaded: Loaded) -> Iterator[Leader]:
    """The training loop with all its parts open, before its first step."""
    with Trainer(loaded).open() as loop:
        assert isinstance(loop, Leader)
        yield loop


def sampled(loop: Leader) -> Batch:
    """The next rollout batch with its advantages."""
    return loop.assemble(loop.sample(Clock()), Clock())


@torch.no_grad()
def log_probs(policy: PolicyModule, batch: Batch, which: NDArray[np.bool_] | None = None) -> dict[int, NDArray[Any]]:
    """The trainer's log-probs of the trained tokens, by sequence number; default: of the sequences with a gradient."""
    found: dict[int, NDArray[Any]] = {}
    for packed in _packs(policy, batch, batch.has_gradient if which is None else which):
        found |= by_sequence(packed, policy(packed, with_entropy=False).logp)
    return found


def gradient(policy: PolicyModule, batch: Batch, name: str, proximal: LogProbs | None, **settings: Any) -> Gradient:
    """The gradient of the loss of preset `name` on one batch; `proximal` None: π_old is the policy itself."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    policy.zero_grad(set_to_none=True)
    counted = batch.in_denominator
    denominator = objectives.denominator(
        name,
        num_sequences=int(counted.sum()),
        num_tokens=int(batch.trained_tokens[counted].sum()),
        max_new_tokens=int(batch.trained_tokens.max()),
        aggregation=settings.get("aggregation"),
    )
    log_s, clipped = np.full(batch.num_sequences, np.nan), np.zeros(batch.num_sequences, dtype=bool)
    for packed in _packs(policy, batch, batch.has_gradient):
        index = packed.index.numpy()  # [B]
        logp = policy(packed, with_entropy=False).logp  # [M]
        proximal_logp = logp.detach() if proximal is None else gather(proximal, index).to(logp.dtype)  # [M]
        advantage = torch.from_numpy(batch.advantages[index]).to(logp.dtype)  # [B]
        out = objectives.loss(
            name,
            logp,
            proximal_logp,
            advantage,
            None,
            cu_seqlens=packed.cu_seqlens,
            denominator=denominator,
            **settings,
        )
        out.loss.backward()
        log_s[index] = out.stats["log_s"].numpy()
        clipped[index] = (out.stats["clipped_low"] + out.stats["clipped_high"]).numpy() > 0
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters]).double()
    policy.zero_grad(set_to_none=True)
    return Gradient(flat, log_s, clipped)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def relative_difference(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max())


def _packs(policy: PolicyModule, batch: Batch, which: NDArray[np.bool_]) -> Sequence[Any]:
    return packed_parts(policy, batch.items(which), 8192)
