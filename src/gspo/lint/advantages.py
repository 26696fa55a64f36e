"""Lint rules for groups, advantages and the shaping of rewards."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.objective import algorithm_in
from gspo.config.schema import Norm, RewardNorm
from gspo.lint.facts import Facts, Finding, rule

GROUP_ADVANTAGES = frozenset({"group_std", "group_mean", "leave_one_out"})


def _uses_groups(norm: Norm | RewardNorm | None) -> bool:
    return norm is not None and bool({"group", "leave1out"} & {norm.mean_level, norm.std_level})


def _by_group(f: Facts) -> bool:
    chosen = f.objective["advantage"]
    return chosen in GROUP_ADVANTAGES or (chosen != "gae" and _uses_groups(f.actor.reward_norm))


@rule
def group_of_one(f: Facts) -> Iterator[Finding]:
    if f.config.gconfig.n_samples == 1 and _by_group(f):
        yield f.error(
            "gconfig.n_samples",
            f"the {f.objective['advantage']} advantage of a group of one sample is always 0",
            "set gconfig.n_samples: 8 (or more), or choose algorithm: reinforce_pp or ppo",
        )


@rule
def every_group_rejected(f: Facts) -> Iterator[Finding]:
    fate = f.actor.zero_variance_groups
    if f.objective["advantage"] == "gae" and f.config.gconfig.n_samples == 1 and fate in ("drop", "refill"):
        yield f.error(
            "actor.zero_variance_groups",
            f"{fate} rejects groups of equal rewards, and a group of one sample always has equal rewards",
            "set actor.zero_variance_groups: count, or gconfig.n_samples: 2 or more",
        )


@rule
def norm_replaces_the_advantage(f: Facts) -> Iterator[Finding]:
    chosen, own = f.objective["advantage"], algorithm_in(f.config).advantage
    if f.actor.reward_norm is not None and f.loaded.is_set("algorithm") and own != "gae" and chosen != own:
        yield f.warn(
            "actor.reward_norm",
            f"replaces the advantage of {f.objective['name']} ({own}) by {chosen}",
            "remove actor.reward_norm, or choose the algorithm with this advantage",
        )


@rule
def normalised_twice(f: Facts) -> Iterator[Finding]:
    if _by_group(f) and _uses_groups(f.actor.adv_norm):
        yield f.warn(
            "actor.adv_norm",
            "the advantages are already normalised within their group; actor.adv_norm does it a second time",
            "remove actor.adv_norm, or set its levels to batch",
        )


@rule
def overlong_tail_too_long(f: Facts) -> Iterator[Finding]:
    tail, longest = f.actor.overlong_tokens, f.config.gconfig.max_new_tokens
    if f.actor.overlong_reward_penalty and tail is not None and tail > longest:
        yield f.error(
            "actor.overlong_tokens",
            f"the penalised tail of {tail:,} tokens is longer than the longest completion ({longest:,})",
            f"set actor.overlong_tokens: {max(1, longest // 5)}",
        )


@rule
def every_completion_masked(f: Facts) -> Iterator[Finding]:
    if f.actor.mask_no_eos_with_zero and f.config.gconfig.ignore_eos and not f.config.gconfig.stop:
        yield f.error(
            "actor.mask_no_eos_with_zero",
            "with gconfig.ignore_eos every completion is truncated, so every advantage would be 0",
            "set gconfig.ignore_eos: false, or actor.mask_no_eos_with_zero: false",
        )
