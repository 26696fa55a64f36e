"""One optimizer update: micro-batches, the objective, gradients, and what is reported of them.

Three policies are kept apart: `behavior` μ sampled the tokens, `proximal` π_old (see `proximal.py`) is the policy at
the start of the batch, and the current policy π_θ is being trained. Where a KL term needs a fourth one, the reference,
its log-probs were computed before the step (`reference.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo import objectives, rng
from gspo.faults import reached
from gspo.learner.credit import Batch, Credit
from gspo.learner.optim import apply_update
from gspo.learner.policy.module import PolicyModule, PolicyOutput, packed_parts
from gspo.learner.policy.packing import Packed, gather
from gspo.learner.proximal import LogProbs, ProximalSource, loglinear_weight, recomputed
from gspo.learner.reference import Reference, Teacher
from gspo.learner.routing import Replay, Routing
from gspo.learner.world import World
from gspo.objectives import aggregate, fold, kl, turn_cuts
from gspo.system import phase

if TYPE_CHECKING:
    from gspo.learner.critic import Critic


@dataclass
class StepReport:
    """Results per sequence, [n], and per update, [K]. NaN where a sequence did not enter the model."""

    log_s: NDArray[np.float64]
    clipped_low: NDArray[np.float64]  # tokens clipped with A ≤ 0
    clipped_high: NDArray[np.float64]  # tokens clipped with A > 0
    noise_log_s: NDArray[np.float64]  # trainer against sampler at equal weights; mini-batch 1 and recomputed ones
    entropy: NDArray[np.float64]  # token mean
    kl_behavior: NDArray[np.float64]  # token mean of log μ − log π_θ
    kl_reference: NDArray[np.float64]  # token mean of k3(π_θ, π_ref)
    correction: NDArray[np.float64]  # behavior weight π_old/μ, token mean; NaN without a correction
    correction_raw: NDArray[np.float64]  # the same before truncation or masking
    correction_outside: NDArray[np.float64]  # tokens outside its bounds
    log_s_at_start: NDArray[np.float64]  # of the first update: the weights are still π_old's
    # Per token, by sequence number, for the sequences in `keep_tokens_of`.
    logp: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    token_entropy: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # Of truncated sampling: π_θ's probability of the sampler's kept sets, token mean; and the same at equal weights.
    kept_mass: NDArray[np.float64] | None = None  # [n]
    kept_mass_at_start: NDArray[np.float64] | None = None  # [n]
    # Of a mixture of experts: the fraction of tokens whose experts changed (see `routing.py`).
    flips: NDArray[np.float64] | None = None  # [n, layers]
    flipped_tokens: NDArray[np.float64] | None = None  # [n]
    sampler_flips: NDArray[np.float64] | None = None  # [n, layers]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)  # False: loss or gradient not finite, weights unchanged
    num_input_tokens: int = 0
    num_epochs: int = 1  # passes over the batch; results per sequence are those of the last one
    num_skipped: int = 0  # sequences in a denominator that no loss term reaches: not computed
    settings: dict[str, Any] = field(default_factory=dict)  # of this step, as metrics
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("proximal", "forward_backward", "optimizer"), 0.0)
    )

    @property
    def of_the_loss(self) -> dict[str, NDArray[np.float64]]:
        """The arrays that statistics of `objectives.loss` fill, by the statistic's name."""
        names = ("log_s", "clipped_low", "clipped_high", "correction", "correction_raw", "correction_outside")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def empty(num_sequences: int) -> StepReport:
        required = (f.name for f in fields(StepReport) if f.default is f.default_factory is MISSING)
        arrays: dict[str, Any] = {name: np.full(num_sequences, np.nan) for name in required}
        return StepReport(**arrays)


def of_all_ranks(values: NDArray[np.float64], world: World) -> NDArray[np.float64]:
    """[n] values by sequence; each rank has computed a part of them, and the others are NaN."""
    for part in world.all_gather({"values": values}):
        values = np.where(np.isnan(values), part["values"], values)
    return values


def merged(report: StepReport, world: World) -> StepReport:
    """The report over all ranks. Each rank has the results of its own sequences; those per update are equal on all."""
    # Arrays per sequence are sent by name, arrays per token as name/number. A field that is None is not sent.
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


