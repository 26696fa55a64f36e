"""`saver`, `recover` and `evaluator`: what happens every N steps, epochs or seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import StringConstraints

from gspo.config.schema.key import Section, key

Epochs = Annotated[str, StringConstraints(pattern=r"^(epoch|[1-9]\d{0,8} epochs)$")]


def num_epochs(frequency: str) -> int:
    """
    >>> num_epochs("epoch"), num_epochs("2 epochs")
    (1, 2)
    """
    return 1 if frequency == "epoch" else int(frequency.split()[0])


class SaverSection(Section):
    freq_steps: Annotated[int, Ge(1)] | Epochs | None = key(
        None, "Write a checkpoint every N steps; `epoch` and `2 epochs` count epochs; null: recover.freq_secs decides."
    )
    keep: int = key(2, "Number of checkpoints to keep, besides the best one.", low=1)


class EvaluatorSection(Section):
    freq_steps: Annotated[int, Ge(0)] | Epochs | None = key(
        None,
        "Evaluate every N steps; `epoch` and `2 epochs` count epochs; the last step is always evaluated. 0: no "
        "evaluation at all",
        unset="ten times in a run, at least 10 steps apart",
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
