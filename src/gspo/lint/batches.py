"""Lint rules for the sizes of batches, mini-batches and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo.lint.facts import Facts, Finding, rule


@rule
def undividable_batch(f: Facts) -> Iterator[Finding]:
    total, group = f.num_sequences, f.config.gconfig.n_samples
    parts = f.num_minibatches
    if total % parts == 0:
        return
    divisors = _around([n for n in range(1, min(total, 4096) + 1) if total % n == 0], parts)
    unit = parts // math.gcd(group, parts)
    prompts = [n for n in (f.num_prompts // unit * unit, (f.num_prompts // unit + 1) * unit) if n > 0]
    yield f.error(
        "actor.ppo_n_minibatches",
        f"{f.num_prompts:,} prompts × {group:,} samples = {total:,} sequences cannot be divided into {parts:,} "
        "mini-batches of equal size; sequences are not split",
        f"set actor.ppo_n_minibatches: {_either(divisors)}, or train_dataset.batch_size: {_either(prompts)}",
    )


def _around(choices: list[int], target: int) -> list[int]:
    """The nearest choice below the target and the nearest above it."""
    below, above = [n for n in choices if n < target], [n for n in choices if n > target]
    return ([below[-1]] if below else []) + ([above[0]] if above else [])


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


@rule
def micro_batch_below_a_sequence(f: Facts) -> Iterator[Finding]:
    longest, limit = f.longest, f.actor.mb_spec.max_tokens_per_mb
    if longest is not None and longest > limit:
        yield f.warn(
            "actor.mb_spec.max_tokens_per_mb",
            f"{limit:,} is less than the longest sequence ({longest:,} tokens); such a sequence becomes a micro-batch "
            "of its own that exceeds the memory limit",
            f"set actor.mb_spec.max_tokens_per_mb: {longest} or more, or lower gconfig.max_new_tokens",
        )
