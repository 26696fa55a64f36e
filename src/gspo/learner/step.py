"""One training step: the mini-batches of a rollout batch, each one optimizer update.

Three policies, kept apart: `behavior` sampled the tokens, `proximal` (the paper's π_old) is the policy at the start of
the batch, and the current one is being trained. π_old of mini-batch 1 is its own detached forward; later mini-batches
take the sampler's log-probs where these were measured to be the same, a forward made before the first update, or an
interpolation by weight version. Samples of older versions never serve as their own π_old unless asked (`rollout`).
`centred` takes the sampler's log-probs less their mean error per token, which mini-batch 1 measures for nothing. A
fourth policy, `reference`, was asked before the step (`train/reference.py`), where a KL term wants it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo import objectives
from gspo.faults import reached
from gspo.learner.batch import Batch
from gspo.learner.optim import apply_update
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Packed, PackItem, filler, micro_batches, pack, spread
from gspo.learner.proximal import noise_of
from gspo.learner.ranks.world import World
from gspo.learner.routing import Replay, Routing
from gspo.objectives.kl import kl
from gspo.objectives.turns import fold, turn_cuts
from gspo.system.clock import phase

# Where π_old of mini-batches 2…K comes from; `rollout` also replaces mini-batch 1's own forward.
# `loglinear` interpolates between the sampler's and the current log-prob, by the version of each token.
ProximalSource = Literal["recompute", "sampler", "rollout", "centred", "loglinear"]


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
    routing_replay: Replay = "none"  # whose experts a mixture's passes take; `proximal` needs a recomputed π_old
    sequence_unit: Literal["trajectory", "turn"] = "trajectory"  # what of an episode has one ratio


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
    correction: NDArray[np.float64]  # behavior weight π_old/μ, token mean; NaN where nothing is corrected
    correction_raw: NDArray[np.float64]  # the same before truncation or masking
    correction_outside: NDArray[np.float64]  # tokens beyond its bounds
    logp: dict[int, NDArray[np.float32]]  # of the sequences whose tokens are kept
    token_entropy: dict[int, NDArray[np.float32]]
    # Of a mixture of experts: shares of its tokens whose experts changed (see `train/routing.py`).
    flips: NDArray[np.float64] | None = None  # [n, layers]
    flipped_tokens: NDArray[np.float64] | None = None  # [n]
    sampler_flips: NDArray[np.float64] | None = None  # [n, layers]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)  # False: the gradient was not finite, nothing was touched
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
    version: int = 0,
    learning_rates: Sequence[float],
    keep_tokens_of: frozenset[int] = frozenset(),
    before_update: Callable[[NDArray[np.float64]], None] | None = None,
) -> StepReport:
    """K optimizer updates on one rollout batch; `version` is that of the weights at its start.

    `before_update` is given mini-batch 1's noise, [n], before anything is changed, and may refuse by raising.
    """
    n = batch.num_sequences
    report = StepReport(*(np.full(n, np.nan) for _ in range(10)), logp={}, token_entropy={})
    enters = batch.has_gradient if plan.skip_zero_advantage else batch.trainable
    report.num_skipped = int((batch.in_denominator & ~enters).sum())
    behavior = {int(i): batch.samples[i].behavior_logp[batch.samples[i].mask] for i in np.flatnonzero(enters)}
    # Packed once, for π_old and for training: the same computation at the same weights has ratio exactly 1.
    packs = [
        packed_parts(policy, batch.items(enters & (batch.minibatch == k)), plan.max_tokens, plan.min_micro_batches)
        for k in range(plan.num_minibatches)
    ]
    routing = Routing(policy, batch, plan.routing_replay)
    if routing.is_tapped:
        report.flips, report.flipped_tokens, report.sampler_flips = routing.shares
    with phase(report.seconds, "proximal"):
        proximal_logp = behavior if proximal != "recompute" else _recomputed(policy, packs[1:], plan, routing)
    if proximal == "recompute":
        # Trainer against sampler at equal weights, for nothing: the forward is there.
        for i, logp in proximal_logp.items():
            report.noise_log_s[i] = float(np.mean(logp - behavior[i], dtype=np.float64))
    world = policy.world
    for k in range(plan.num_minibatches):
        members = batch.minibatch == k
        # The denominator counts what was skipped: skipping saves work, it does not change the algorithm.
        counted = members & batch.in_denominator
        denominator = objectives.denominator(
            plan.name,
            num_sequences=max(int((counted & batch.is_first).sum()), 1),  # trajectories
            num_tokens=max(int(batch.trained_tokens[counted].sum()), 1),
            max_new_tokens=plan.max_new_tokens,
            aggregation=plan.settings["aggregation"],
        )
        loss = 0.0
        with phase(report.seconds, "forward_backward"):
            for packed in packs[k]:
                own = k == 0 and proximal != "rollout"
                towards = k / plan.num_minibatches if proximal == "loglinear" else None
                loss += _backward(
                    policy, packed, batch, plan, None if own else proximal_logp, behavior, denominator, report, k,
                    routing, keep_tokens_of, None if towards is None else partial(_shares, batch, version, towards),
                )  # fmt: skip
        loss = world.all_reduce_sum(loss)
        if k == 0 and (before_update is not None or proximal == "centred"):
            noise = _of_all(report.noise_log_s, world)
            if before_update is not None:
                before_update(noise)
            if proximal == "centred":
                proximal_logp = _centred(behavior, noise, batch)
        with phase(report.seconds, "optimizer"):
            # A clamp has gradient 0 at NaN: only the loss tells.
            norm, applied = apply_update(
                optimizer, lr=learning_rates[k], max_norm=plan.max_norm, is_finite=math.isfinite(loss)
            )
        report.losses.append(loss)
        report.grad_norms.append(norm)
        report.applied.append(applied)
    return report if world.size == 1 else merged(report, world)


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
    routing: Routing,
    keep_tokens_of: frozenset[int],
    shares: Callable[[NDArray[np.int64]], torch.Tensor] | None = None,
) -> float:
    """Forward, loss and backward of one micro-batch; writes what happened to its sequences into the report."""
    with routing.in_minibatch(packed, k):
        out = policy(packed, temperature=plan.temperature)
    if packed.is_filler:
        (out.logp.sum() * 0.0).backward()
        return 0.0
    index = packed.index.cpu().numpy()
    device, dtype = out.logp.device, out.logp.dtype
    behavior_logp = gather(behavior, index).to(device, dtype)
    proximal = out.logp.detach() if proximal_logp is None else gather(proximal_logp, index).to(device, dtype)
    if shares is not None and proximal_logp is not None:
        proximal = proximal + shares(index).to(device, dtype) * (out.logp.detach() - proximal)
    by_token, reference = batch.token_advantages, batch.reference_logp
    units = _units(batch, index, packed.cu_seqlens, plan)
    advantage = torch.from_numpy(batch.advantages[index]) if by_token is None else gather(by_token, index)
    if by_token is None and units.sequence is not None:
        advantage = advantage[units.sequence.cpu()]
    reference_logp = None if reference is None else gather(reference, index).to(device, dtype)
    result = objectives.loss(
        plan.name,
        out.logp,
        proximal,
        advantage.to(device, dtype),
        None,
        behavior_logp=behavior_logp,
        reference_logp=reference_logp,
        cu_seqlens=units.cu_seqlens,
        weight=units.weight,
        denominator=denominator,
        **plan.settings,
    )
    result.loss.backward()
    reached("train.backward")
    report.num_input_tokens += packed.num_tokens
    for name in ("log_s", "clipped_low", "clipped_high", "correction", "correction_raw", "correction_outside"):
        if name in result.stats:
            getattr(report, name)[index] = units.by_sequence(name, result.stats).cpu().numpy()
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


@dataclass(frozen=True)
class _Units:
    """What has one ratio in a micro-batch: its sequences, or the turns that they are made of."""

    cu_seqlens: torch.Tensor  # [U + 1]
    weight: torch.Tensor | None  # [U], share of the trajectory's tokens; None: all 1
    sequence: torch.Tensor | None = None  # [U] of turns, [B] sequences; None: the units are the sequences
    num_sequences: int = 0

    def by_sequence(self, name: str, stats: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A statistic of sequences, [B], from those of units: numbers of tokens add up, the rest are token means."""
        if self.sequence is None:
            return stats[name]
        counts = name.startswith("clipped") or name.endswith("outside")
        return fold(stats[name], self.sequence, self.num_sequences, None if counts else stats["num_tokens"])


