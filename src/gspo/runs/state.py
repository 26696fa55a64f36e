"""The state of a run besides weights and moments. There is no RNG state: every draw is a function of its key."""

from __future__ import annotations

import math
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
    entropy_coef: float | None = None  # of `entropy_target`, for the next step; None: the first one
    curriculum: dict[str, Any] | None = None  # of `shuffle: pass_rate`; only in a checkpoint
    nonfinite_in_row: dict[str, int] = field(default_factory=dict)  # skipped updates in a row, by model
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)  # the held-out scores of that step, by metric
    graded: bool = False  # an evaluation had rewards other than 0 and 1
    seconds: float = 0.0  # spent training, over all sessions
    alarm_counts: dict[str, int] = field(default_factory=dict)

    def compare_best(self, scores: Mapping[str, float], metric: str | None) -> None:
        """Compare the current step with the best step so far; of equal ones the later is the best.

        scores: metrics of an evaluation; metric: the one to compare, None: accuracy while all rewards were 0 or 1, else
        reward; without either, the loss, of which the lowest is the best. The best step's scores are all kept, so that
        the metric may change during a run.

        >>> state = State(step=5, best_step=0, best={"eval/accuracy": 0.0, "eval/reward": 0.4})
        >>> state.compare_best({"eval/accuracy": 0.0, "eval/reward": 0.3, "eval/graded": 1.0}, None)
        >>> state.best_step
        0
        """
        self.graded = self.graded or scores.get("eval/graded", 0.0) > 0
        own = "eval/reward" if self.graded else "eval/accuracy"
        metric = metric or (own if own in scores else "eval/loss")
        sign = -1 if metric.endswith("/loss") else 1
        now, before = scores.get(metric, math.nan), self.best.get(metric)
        # A source whose rewards all failed has no score: it is never the best.
        if self.best_step is None or (math.isfinite(now) and (before is None or sign * now >= sign * before)):
            self.best_step, self.best = self.step, {k: v for k, v in scores.items() if math.isfinite(v)}

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        # Only runs that use them store these.
        for name in ("entropy_coef", "curriculum"):
            if fields[name] is None:
                del fields[name]
        return {_STORED.get(name, name): value for name, value in fields.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> State:
        names = {theirs: ours for ours, theirs in _STORED.items()}
        fields = {names.get(name, name): value for name, value in stored.items()}
        # Checkpoints from before there was `best` have the accuracy alone.
        if (accuracy := fields.pop("best_accuracy", None)) is not None:
            fields["best"] = {"eval/accuracy": accuracy}
        return cls(**fields)
