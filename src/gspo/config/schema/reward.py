"""`reward`: reward functions and their workers."""

from __future__ import annotations

from typing import Any

from gspo.config.schema.key import Section, key


class Reward(Section):
    functions: list[str | dict[str, Any]] = key(
        [],
        "Rewards: math, numeric, final, format, …, module:function, or with settings {name: reward_model, path: …}, "
        "{name: judge, url: …, model: …} (docs/data.md); empty: the task's own.",
    )
    weights: list[float] = key([], "One weight per function; empty: all 1.")
    timeout: float = key(10.0, "Seconds until a reward that does not answer is killed.", above=0)
    workers: int = key(2, "Worker processes for rewards that need one.", low=1)
    max_failure_fraction: float = key(0.5, "Share of failed rewards in a batch that stops the run.", low=0.0, high=1.0)
    allow_unsandboxed_code: bool = key(
        False, "UNSAFE: where bubblewrap does not work, run model-written code with your own rights (docs/sandbox.md)."
    )
