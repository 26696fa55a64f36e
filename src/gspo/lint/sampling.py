"""Lint rules for lengths and randomness of sampling."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.objective import is_supervised
from gspo.lint.facts import Facts, Finding, rule


@rule
def shortest_above_longest(f: Facts) -> Iterator[Finding]:
    shortest = f.config.gconfig.min_new_tokens  # of evaluation too
    longest = {"gconfig": f.config.gconfig.max_new_tokens}
    if f.config.eval_gconfig is not None and f.loaded.is_set("eval_gconfig.max_new_tokens"):
        longest["eval_gconfig"] = f.config.eval_gconfig.max_new_tokens
    for section, limit in longest.items():
        if shortest > limit:
            yield f.error(
                "gconfig.min_new_tokens",
                f"the minimum of {shortest:,} new tokens is above {section}.max_new_tokens, {limit:,}",
                f"set gconfig.min_new_tokens: 0, or a larger {section}.max_new_tokens",
            )


@rule
def no_randomness(f: Facts) -> Iterator[Finding]:
    if f.config.gconfig.temperature == 0:
        yield f.error(
            "gconfig.temperature",
            "training samples without randomness: all completions of a prompt are equal and all advantages are 0",
            "set gconfig.temperature: 1.0 (eval_gconfig.temperature: 0 is for evaluations)",
        )


@rule
def longer_than_the_context(f: Facts) -> Iterator[Finding]:
    prompt, new = f.config.train_dataset.max_length, f.config.gconfig.max_new_tokens
    if f.context is not None and (prompt or 1) + new > f.context:
        yield f.warn(
            "gconfig.max_new_tokens",
            f"{f.actor.path} has a context of {f.context:,} tokens, too short for {new:,} new tokens after "
            f"{'a prompt' if prompt is None else f'a prompt of {prompt:,} tokens'}",
            f"set gconfig.max_new_tokens to at most {max(1, f.context - (prompt or f.context // 2))}",
        )


@rule
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


@rule
def needs_samples(f: Facts) -> Iterator[Finding]:
    """Keys that only make sense if the policy samples."""
    if not is_supervised(f.config):
        return
    env = f.config.env
    keys = {
        "gconfig.n_samples": (f.config.gconfig.n_samples > 1, "a row of the data set has one completion, not a group"),
        "env.path": (
            bool(env.path or env.agent),
            "an environment plays episodes, and nothing is sampled",
        ),
        "actor.kl_loss_coef": (f.actor.kl_loss_coef > 0, "the KL estimators need samples of the policy"),
        "actor.kl_ctl": (f.actor.kl_ctl > 0, "a KL penalty is part of a reward, and there is none"),
        "actor.zero_variance_groups": (
            f.actor.zero_variance_groups != "count",
            "a group of one completion always has equal rewards",
        ),
        "actor.routing_replay": (f.actor.routing_replay != "none", "there is no sampler or π_old to replay"),
    }
    for key, (holds, why) in keys.items():
        if holds:
            yield f.error(key, f"algorithm sft trains on the completions of the data set: {why}", f"remove {key}")