GAIN = 0.1  # of log α per step, for an entropy that is 0 or twice its target
RANGE = 100.0  # α stays within this factor of its start


def next_coefficient(now: float, entropy: float | None, *, target: float, start: float) -> float:
    """The coefficient α of the next step: log α rises by GAIN · (target − H) / target, by at most GAIN either way.

    entropy: token mean of the step in nats; None: nothing was trained, α stays.

    >>> [round(next_coefficient(0.01, h, target=0.5, start=0.01), 5) for h in (0.0, 0.5, 1.0, 9.0)]
    [0.01105, 0.01, 0.00905, 0.00905]
    """
    if entropy is None or not math.isfinite(entropy):
        return now
    step = GAIN * min(max((target - entropy) / target, -1.0), 1.0)
    return min(max(now * math.exp(step), start / RANGE), start * RANGE)


@dataclass(frozen=True)
class Plan:
    """Settings that do not change from step to step."""

    name: str  # preset of `gspo.objectives`, or of `function`
    settings: Mapping[str, Any]
    num_minibatches: int
    temperature: float
    max_tokens: int  # input tokens per micro-batch
    max_norm: float
    max_new_tokens: int
    skip_zero_advantage: bool = True  # False if another loss term (KL, entropy) needs every sequence
    routing_replay: Replay = "none"  # which experts a mixture's passes use; `proximal` needs a recomputed π_old
    sequence_unit: Literal["trajectory", "turn"] = "trajectory"  # which part of an episode has one ratio
    num_epochs: int = 1  # passes over the batch
    seed: int = 0  # of the order of mini-batches in passes after the first
    function: Callable[..., Any] | None = None  # an objective of the user, in place of a preset

    @property
    def num_updates(self) -> int:
        """Optimizer updates of one step."""
        return self.num_minibatches * self.num_epochs

    def order(self, version: int) -> list[int]:
        """The mini-batch of each update: 0…K−1 in the first pass, then a permutation per pass."""
        later = [
            rng.permutation(self.seed, "ppo_epochs", self.num_minibatches, version, epoch).tolist()
            for epoch in range(1, self.num_epochs)
        ]
        return [*range(self.num_minibatches), *(k for pass_ in later for k in pass_)]


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
    teacher: Teacher | None = None,
) -> StepReport:
    """K optimizer updates per pass over one rollout batch; `version` is that of the weights at its start.

    Results per sequence are those of the last pass.

    `teacher`: its exact KL is added to the loss, if it has one (`Teacher.exact_kl`).

    `before_update` is called with mini-batch 1's noise, [n], before the first update. If it raises, nothing changes.
    """
    step = _prepare(policy, batch, plan, keep_tokens_of, teacher)
    report, world = step.report, policy.world
    # log π_old of mini-batches 2…K. log μ, unless the source is `recompute`.
    proximal_logp: LogProbs = step.behavior
    with phase(report.seconds, "proximal"):
        if proximal == "recompute":
            proximal_logp = step.recompute_proximal()
    for update, k in enumerate(plan.order(version)):
        old = _ProximalOf(
            # The first update is computed with π_old's weights: its own forward pass is π_old.
            logp=None if update == 0 and proximal != "rollout" else proximal_logp,
            version=version,
            progress=update / plan.num_updates if proximal == "loglinear" else None,
        )
        loss, denominator = 0.0, _denominator(batch, plan, k)
        with phase(report.seconds, "forward_backward"):
            for packed in step.packs[k]:
                loss += step.backward(packed, update=update, old=old, denominator=denominator)
        # All ranks must make the same decision whether to update, so each needs the loss of all ranks.
        loss = world.all_reduce_sum(loss)
        # After the backward pass the noise is known, and before the update an error leaves the weights unchanged.
        if update == 0 and before_update is not None:
            before_update(of_all_ranks(report.noise_log_s, world))
        with phase(report.seconds, "optimizer"):
            # The loss is checked too: a clamp has gradient 0 at NaN, so the gradient norm can be finite.
            norm, applied = apply_update(
                optimizer, lr=learning_rates[update], max_norm=plan.max_norm, is_finite=math.isfinite(loss)
            )
        report.losses.append(loss)
        report.grad_norms.append(norm)
        report.applied.append(applied)
    return report if world.size == 1 else merged(report, world)


