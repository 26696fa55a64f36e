"""The environment `self_correct`: after a wrong answer the model gets feedback and may try again.

`check` compares an answer with the row's reference answer; `feedback` follows each wrong attempt. The episode's reward
is `discount` to the power of the number of wrong attempts before the right one, and 0 if no attempt was right.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo.envs.client import Client, OutOfRoomError
from gspo.errors import ConfigError
from gspo.rewards import BUILTIN, builtin
from gspo.system import find_function


class SelfCorrect:
    """The environment.

    attempts   maximum number of answers
    feedback   message after a wrong answer; {answer} is replaced by that answer, {question} by that column of the row
    discount   factor of the reward for every wrong attempt before the right one
    check      a built-in reward (final, math, numeric, …) or module:function(text, answer=…); 1 means right
    options    arguments of check: {marker: ">"}
    """

    def __init__(
        self,
        attempts: int = 2,
        feedback: str = "That is not right. Look for the mistake and answer again.",
        discount: float = 1.0,
        check: str | Callable[..., Any] = "math",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if attempts < 1 or not 0 <= discount <= 1:
            raise ConfigError("env.options: attempts must be at least 1, and discount between 0 and 1")
        self._attempts, self._feedback, self._discount = attempts, feedback, discount
        self._check = partial(_found(check), **(options or {}))

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> dict[str, float]:
        messages = client.messages
        for attempt in range(self._attempts):
            try:
                answer = await client.chat(messages)
            except OutOfRoomError:
                # Without any answer the episode fails. Later, a full context just ends the attempts.
                if attempt == 0:
                    raise
                break
            # In a thread: a check of model-written text may be slow.
            mark = await asyncio.to_thread(self._check, answer["content"], **_accepted(self._check, data))
            if float(mark) >= 1:
                return {"reward": self._discount**attempt, "first_attempt": float(attempt == 0)}
            feedback = self._feedback
            for name, value in {**data, "answer": answer["content"]}.items():
                feedback = feedback.replace(f"{{{name}}}", str(value))
            # The answer is part of the history, so that the next request continues the sampled tokens.
            messages += [answer, {"role": "user", "content": feedback}]
        return {"reward": 0.0, "first_attempt": 0.0}


def _found(check: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(check):
        return check
    if check in BUILTIN:
        return builtin(check)
    try:
        return find_function(check)
    except ValueError as error:
        raise ConfigError(f"env.options.check: {error}; built-in checks are {', '.join(BUILTIN)}") from error


def _accepted(function: Callable[..., Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the row that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(data)
    return {name: value for name, value in data.items() if name in parameters}
