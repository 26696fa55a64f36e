"""Observations of a control task as text, and text as actions.

Two forms. *Numbers*, for language models: `0.12, -0.50`. *Levels*, for small policies over an alphabet: each number of
an observation is one letter (a = low … ), each number of an action is one digit, so that an answer has a fixed length.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gspo.errors import ConfigError
from gspo.system.imports import find_function

_LETTERS = string.ascii_lowercase + string.ascii_uppercase
_DIGITS = string.digits
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class InvalidActionError(Exception):
    """The model's answer is not an action; the message is for the model."""


def to_goal(observation: Mapping[str, Any]) -> np.ndarray:
    """The way to the goal, in a goal environment of gymnasium-robotics (Fetch, PointMaze, …)."""
    return np.asarray(observation["desired_goal"]) - np.asarray(observation["achieved_goal"])


def nearness(observation: Mapping[str, Any]) -> float:
    """Minus the distance to the goal, 1 for 10 cm."""
    return -10 * float(np.linalg.norm(to_goal(observation)))


class ObservationCodec:
    """`given`: None, module:function(observation) → a text or numbers, or
    {of: module:function, levels: n, low: x, high: y, digits: n}."""

    def __init__(self, given: str | Mapping[str, Any] | None, space: Any) -> None:
        options = _options(given, "env.options.observation", {"of", "levels", "low", "high", "digits"})
        self._of: Callable[[Any], Any] | None = options.get("of")
        self._digits = int(options.get("digits", 2))
        self._levels = _levels(options, len(_LETTERS), "env.options.observation.levels")
        if self._levels:
            self._low, self._high = _bounds(options, space if self._of is None else None, "env.options.observation")
        # Of a Box, how many numbers an observation has.
        self._num = int(np.prod(space.shape)) if self._of is None and type(space).__name__ == "Box" else None

    def text(self, observation: Any) -> str:
        if self._of is not None:
            observation = self._of(observation)
        if isinstance(observation, str):
            return observation
        if isinstance(observation, Mapping):  # a Dict space
            return "\n".join(f"{name}: {self.text(value)}" for name, value in observation.items())
        if isinstance(observation, tuple):
            return "; ".join(self.text(value) for value in observation)
        values = np.asarray(observation, dtype=np.float64).reshape(-1)
        if self._num is not None and len(values) != self._num:
            raise ValueError(f"it has {len(values)} numbers, and the observation space has {self._num}")
        if self._levels and len(self._low) not in (1, len(values)):
            raise ValueError(f"it has {len(values)} numbers, and env.options.observation.low has {len(self._low)}")
        if not np.isfinite(values).all():
            raise ValueError("it is not finite")
        if not self._levels:
            return ", ".join(f"{value:.{self._digits}f}".removesuffix("." + "0" * self._digits) for value in values)
        share = (values - self._low) / (self._high - self._low)
        return "".join(_LETTERS[i] for i in np.clip((share * self._levels).astype(int), 0, self._levels - 1))


class ActionCodec:
    """`given`: None, module:function(text, space) → an action, or {levels: n, low: x, high: y, numbers: n}.

    Without `given`: one number for Discrete, numbers for Box and MultiDiscrete, the text itself for Text. With
    `numbers`, an answer chooses only the first numbers of the action; the others stay in the middle of their range.
    """

    def __init__(self, given: str | Mapping[str, Any] | None, space: Any) -> None:
        options = _options(given, "env.options.action", {"of", "levels", "low", "high", "numbers"})
        self._of: Callable[..., Any] | None = options.get("of")
        self._space, self._kind = space, type(space).__name__
        if self._of is None and self._kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text"):
            raise ConfigError(
                f"env.options.action: a {self._kind} action space needs your own function: action: module:function, "
                "called with (text, space)"
            )
        self._levels = _levels(options, len(_DIGITS), "env.options.action.levels")
        self._num = int(np.prod(space.shape)) if self._kind in ("Box", "MultiDiscrete", "MultiBinary") else 1
        if self._levels:
            if self._kind != "Box":
                raise ConfigError(f"env.options.action.levels is for Box action spaces; this one is {self._kind}")
            self._low, self._high = _bounds(options, space, "env.options.action")
            self._num = options.get("numbers", self._num)
            if not isinstance(self._num, int) or not 1 <= self._num <= int(np.prod(space.shape)):
                raise ConfigError(
                    f"env.options.action.numbers must be between 1 and {np.prod(space.shape)}, got {self._num!r}"
                )
        # Sampling parameters: with levels an answer has exactly one token per number.
        self.limits: dict[str, Any] = {"max_new_tokens": self._num, "min_new_tokens": self._num} if self._levels else {}

    def read(self, text: str) -> Any:
        """The action of an answer; raises InvalidActionError."""
        if self._of is not None:
            try:
                return self._of(text, self._space)
            except ValueError as error:
                raise InvalidActionError(str(error)) from error
        if self._kind == "Text":
            return text
        if self._levels:
            return self._from_levels(text)
        numbers = [float(x) for x in _NUMBER.findall(text)]
        if self._kind == "Discrete":
            first, last = int(self._space.start), int(self._space.start + self._space.n - 1)
            if not numbers or not numbers[-1].is_integer() or not first <= numbers[-1] <= last:
                raise InvalidActionError(f"answer with one number from {first} to {last}")
            return int(numbers[-1])
        if len(numbers) != self._num:
            raise InvalidActionError(f"answer with {self._num} numbers, got {len(numbers)}")
        values = np.asarray(numbers).reshape(self._space.shape).astype(self._space.dtype)
        if self._kind == "Box":
            return np.clip(values, self._space.low, self._space.high)
        if not self._space.contains(values):
            raise InvalidActionError("a number is outside the action space")
        return values

    def _from_levels(self, text: str) -> Any:
        picked = [_DIGITS.find(c) for c in text.strip()]
        if len(picked) != self._num or not all(0 <= i < self._levels for i in picked):
            raise InvalidActionError(f"answer with {self._num} digits from 0 to {self._levels - 1}")
        share = np.full(self._space.shape, 0.5).reshape(-1)
        share[: self._num] = np.asarray(picked) / (self._levels - 1)
        values = self._low + share * (self._high - self._low)
        return values.reshape(self._space.shape).astype(self._space.dtype)


def _options(given: Any, key: str, known: set[str]) -> dict[str, Any]:
    options = {} if given is None else dict(given) if isinstance(given, Mapping) else {"of": given}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"{key}.{unknown[0]} is not known; there are {', '.join(sorted(known))}")
    if isinstance(options.get("of"), str):
        try:
            options["of"] = find_function(options["of"])
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    return options


def _levels(options: Mapping[str, Any], most: int, key: str) -> int:
    levels = options.get("levels", 0)
    if not isinstance(levels, int) or (levels and not 2 <= levels <= most):
        raise ConfigError(f"{key} must be between 2 and {most}, got {levels!r}")
    return levels


def _bounds(options: Mapping[str, Any], space: Any, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each number: the options', else those of the space."""
    found = []
    for name in ("low", "high"):
        value = options.get(name, getattr(space, name, None))
        array = None if value is None else np.asarray(value, dtype=np.float64).reshape(-1)
        if array is None or not np.isfinite(array).all() or (np.abs(array) > 1e6).any():
            raise ConfigError(f"{key}.{name} must be set: levels need bounds, and the space has none")
        found.append(array)
    if not (found[0] < found[1]).all():
        raise ConfigError(f"{key}: low must be below high")
    return found[0], found[1]