def _prepare(
    policy: PolicyModule, batch: Batch, plan: Plan, keep_tokens_of: frozenset[int], teacher: Teacher | None
) -> _Step:
    """Which sequences enter the model, log μ of each, and the micro-batches of every mini-batch."""
    report = StepReport.empty(batch.num_sequences)
    enters = batch.has_gradient if plan.skip_zero_advantage else batch.trainable  # [n]
    report.num_epochs = plan.num_epochs
    report.num_skipped = int((batch.in_denominator & ~enters).sum())
    if any(sample.extras.kept is not None for sample in batch.samples):
        report.kept_mass, report.kept_mass_at_start = (np.full(batch.num_sequences, np.nan) for _ in range(2))
    routing = Routing(policy, batch, plan.routing_replay)
    if routing.has_routers:
        # The same arrays: `routing` fills them during the passes.
        report.flips, report.flipped_tokens, report.sampler_flips = routing.flips
    return _Step(
        policy=policy,
        batch=batch,
        plan=plan,
        behavior={int(i): batch.samples[i].behavior_logp[batch.samples[i].mask] for i in np.flatnonzero(enters)},
        # Packed once, for π_old and for training: the same computation with the same weights gives a ratio of 1.
        packs=[
            packed_parts(policy, batch.items(enters & (batch.minibatch == k)), plan.max_tokens)
            for k in range(plan.num_minibatches)
        ],
        routing=routing,
        keep_tokens_of=keep_tokens_of,
        report=report,
        teacher=teacher if teacher is not None and teacher.exact_kl is not None else None,
    )


def _denominator(batch: Batch, plan: Plan, k: int) -> float:
    """What the loss of mini-batch k is divided by, over all micro-batches and ranks.

    Skipped sequences count: skipping saves computation and does not change the algorithm.
    """
    counted = (batch.minibatch == k) & batch.in_denominator  # [n]
    return objectives.denominator(
        plan.name,
        # max: a mini-batch without counted sequences has loss 0, not 0/0.
        num_sequences=max(int((counted & batch.is_first).sum()), 1),  # trajectories
        num_tokens=max(int(batch.trained_tokens[counted].sum()), 1),
        max_new_tokens=plan.max_new_tokens,
        aggregation=plan.settings["aggregation"],
    )


@dataclass(frozen=True)
class _ProximalOf:
    """π_old of one mini-batch."""

    logp: LogProbs | None  # None: the mini-batch's own detached forward pass
    version: int  # of the weights at the start of the batch
    progress: float | None  # k/K if log-probs are interpolated by version (`loglinear`)

    def at(self, out: PolicyOutput, samples: Sequence[Any], index: NDArray[np.int64]) -> torch.Tensor:
        """log π_old at the trained tokens of a micro-batch, [M]."""
        current = out.logp.detach()  # [M]
        if self.logp is None:
            # The ratio has the value 1; its gradient is that of log π_θ, because only this copy is detached.
            return current
        # Detached inputs only, so π_old has no gradient in either case below.
        stored = gather(self.logp, index).to(current)  # [M]
        if self.progress is None:
            return stored
        alpha = loglinear_weight([samples[int(i)] for i in index], self.version, self.progress)  # [M]
        return stored + alpha.to(current) * (current - stored)


