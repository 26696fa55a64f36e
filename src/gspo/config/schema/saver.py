"""`saver`, `recover` and `evaluator`: what happens every N steps, epochs or seconds."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class SaverSection(Section):
    freq_epochs: int | None = key(None, "Write a checkpoint every N epochs.", low=1)
    freq_steps: int | None = key(None, "Write a checkpoint every N steps.", low=1)
    keep: int = key(2, "Number of checkpoints to keep, besides the best one.", low=1)


class EvaluatorSection(Section):
    freq_epochs: int | None = key(None, "Evaluate every N epochs.", low=1)
    freq_steps: int | None = key(
        None,
        "Evaluate every N steps; the last step is always evaluated. 0: no evaluation at all",
        unset="ten times in a run, at least 10 steps apart, unless freq_epochs is set",
        low=0,
    )
    at_start: bool = key(True, "Evaluate before the first step.")
    best: str | None = key(
        None,
        "Metric of the best checkpoint, the highest value: eval/accuracy, eval/reward or eval/pass_at_k; of one source "
        "of a mixture: eval/<source>/reward. With algorithm sft also eval/loss, the lowest value",
        unset="eval/accuracy if every reward is 0 or 1, otherwise eval/reward; without a reward eval/loss",
    )
    size: int | None = key(512, "Number of held-out problems per evaluation; null: all.", low=1)


class Recover(Section):
    freq_secs: float | None = key(300.0, "Write a checkpoint every N seconds; null: never.", above=0)
    mode: Literal["auto", "disabled"] = key(
        "auto", "If the run directory already has a run: auto resumes it, disabled is an error."
    )
