"""Scorers: reward models and judges, which run in the trainer's process and score many samples at a time.

A scorer starts when a group is submitted, and its results are taken when the trainer needs them. A reward model scores
all submitted groups when the first result is taken; a judge sends its requests at once, while sampling continues.
Neither runs user code, so neither needs a worker process; requests to a judge have timeouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from gspo.rewards.call import Pending
from gspo.rewards.functions.judge import Judge
from gspo.rewards.functions.reward_model import RewardModel


class Scorer(Protocol):
    """The implementation of a part of a spec that is not a function."""

    def start(self, item: Any) -> Pending:
        """Start to score a group (a `RewardItem`)."""
        ...

    def close(self) -> None: ...


SCORERS: dict[str, Callable[..., Scorer]] = {"reward_model": RewardModel, "judge": Judge}


def settings_of(name: str) -> list[inspect.Parameter]:
    """The settings of a scorer, without `key`, the config section named in its messages.

    >>> [p.name for p in settings_of("reward_model")]
    ['path', 'batch_size', 'max_length', 'chat_template', 'device', 'dtype']
    """
    return [p for p in inspect.signature(SCORERS[name]).parameters.values() if p.name != "key"]
