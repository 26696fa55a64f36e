"""Lint rules for lengths and randomness of sampling."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.lint.facts import Facts, Finding


def shortest_above_longest(f: Facts) -> Iterator[Finding]:
    for section, values in (("gconfig", f.config.gconfig), ("eval_gconfig", f.config.eval_gconfig)):
        is_own = section == "gconfig" or any(
            f.loaded.is_set(f"{section}.{name}") for name in ("min_new_tokens", "max_new_tokens")
        )
        if values is not None and is_own and values.min_new_tokens > values.max_new_tokens:
            yield f.error(
                f"{section}.min_new_tokens",
                f"the minimum of {values.min_new_tokens:,} new tokens is above the maximum of "
                f"{values.max_new_tokens:,}",
                f"set {section}.min_new_tokens: 0, or a larger {section}.max_new_tokens",
            )


def no_randomness(f: Facts) -> Iterator[Finding]:
    gconfig = f.config.gconfig
    if gconfig.greedy or gconfig.temperature == 0:
        yield (f.warn if gconfig.greedy else f.error)(
            "gconfig.greedy" if gconfig.greedy else "gconfig.temperature",
            "training samples without randomness: all completions of a prompt are equal and all advantages are 0",
            "set gconfig.greedy: false and gconfig.temperature: 1.0",
        )


def two_temperatures(f: Facts) -> Iterator[Finding]:
    gconfig, trained = f.config.gconfig, f.actor.temperature
    if gconfig.greedy or gconfig.temperature == 0 or trained is None or trained == gconfig.temperature:
        return
    yield f.warn(
        "actor.temperature",
        f"the trainer computes log-probs at temperature {trained:g} and the sampler samples at "
        f"{gconfig.temperature:g}: these are different distributions",
        "remove actor.temperature; it is then gconfig.temperature",
    )


def longer_than_the_context(f: Facts) -> Iterator[Finding]:
    prompt, new = f.config.train_dataset.max_length, f.config.gconfig.max_new_tokens
    if f.context is not None and (prompt or 1) + new > f.context:
        yield f.warn(
            "gconfig.max_new_tokens",
            f"{f.actor.path} has a context of {f.context:,} tokens, too short for {new:,} new tokens after "
            f"{'a prompt' if prompt is None else f'a prompt of {prompt:,} tokens'}",
            f"set gconfig.max_new_tokens to at most {max(1, f.context - (prompt or f.context // 2))}",
        )


def longer_than_max_tokens(f: Facts) -> Iterator[Finding]:
    gconfig = f.config.gconfig
    wanted = (f.config.train_dataset.max_length or 0) + gconfig.max_new_tokens
    if gconfig.max_tokens is not None and wanted > gconfig.max_tokens:
        yield f.error(
            "gconfig.max_tokens",
            f"{gconfig.max_tokens:,} is less than the longest prompt plus max_new_tokens ({wanted:,}); such prompts "
            "are refused",
            "raise gconfig.max_tokens, or lower gconfig.max_new_tokens",
        )


RULES = (shortest_above_longest, no_randomness, two_temperatures, longer_than_the_context, longer_than_max_tokens)