@dataclass(frozen=True)
class _Step:
    """Forward, loss and backward of the micro-batches of one step; results go to `report`."""

    policy: PolicyModule
    batch: Batch
    plan: Plan
    behavior: LogProbs  # log μ
    packs: Sequence[Sequence[Packed]]  # the micro-batches of each mini-batch
    routing: Routing
    keep_tokens_of: frozenset[int]
    report: StepReport
    teacher: Teacher | None  # with an exact KL

    def recompute_proximal(self) -> LogProbs:
        """log π_old by a forward pass, before the first update: afterwards the weights are no longer π_old's."""
        # Mini-batch 1 needs no extra forward pass, unless a later pass over the batch trains on it again.
        later = [packed for of_minibatch in self.packs[self.plan.num_epochs == 1 :] for packed in of_minibatch]
        found = recomputed(self.policy, later, self.plan.temperature, self.routing)
        # Trainer against sampler at equal weights: a measurement of the noise at no extra cost.
        for i, logp in found.items():
            self.report.noise_log_s[i] = float(np.mean(logp - self.behavior[i], dtype=np.float64))
        return found

    def backward(self, packed: Packed, *, update: int, old: _ProximalOf, denominator: float) -> float:
        """Add the gradient of one micro-batch of this update; returns its loss."""
        batch, plan, entropy_coef = self.batch, self.plan, self.plan.settings.get("entropy_coef", 0.0)
        against: dict[str, Any] = {}
        if self.teacher is not None:
            against = {"teacher": self.teacher.policy, "forward_share": self.teacher.exact_kl}
        with self.routing.in_minibatch(packed, update):
            # log-probs and entropy, [M]
            out = self.policy(packed, temperature=plan.temperature, entropy_grad=bool(entropy_coef), **against)
        if packed.is_filler:
            # Gradient 0, but a backward pass: FSDP's collectives in it need every rank.
            (out.logp.sum() * 0.0).backward()
            return 0.0
        index = packed.index.cpu().numpy()  # [B] sequence numbers
        behavior_logp = gather(self.behavior, index).to(out.logp)  # [M]; reference_logp too
        reference_logp = None if batch.reference_logp is None else gather(batch.reference_logp, index).to(out.logp)
        units = _units(batch, index, packed.cu_seqlens, plan)
        result = objectives.loss(
            plan.function or plan.name,
            out.logp,
            old.at(out, batch.samples, index),  # [M]
            _advantages(batch, index, units).to(out.logp),  # [M] or [U]
            None,  # mask: every target is a trained token
            behavior_logp=behavior_logp,
            reference_logp=reference_logp,
            entropy=out.entropy if entropy_coef else None,
            cu_seqlens=units.cu_seqlens,
            weight=units.weight,
            denominator=denominator,
            **plan.settings,
        )
        loss = result.loss
        if self.teacher is not None:
            assert out.divergence is not None
            loss = loss + self.teacher.coef * self._divergence(out.divergence, packed, units, denominator)
        loss.backward()
        reached("train.backward")
        self._record(
            packed,
            update=update,
            out=out,
            units=units,
            result=result,
            behavior_logp=behavior_logp,
            reference_logp=reference_logp,
        )
        return float(loss.detach())

    def _divergence(self, divergence: torch.Tensor, packed: Packed, units: _Units, denominator: float) -> torch.Tensor:
        """The KL to the teacher, aggregated as the loss is; divergence [M]."""
        layout = objectives.token_layout(divergence, None, units.cu_seqlens)
        per_unit = aggregate.tokens(divergence, layout, self.plan.settings["aggregation"])  # [U]
        return (per_unit if units.weight is None else per_unit * units.weight.to(per_unit)).sum() / denominator

    def _record(
        self,
        packed: Packed,
        *,
        update: int,
        out: PolicyOutput,
        units: _Units,
        result: objectives.Objective,
        behavior_logp: torch.Tensor,
        reference_logp: torch.Tensor | None,
    ) -> None:
        """Write what happened to the sequences of a micro-batch into the report."""
        report, index = self.report, packed.index.cpu().numpy()  # index [B]
        report.num_input_tokens += packed.num_tokens
        for name, per_sequence in report.of_the_loss.items():
            if name in result.stats:
                per_sequence[index] = units.by_sequence(name, result.stats).cpu().numpy()
        # Always per sequence, also if the units of the loss are turns.
        layout = objectives.token_layout(out.logp, None, packed.cu_seqlens)
        drift = objectives.mean_tokens(behavior_logp - out.logp.detach(), layout).cpu().numpy()  # [B]
        report.kl_behavior[index] = drift
        entropy = out.entropy.detach()  # [M]
        report.entropy[index] = objectives.mean_tokens(entropy, layout).cpu().numpy()
        if reference_logp is not None:
            k3 = kl(out.logp.detach(), reference_logp, "k3")  # [M]
            report.kl_reference[index] = objectives.mean_tokens(k3, layout).cpu().numpy()
        if update == 0:  # no update has been made: these are π_old's weights
            report.noise_log_s[index] = -drift
            report.log_s_at_start[index] = report.log_s[index]
        if report.kept_mass is not None and report.kept_mass_at_start is not None and out.kept_mass is not None:
            mass = objectives.mean_tokens(out.kept_mass, layout).cpu().numpy()  # [B]
            report.kept_mass[index] = mass
            if update == 0:
                report.kept_mass_at_start[index] = mass
        cuts = packed.cu_seqlens.cpu().numpy()  # [B + 1]
        for b, i in enumerate(index.tolist()):
            if i in self.keep_tokens_of:
                report.logp[i] = out.logp[cuts[b] : cuts[b + 1]].detach().float().cpu().numpy()
                report.token_entropy[i] = entropy[cuts[b] : cuts[b + 1]].float().cpu().numpy()