def _units(batch: Batch, index: NDArray[np.int64], cu_seqlens: torch.Tensor, plan: Plan) -> _Units:
    shares = torch.from_numpy(batch.token_share[index]).to(cu_seqlens.device)
    # A sum over tokens needs no shares: sequences of a trajectory add up by themselves.
    means = plan.settings["aggregation"] == "sequence_mean"
    if plan.sequence_unit == "trajectory":
        return _Units(cu_seqlens, shares if means and bool((shares != 1).any()) else None)
    samples = [batch.samples[int(i)] for i in index]
    turns = torch.from_numpy(np.concatenate([s.turns[s.mask] for s in samples])).to(cu_seqlens.device)
    cuts, sequence = turn_cuts(turns, cu_seqlens)
    if len(cuts) == len(cu_seqlens):  # one turn each
        return _Units(cu_seqlens, shares if means and bool((shares != 1).any()) else None)
    share = (shares / cu_seqlens.diff())[sequence] * cuts.diff()
    return _Units(cuts, share if means else None, sequence, len(index))


def _shares(batch: Batch, version: int, towards: float, index: NDArray[np.int64]) -> torch.Tensor:
    """α of log π_old ≈ log μ + α (log π_θ − log μ), for the trained tokens of some sequences, end to end.

    π_old has version v, a token's μ version b, and π_θ, k of K updates on, counts as version v + k/K:
    α = (v − b) / (v + k/K − b). A fresh token has α = 0: its μ is π_old.
    """
    samples = [batch.samples[int(i)] for i in index]
    behind = np.concatenate([version - sample.versions[sample.mask].astype(np.float64) for sample in samples])
    return torch.from_numpy(behind / (behind + towards))


