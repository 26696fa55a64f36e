"""What one training step computed, per sequence and per update, and how ranks put their parts together."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.learner.ranks.world import World


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
        return {
            "log_s": self.log_s,
            "clipped_low": self.clipped_low,
            "clipped_high": self.clipped_high,
            "correction": self.correction,
            "correction_raw": self.correction_raw,
            "correction_outside": self.correction_outside,
        }

    @staticmethod
    def empty(num_sequences: int) -> StepReport:
        def unset() -> NDArray[np.float64]:
            return np.full(num_sequences, np.nan)

        return StepReport(
            log_s=unset(),
            clipped_low=unset(),
            clipped_high=unset(),
            noise_log_s=unset(),
            entropy=unset(),
            kl_behavior=unset(),
            kl_reference=unset(),
            correction=unset(),
            correction_raw=unset(),
            correction_outside=unset(),
            log_s_at_start=unset(),
        )


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
            # NaN marks the sequences of other ranks.
            own = getattr(report, name)
            setattr(report, name, np.where(np.isnan(own), array, own))
    return report