@dataclass(frozen=True)
class _Units:
    """The spans of a micro-batch that have one ratio each: U = B sequences, or the U turns inside them."""

    cu_seqlens: torch.Tensor  # [U + 1]
    weight: torch.Tensor | None  # [U], share of the trajectory's tokens; None: all 1
    sequence: torch.Tensor | None = None  # [U] sequence of each turn; None: the units are the sequences
    num_sequences: int = 0

    def by_sequence(self, name: str, stats: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A statistic per sequence, [B], from one per unit: token counts are summed, the rest are token means."""
        if self.sequence is None:
            return stats[name]
        # Turns of unequal length: a token mean of the sequence weights each turn by its tokens.
        counts = name.startswith("clipped") or name.endswith("outside")
        return fold(stats[name], self.sequence, self.num_sequences, None if counts else stats["num_tokens"])


def _units(batch: Batch, index: NDArray[np.int64], cu_seqlens: torch.Tensor, plan: Plan) -> _Units:
    share = torch.from_numpy(batch.token_share[index]).to(cu_seqlens.device)  # [B]
    # Only a mean over tokens needs weights; with a sum, the sequences of a trajectory add up without them.
    weighted = plan.settings["aggregation"] == "sequence_mean"
    whole = _Units(cu_seqlens, share if weighted and bool((share != 1).any()) else None)
    if plan.sequence_unit == "trajectory":
        return whole
    samples = [batch.samples[int(i)] for i in index]
    turns = torch.from_numpy(np.concatenate([s.turns[s.mask] for s in samples])).to(cu_seqlens.device)  # [M]
    cuts, sequence = turn_cuts(turns, cu_seqlens)  # [U + 1], [U]
    if len(cuts) == len(cu_seqlens):  # every sequence has one turn
        return whole
    # |y_ij|/|y_i| · |y_ijk|/|y_ij|: the share of turn k in the tokens of its whole trajectory.
    turn_share = (share / cu_seqlens.diff())[sequence] * cuts.diff()  # [U]
    return _Units(cuts, turn_share if weighted else None, sequence, len(index))


def _advantages(batch: Batch, index: NDArray[np.int64], units: _Units) -> torch.Tensor:
    """One advantage per token, [M], or per unit, [U]."""
    if batch.token_advantages is not None:
        return gather(batch.token_advantages, index)
    advantage = torch.from_numpy(batch.advantages[index])  # [B]
    return advantage if units.sequence is None else advantage[units.sequence.cpu()]


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
    credit: Credit  # what follows: keywords are settings of `learner.credit.with_token_advantages`
    assembly: Mapping[str, Any]  # how rewards become advantages: keywords of `learner.credit.batch_with_advantages`
    threads: int

    def close(self) -> None:
        if self.teacher is not None:
            self.teacher.close()

    @property
    def trained(self) -> tuple[Any, ...]:
        """What a checkpoint holds: policy, its optimizer, and the critic with its optimizer or None."""
        return self.policy, self.optimizer, self.critic and self.critic.trained
