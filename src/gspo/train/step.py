"""One training step: the mini-batches of a rollout batch, each one optimizer update.

Three policies, kept apart: `behavior` sampled the tokens, `proximal` (the paper's π_old) is the policy at the start of
the batch, and the current one is being trained. π_old of mini-batch 1 is its own detached forward; later mini-batches
take the sampler's log-probs where these were measured to be the same, or a forward made before the first update. A
fourth, `reference`, was asked before the step (`train/reference.py`), where a KL term wants it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo import objectives
from gspo.faults import reached
from gspo.objectives.kl import kl
from gspo.train.batch import Batch
from gspo.train.clock import phase
from gspo.train.optim import apply_update
from gspo.train.packing import Packed, PackItem, micro_batches, pack
from gspo.train.policy import PolicyModule

# Where π_old of mini-batches 2…K comes from; `rollout` also replaces mini-batch 1's own forward.
ProximalSource = Literal["recompute", "sampler", "rollout"]


@dataclass(frozen=True)
class Plan:
    """What stays the same from step to step."""

    name: str  # preset of `gspo.objectives`
    settings: Mapping[str, Any]
    num_minibatches: int
    temperature: float
    max_tokens: int  # per micro-batch
    min_micro_batches: int
    max_norm: float
    max_new_tokens: int
    skip_zero_advantage: bool = True  # False where another loss term needs every sequence


@dataclass
class StepReport:
    """What happened to every sequence, [n], and to every update, [K]. NaN where a sequence did not enter the model."""

    log_s: NDArray[np.float64]
    clipped_low: NDArray[np.float64]  # tokens clipped with A ≤ 0
    clipped_high: NDArray[np.float64]  # tokens clipped with A > 0
    noise_log_s: NDArray[np.float64]  # trainer against sampler, same weights; mini-batch 1, and all that was recomputed
    entropy: NDArray[np.float64]  # token mean
    kl_behavior: NDArray[np.float64]  # token mean of log μ − log π_θ
    kl_reference: NDArray[np.float64]  # token mean of k3(π_θ, π_ref)
    logp: dict[int, NDArray[np.float32]]  # of the sequences whose tokens are kept
    token_entropy: dict[int, NDArray[np.float32]]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)  # False: the gradient was not finite, nothing was touched
    num_input_tokens: int = 0
    num_skipped: int = 0  # sequences in a denominator that did not enter the model: no loss term could reach them
    settings: dict[str, Any] = field(default_factory=dict)  # what this step was run with, as metrics
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("proximal", "forward_backward", "optimizer"), 0.0)
    )


def train_step(
    policy: PolicyModule,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    plan: Plan,
    *,
    proximal: ProximalSource,
    learning_rates: Sequence[float],
    keep_tokens_of: frozenset[int] = frozenset(),
) -> StepReport:
    """K optimizer updates on one rollout batch."""
    n = batch.num_sequences
    report = StepReport(*(np.full(n, np.nan) for _ in range(7)), logp={}, token_entropy={})
    enters = batch.live if plan.skip_zero_advantage else batch.trainable
    report.num_skipped = int((batch.counted & ~enters).sum())
    behavior = {int(i): batch.samples[i].behavior_logp[batch.samples[i].mask] for i in np.flatnonzero(enters)}
    # Packed once, for π_old and for training: the same computation at the same weights has ratio exactly 1.
    packs = [
        packed_parts(policy, batch.items(enters & (batch.minibatch == k)), plan.max_tokens, plan.min_micro_batches)
        for k in range(plan.num_minibatches)
    ]
    with phase(report.seconds, "proximal"):
        proximal_logp = behavior if proximal != "recompute" else _recomputed(policy, packs[1:], plan)
    if proximal == "recompute":
        # Trainer against sampler at equal weights, for nothing: the forward is there.
        for i, logp in proximal_logp.items():
            report.noise_log_s[i] = float(np.mean(logp - behavior[i], dtype=np.float64))
    for k in range(plan.num_minibatches):
        members = batch.minibatch == k
        # The denominator counts what was skipped: skipping saves work, it does not change the algorithm.
        counted = members & batch.counted
        denominator = objectives.denominator(
            plan.name,
            num_sequences=max(int(counted.sum()), 1),
            num_tokens=max(int(batch.trained_tokens[counted].sum()), 1),
            max_new_tokens=plan.max_new_tokens,
            aggregation=plan.settings["aggregation"],
        )
        loss = 0.0
        with phase(report.seconds, "forward_backward"):
            for packed in packs[k]:
                own = k == 0 and proximal != "rollout"
                loss += _backward(
                    policy, packed, batch, plan, None if own else proximal_logp, behavior, denominator, report, k,
                    keep_tokens_of,
                )  # fmt: skip
        with phase(report.seconds, "optimizer"):
            # A clamp has gradient 0 at NaN: only the loss tells.
            norm, taken = apply_update(
                optimizer, lr=learning_rates[k], max_norm=plan.max_norm, is_finite=math.isfinite(loss)
            )
        report.losses.append(loss)
        report.grad_norms.append(norm)
        report.taken.append(taken)
    return report


def _backward(
    policy: PolicyModule,
    packed: Packed,
    batch: Batch,
    plan: Plan,
    proximal_logp: Mapping[int, NDArray[np.float32]] | None,
    behavior: Mapping[int, NDArray[np.float32]],
    denominator: float,
    report: StepReport,
    k: int,
    keep_tokens_of: frozenset[int],
) -> float:
    """Forward, loss and backward of one micro-batch; writes what happened to its sequences into the report."""
    out = policy(packed, temperature=plan.temperature)
    index = packed.index.cpu().numpy()
    device, dtype = out.logp.device, out.logp.dtype
    behavior_logp = gather(behavior, index).to(device, dtype)
    proximal = out.logp.detach() if proximal_logp is None else gather(proximal_logp, index).to(device, dtype)
    by_token, reference = batch.token_advantages, batch.reference_logp
    advantage = torch.from_numpy(batch.advantages[index]) if by_token is None else gather(by_token, index)
    reference_logp = None if reference is None else gather(reference, index).to(device, dtype)
    result = objectives.loss(
        plan.name,
        out.logp,
        proximal,
        advantage.to(device, dtype),
        None,
        behavior_logp=behavior_logp,
        reference_logp=reference_logp,
        cu_seqlens=packed.cu_seqlens,
        denominator=denominator,
        **plan.settings,
    )
    result.loss.backward()
    reached("train.backward")
    report.num_input_tokens += packed.num_tokens
    for name in ("log_s", "clipped_low", "clipped_high"):
        getattr(report, name)[index] = result.stats[name].cpu().numpy()
    layout = objectives.rows(out.logp, None, packed.cu_seqlens)
    drift = objectives.mean_tokens(behavior_logp - out.logp.detach(), layout).cpu().numpy()
    report.kl_behavior[index] = drift
    report.entropy[index] = objectives.mean_tokens(out.entropy, layout).cpu().numpy()
    if reference_logp is not None:
        away = kl(out.logp.detach(), reference_logp, "k3")
        report.kl_reference[index] = objectives.mean_tokens(away, layout).cpu().numpy()
    if k == 0:
        report.noise_log_s[index] = -drift
    if keep_tokens_of.intersection(index.tolist()):
        cuts = packed.cu_seqlens.cpu().numpy()
        for b, i in enumerate(index.tolist()):
            if i in keep_tokens_of:
                report.logp[i] = out.logp[cuts[b] : cuts[b + 1]].detach().float().cpu().numpy()
                report.token_entropy[i] = out.entropy[cuts[b] : cuts[b + 1]].float().cpu().numpy()
    return float(result.loss.detach())


@torch.no_grad()
def _recomputed(
    policy: PolicyModule, packs: Sequence[Sequence[Packed]], plan: Plan
) -> Mapping[int, NDArray[np.float32]]:
    """log π_old under the weights at the start of the batch, by sequence number; one forward, before any update."""
    stored: dict[int, NDArray[np.float32]] = {}
    for packed in (packed for packs_k in packs for packed in packs_k):
        stored |= by_sequence(packed, policy(packed, temperature=plan.temperature, with_entropy=False).logp)
    return stored


def packed_parts(
    module: PolicyModule, items: Sequence[PackItem], max_tokens: int, min_micro_batches: int
) -> list[Packed]:
    """The micro-batches of some sequences, laid out and placed as the module wants them."""
    device = next(module.parameters()).device
    parts = micro_batches(items, max_tokens, min_batches=min_micro_batches, share_prefix=module.share_prefix)
    return [pack(part, share_prefix=module.share_prefix).to(device) for part in parts] if items else []


def by_sequence(packed: Packed, values: torch.Tensor) -> dict[int, NDArray[Any]]:
    """One value per target, [M], as one array per sequence number."""
    array, cuts = values.detach().cpu().numpy(), packed.cu_seqlens.cpu().numpy()
    return {i: array[cuts[b] : cuts[b + 1]] for b, i in enumerate(packed.index.tolist())}


def gather(per_sequence: Mapping[int, NDArray[Any]], index: NDArray[np.int64]) -> torch.Tensor:
    """The arrays of the sequences `index`, end to end: the inverse of `by_sequence`."""
    return torch.from_numpy(np.concatenate([per_sequence[int(i)] for i in index]))
