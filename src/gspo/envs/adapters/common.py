"""What adapters share: problems by reset seed, calls that may block, observations and actions as text.

Two forms. *Numbers*, for language models: `0.12, -0.50`. *Levels*, for small policies over an alphabet: each number of
an observation is one letter (a = low … ), each number of an action is one digit, so that an answer has a fixed length.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import string
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo.envs.client import EpisodeError
from gspo.errors import ConfigError
from gspo.system import find_function

# Held-out seeds begin here, so that no training seed is among them.
HELD_OUT = 1_000_000
_TRAIN, _TEST = 4096, 256
_LONGEST_SCHEMA = 2**18  # characters


def seed_rows(prompt: str, split: str, size: int | None, first_held_out: int = HELD_OUT) -> list[dict[str, Any]]:
    """One row per reset seed: 0, 1, … for training, 1,000,000 and up held out. All have the same prompt.

    >>> seed_rows("Reach the goal.", "test", 2)[1]
    {'prompt': 'Reach the goal.', 'seed': 1000001}
    """
    held_out = split != "train"
    first, num = (first_held_out, _TEST) if held_out else (0, _TRAIN)
    return [{"prompt": prompt, "seed": first + i} for i in range(min(size or num, HELD_OUT))]


def schema_problem(schema: Any) -> str:
    """What is wrong with the JSON schema of an object that a server has sent, or nothing. None is an empty schema.

    >>> schema_problem({"type": "object", "properties": {"x": {"type": "string"}}, "required": 5})
    'has `required` that is not a list of names'
    """
    if not isinstance(schema, Mapping | None):
        return f"is {type(schema).__name__}, not an object"
    properties, required = (schema or {}).get("properties"), (schema or {}).get("required")
    given = (properties or {}).values() if isinstance(properties, Mapping | None) else [None]
    if not all(isinstance(schema, Mapping | bool) for schema in given):
        return "has `properties` that are not an object of schemas"
    if not isinstance(required, list | None) or not all(isinstance(name, str) for name in required or ()):
        return "has `required` that is not a list of names"
    try:
        size = len(json.dumps(schema))  # it becomes part of every prompt
    except RecursionError:
        return "is nested too deeply"
    return f"has {size} characters, more than {_LONGEST_SCHEMA}" if size > _LONGEST_SCHEMA else ""


def to_reward(value: Any) -> float:
    """The reward of a step as a number; a client checks that it is finite."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an integer of 400 digits overflows
        raise EpisodeError(f"the reward of a step must be a number, got {type(value).__name__}") from error


class CallTimeoutError(EpisodeError):
    """A call did not return in time."""

    kind = "timeout"


@dataclass(eq=False)
class _Job:
    """A call of an environment, for a thread of its own."""

    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    started: float | None = None
    is_abandoned: bool = False
    has_ended: bool = False


class Threads:
    """A number of daemon threads. A pool of the standard library would wait for a thread that hangs at exit.

    The event loop wakes up once for all calls that have ended meanwhile, not once per call: a step of a small
    simulator takes less time than waking up the loop.
    """

    def __init__(self, num: int) -> None:
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num = num
        self._lock = threading.Lock()  # wait: none, held for a short section
        self._ended: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Any, BaseException | None]]] = {}
        for _ in range(self._num):
            self._start()

    async def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """The result of a call; `name` is for the message. The time that it waits for a thread does not count."""
        loop = asyncio.get_running_loop()
        job = _Job(call, loop.create_future(), loop)

        def check() -> None:
            nonlocal timer
            left = timeout_s if job.started is None else job.started + timeout_s - time.monotonic()
            if left > 0:
                timer = loop.call_later(left, check)
            elif not job.future.done():
                self._abandon(job)
                job.future.set_exception(CallTimeoutError(f"{name} took longer than {timeout_s:g} s"))

        timer = loop.call_later(timeout_s, check)
        self._work.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            if job.started is not None:  # its episode has ended, and the call may never return
                self._abandon(job)
            raise
        finally:
            timer.cancel()

    def _abandon(self, job: _Job) -> None:
        """Give up on a call: a new thread takes the place of the one that it blocks."""
        with self._lock:
            if job.has_ended:
                return
            job.is_abandoned = True
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="gymnasium", daemon=True).start()

    def close(self) -> None:
        for _ in range(self._num):
            self._work.put(None)

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:  # wait: none, close sends an end mark
            if job.future.cancelled():  # its episode has ended before
                continue
            job.started = time.monotonic()
            try:
                self._report(job, job.call(), None)
            except BaseException as error:
                self._report(job, None, error)
            with self._lock:
                job.has_ended = True
                if job.is_abandoned:
                    return  # another thread has taken this one's place

    def _report(self, job: _Job, value: Any, error: BaseException | None) -> None:
        if isinstance(error, StopIteration):  # a future refuses it
            error = RuntimeError(f"StopIteration: {error}")
        with self._lock:
            ended = self._ended.setdefault(job.loop, [])
            ended.append((job, value, error))
            is_first = len(ended) == 1
        # The first result wakes up the loop; the loop then takes all that are there.
        if is_first:
            try:
                job.loop.call_soon_threadsafe(self._deliver, job.loop)
            except RuntimeError:  # the loop is closed: no task waits for the result
                with self._lock:
                    self._ended.pop(job.loop, None)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop, [])
        for job, value, error in ended:
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)


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


def function_of(given: Any, key: str) -> Any:
    """A function that a key of the config names or is; ConfigError if there is none."""
    try:
        found = find_function(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if found is not None and not callable(found):
        raise ConfigError(f"{key}: {found!r} cannot be called")
    return found


def _options(given: Any, key: str, known: set[str]) -> dict[str, Any]:
    options = {} if given is None else dict(given) if isinstance(given, Mapping) else {"of": given}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"{key}.{unknown[0]} is not known; there are {', '.join(sorted(known))}")
    if "of" in options:
        options["of"] = function_of(options["of"], key)
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