def _of_all(values: NDArray[np.float64], world: World) -> NDArray[np.float64]:
    """Values by sequence, [n], of which each rank has those of its own."""
    for part in world.all_gather({"values": values}):
        values = np.where(np.isnan(values), part["values"], values)
    return values


def _centred(
    behavior: Mapping[int, NDArray[np.float32]], noise: NDArray[np.float64], batch: Batch
) -> dict[int, NDArray[np.float32]]:
    """log μ − shift, shift being the mean over mini-batch 1's tokens of log μ − log π_old; 0 where none was trained."""
    measured = noise_of(noise, batch.trained_tokens)
    shift = np.float32(0.0 if measured is None else measured.shift)
    return {i: logp - shift for i, logp in behavior.items()}


@torch.no_grad()
def _recomputed(
    policy: PolicyModule, packs: Sequence[Sequence[Packed]], plan: Plan, routing: Routing
) -> Mapping[int, NDArray[np.float32]]:
    """log π_old under the weights at the start of the batch, by sequence number; one forward, before any update."""
    stored: dict[int, NDArray[np.float32]] = {}
    for packed in (packed for packs_k in packs for packed in packs_k):
        with routing.at_start(packed):
            logp = policy(packed, temperature=plan.temperature, with_entropy=False).logp
        stored |= by_sequence(packed, logp)
    return stored


def packed_parts(
    module: PolicyModule, items: Sequence[PackItem], max_tokens: int, min_micro_batches: int
) -> list[Packed]:
    """This rank's micro-batches of some sequences, laid out and placed as the module wants them."""
    if not items:
        return []
    device, world, share_prefix = next(module.parameters()).device, module.world, module.share_prefix
    split = partial(micro_batches, max_tokens=max_tokens, share_prefix=share_prefix)
    shares = spread(items, world.size, share_prefix=share_prefix) if world.size > 1 else [items]
    splits = [split(share, min_batches=min_micro_batches) if share else [] for share in shares]
    num, parts = max(len(parts) for parts in splits), splits[world.rank]
    if 0 < len(parts) < num:
        parts = split(shares[world.rank], min_batches=num)
    packs = [pack(part, share_prefix=share_prefix) for part in parts]
    # Layers are gathered by all ranks together: each computes as often as any other, if need be on nobody's tokens.
    packs += [filler() for _ in range(num - len(packs))]
    return [packed.to(device) for packed in packs]


def merged(report: StepReport, world: World) -> StepReport:
    """The report of all ranks: each has seen its own sequences; losses, norms and updates are common already."""
    per_sequence = [f.name for f in fields(report) if isinstance(getattr(report, f.name), np.ndarray)]
    arrays = {name: getattr(report, name) for name in per_sequence}
    arrays |= {f"{name}/{i}": array for name in ("logp", "token_entropy") for i, array in getattr(report, name).items()}
    parts = world.all_gather(arrays | {"num_input_tokens": np.array([report.num_input_tokens])})
    report.num_input_tokens = int(sum(part.pop("num_input_tokens")[0] for part in parts))
    for key, array in ((key, array) for part in parts for key, array in part.items()):
        name, _, number = key.partition("/")
        if number:
            getattr(report, name)[int(number)] = array
        else:
            own = getattr(report, name)
            setattr(report, name, np.where(np.isnan(own), array, own))
    return report


def by_sequence(packed: Packed, values: torch.Tensor) -> dict[int, NDArray[Any]]:
    """One value per target, [M], as one array per sequence number; none of a filler."""
    if packed.is_filler:
        return {}
    array, cuts = values.detach().cpu().numpy(), packed.cu_seqlens.cpu().numpy()
    return {i: array[cuts[b] : cuts[b + 1]] for b, i in enumerate(packed.index.tolist())}


def gather(per_sequence: Mapping[int, NDArray[Any]], index: NDArray[np.int64]) -> torch.Tensor:
    """The arrays of the sequences `index`, end to end: the inverse of `by_sequence`."""
    return torch.from_numpy(np.concatenate([per_sequence[int(i)] for i in index]))
