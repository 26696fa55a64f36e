"""`reward`: reward functions and their workers."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.key import Section, key


class Reward(Section):
    functions: list[str | dict[str, Any]] = key(
        [],
        "Rewards: math, numeric, final, format, …, module:function, or with settings {name: reward_model, path: …}, "
        "{name: judge, url: …, model: …} (docs/data.md); empty: the task's own. The reward is their weighted sum. An "
        "entry with `gate: true`, as {name: language, to: fr, gate: true}, is not in the sum but multiplies it.",
    )
    weights: list[float] = key([], "One weight per function; empty: all weights are 1.")
    normalize: Literal["sum", "each"] = key(
        "sum",
        "What the advantage normalises: the weighted sum of the rewards, or each reward apart, before the weighted sum "
        "(GDPO; docs/algorithms.md).",
    )
    timeout: float = key(10.0, "A reward that takes longer than this many seconds is killed.", above=0)
    workers: int = key(2, "Number of worker processes, for rewards that need one.", low=1)
    max_failure_fraction: float = key(
        0.5, "The run stops if more than this fraction of a batch's rewards failed.", low=0.0, high=1.0
    )
    check: Literal["warn", "stop", "off"] = key(
        "warn",
        "Before the first step, score known answers to a few rows (reference, empty, another row's): warn or stop if "
        "the reward looks broken; off: no check. `gspo doctor --reward` does the same with more rows.",
    )
    allow_unsandboxed_code: bool = key(
        False,
        "UNSAFE: if bubblewrap does not work, run code that the model wrote without a sandbox, with your own rights "
        "(docs/sandbox.md).",
    )
