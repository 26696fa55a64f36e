"""`saver`, `recover` and `evaluator`: what happens every N steps, epochs or seconds."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class Frequency(Section):
    freq_epochs: int | None = key(None, "Run every N epochs.", low=1)
    freq_steps: int | None = key(None, "Run every N steps.", low=1)
    freq_secs: float | None = key(None, "Run every N seconds.", above=0)


class Saver(Section):
    freq_epochs: int | None = key(None, "Write a checkpoint every N epochs.", low=1)
    freq_steps: int | None = key(None, "Write a checkpoint every N steps.", low=1)
    keep: int = key(2, "Number of checkpoints to keep, besides the best one.", low=1)


class Evaluator(Frequency):
    at_start: bool = key(True, "Evaluate before the first step.")
    size: int | None = key(512, "Number of held-out problems per evaluation; null: all.", low=1)


class Recover(Section):
    freq_secs: float | None = key(300.0, "Write a checkpoint every N seconds; null: never.", above=0)
    mode: Literal["auto", "disabled"] = key(
        "auto", "If the run directory already has a run: auto resumes it, disabled is an error."
    )
