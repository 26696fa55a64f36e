"""What a run is, beside weights and moments. There is no RNG state: every draw is a function of its key."""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo.learner.proximal import ProximalSource


@dataclass
class State:
    """Plain numbers, saved with every checkpoint.

    >>> State(step=3).submission
    0
    """

    step: int = 0  # finished steps; also the version of the weights
    submission: int = 0  # next prompt of the stream
    again: list[int] = field(default_factory=list)  # earlier prompts that are to be sampled anew
    update: int = 0  # optimizer updates
    proximal: ProximalSource = "recompute"  # where π_old of mini-batches 2…K comes from
    noise: float | None = None  # last measured p95 |log s|, sampler against trainer at the same weights
    auto_eps: float | None = None
    nonfinite_in_row: dict[str, int] = field(default_factory=dict)  # updates without effect, by whose they are
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0  # spent training, over all sessions
    alarm_counts: dict[str, int] = field(default_factory=dict)
