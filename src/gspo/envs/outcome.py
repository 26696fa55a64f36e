"""What an environment returned, as the outcome of its episode. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo.envs.client import EpisodeError
from gspo.types import Outcome, Score


def outcome_of(returned: Any, turn_rewards: Mapping[int, float]) -> Outcome | None:
    """The outcome for an environment's return value: a number, {"reward": number, part: number, …}, or None.

    Evaluations decide by the first part, `reward`, whether the episode was correct.

    >>> outcome_of({"reward": 1.0, "format": 0.5}, {0: 0.25})
    Score(value=1.25, parts={'reward': 1.0, 'format': 0.5})
    >>> outcome_of(0.5, {})
    Score(value=0.5, parts={})
    >>> outcome_of({"reward": None, "steps": 2}, {0: 1.0, 1: 2.0})  # the rewards of turns are all there is
    Score(value=3.0, parts={'reward': 3.0, 'steps': 2.0})
    """
    if returned is None:
        # Only turn rewards: their sum is the reward. None at all: the configured reward scores the episode.
        if not turn_rewards:
            return None
        returned, turn_rewards = sum(turn_rewards.values()), {}
    if not isinstance(returned, Mapping):
        returned = {"reward": returned}
    if turn_rewards and returned.get("reward", 0) is None:
        returned, turn_rewards = {**returned, "reward": sum(turn_rewards.values())}, {}
    parts = {str(name): _number(value, str(name)) for name, value in returned.items()}
    if "reward" not in parts:
        raise EpisodeError("an environment's dict needs a 'reward'; got " + (", ".join(parts) or "an empty one"))
    # `reward` becomes the first part, in whatever order the environment listed the parts.
    parts = {"reward": parts["reward"], **parts}
    value = parts["reward"] + sum(turn_rewards.values())
    if not math.isfinite(value):
        raise EpisodeError(f"the sum of the rewards is {value}; it must be a finite number")
    shown = {} if len(parts) == 1 and not turn_rewards else parts
    return Score(value, shown, {name: 0.0 for name in shown if name != "reward"})


def _number(value: Any, name: str) -> float:
    if not hasattr(value, "__float__") or isinstance(value, str | bytes):
        raise EpisodeError(f"{name} must be a number, got {type(value).__name__}: an environment returns a number, a "
                           "dict of numbers, or None")  # fmt: skip
    number = float(value)
    if not math.isfinite(number):
        raise EpisodeError(f"{name} is {number}; it must be a finite number")
    return number
