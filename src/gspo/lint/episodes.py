"""Lint rules for multi-turn episodes, environments and agents."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from gspo.lint.facts import Facts, Finding, rule

ENVIRONMENTS = ("tools", "self_correct")  # the built-in ones of envs/find.py


@rule
def unknown_environment(f: Facts) -> Iterator[Finding]:
    path = f.config.env.path
    if path is not None and ":" not in path and path not in ENVIRONMENTS:
        yield f.error(
            "env.path",
            f"{path!r} is not a built-in environment; these are {', '.join(ENVIRONMENTS)}",
            "name your own environment as module:function or file.py:function",
        )


@rule
def more_turns_than_the_limit(f: Facts) -> Iterator[Finding]:
    env = f.config.env
    turns = env.options.get("max_turns", env.options.get("attempts"))
    if env.path in ENVIRONMENTS and isinstance(turns, int) and turns > env.max_turns:
        yield f.error(
            "env.max_turns",
            f"the environment may take {turns} turns but an episode is limited to {env.max_turns}, so the longest "
            "episodes would fail",
            f"set env.max_turns={turns}",
        )


@rule
def turn_discount_with_gae(f: Facts) -> Iterator[Finding]:
    env = f.config.env
    if env.path is not None and f.objective["advantage"] == "gae" and env.turn_discount < 1:
        yield f.error(
            "env.turn_discount",
            "GAE discounts per token, not per turn",
            "set actor.discount, or an algorithm with a group advantage",
        )


@rule
def turn_credit_averaged_over_a_trajectory(f: Facts) -> Iterator[Finding]:
    is_whole = f.actor.sequence_unit == "trajectory"
    if f.objective["level"] == "sequence" and f.config.env.turn_discount < 1 and is_whole:
        yield f.warn(
            "env.turn_discount",
            "the credit differs from turn to turn, but one ratio per trajectory uses its mean",
            "set actor.sequence_unit: turn, or algorithm: gspo_token",
        )


@rule
def two_players(f: Facts) -> Iterator[Finding]:
    named = [f"env.{name}" for name in ("path", "agent") if getattr(f.config.env, name)]
    if len(named) > 1:
        yield f.error(
            named[1], f"{' and '.join(named)} are both set, but an episode uses only one of them", "remove one"
        )


@rule
def missing_command(f: Facts) -> Iterator[Finding]:
    command = f.config.env.agent
    if isinstance(command, list) and command and shutil.which(command[0]) is None:
        yield f.error("env.agent", f"there is no program {command[0]}", "write its full path, or install it")
