"""Connect the trainer to the sampler servers that its launcher started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo.learner import PolicyModule
from gspo.models import end_tokens
from gspo.sampling import (
    JOIN_S,
    HttpSampler,
    context_limit,
    experts_of,
    forget,
    sampler_identity,
    sequence_logp,
    weight_folders,
    weight_store,
)
from gspo.system import Launched


def connect(
    policy: PolicyModule,
    tokenizer: Any,
    run: Path,
    *,
    seed: int,
    max_tokens: int | None,
    mode: str,
    timeout_s: float,
    needs_routes: bool,
    join_s: float | None,
    sampler_dtype: torch.dtype | None,
    say: Callable[[str], None],
) -> HttpSampler:
    """The client of the launched servers, before it has published any weights.

    `sampler_dtype`: the servers' dtype if it differs from the trainer's; the probe's tolerance depends on it.
    """
    launched, model, ends = Launched.read(), policy.model, end_tokens(policy.model, tokenizer)
    dtype, max_context = policy.compute_dtype or model.dtype, context_limit(policy.model, max_tokens)
    num_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    for leftover in weight_folders(run):  # of a trainer of this run that was killed
        forget(leftover)
    return HttpSampler(
        launched.sampler_folder or run / "samplers",
        launched.num_samplers,
        launched.required_token(),
        identity=sampler_identity(model, seed=seed, ends=ends, max_context=max_context, dtype=dtype),
        max_context=max_context,
        ends=ends,
        weight_store=weight_store(mode, run, num_bytes),
        dtype=sampler_dtype or dtype,
        # A sharded model computes only when all ranks take part; servers are then compared with each other.
        reference=partial(sequence_logp, model) if policy.world.size == 1 else None,
        timeout_s=timeout_s,
        experts=experts_of(model, needs_routes),
        join_s=JOIN_S if join_s is None else join_s,
        colocated=launched.is_colocated,
        say=say,
    )
