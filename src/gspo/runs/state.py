"""The state of a run besides weights and moments. There is no RNG state: every draw is a function of its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gspo.learner.proximal import ProximalSource

# Names in state.json that differ from the fields: the format of checkpoints stays.
_STORED = {"resubmit": "again"}


@dataclass
class State:
    """Plain numbers, saved with every checkpoint.

    >>> State.from_json(State(step=3, resubmit=[7]).to_json()).resubmit
    [7]
    """

    step: int = 0  # finished steps; also the version of the weights
    submission: int = 0  # next prompt of the stream
    resubmit: list[int] = field(default_factory=list)  # earlier prompts that must be sampled again
    update: int = 0  # optimizer updates
    proximal: ProximalSource = "recompute"  # where π_old of mini-batches 2…K comes from
    noise: float | None = None  # last measured p95 |log s|, sampler against trainer at the same weights
    auto_eps: float | None = None  # ε_low of `eps_clip: auto`, before its bounds
    nonfinite_in_row: dict[str, int] = field(default_factory=dict)  # skipped updates in a row, by model
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0  # spent training, over all sessions
    alarm_counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {_STORED.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> State:
        names = {theirs: ours for ours, theirs in _STORED.items()}
        return cls(**{names.get(name, name): value for name, value in stored.items()})
