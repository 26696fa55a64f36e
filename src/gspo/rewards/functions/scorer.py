"""Rewards that are asked, not called: models and services, scored in the trainer's process, many samples at a time.

A scorer starts on a group when it is handed in and is asked for its results when the trainer needs them. A reward model
waits until then and scores all groups in one go; a judge begins at once, beside sampling, and says when it is done.
Neither runs user code, so neither needs a process that can be killed; what can hang (the network) has deadlines of its
own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from gspo.rewards.call import Pending
from gspo.rewards.functions.judge import Judge
from gspo.rewards.functions.reward_model import RewardModel


class Scorer(Protocol):
    """What stands behind one part of a spec that is no function."""

    def start(self, item: Any) -> Pending:
        """Take in a group (a `RewardItem`)."""
        ...

    def close(self) -> None: ...


SCORERS: dict[str, Callable[..., Scorer]] = {"reward_model": RewardModel, "judge": Judge}


def settings_of(name: str) -> list[inspect.Parameter]:
    """The settings a scorer takes; `key`, the place named in its messages, is ours.

    >>> [p.name for p in settings_of("reward_model")]
    ['path', 'batch_size', 'max_length', 'chat_template', 'device', 'dtype']
    """
    return [p for p in inspect.signature(SCORERS[name]).parameters.values() if p.name != "key"]
