"""Any Gymnasium environment: `env.path: gymnasium:<id>`. Observations become text, the model's answers become actions.

A group is one reset seed: all G episodes begin in the same state. The reward of a step is the reward of its turn.
Environments are reset and used again; they step in a few threads of their own, off the event loop.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.envs.adapters.common import (
    HELD_OUT,
    ActionCodec,
    InvalidActionError,
    ObservationCodec,
    Threads,
    function_of,
    seed_rows,
    to_reward,
)
from gspo.envs.client import Client, EpisodeError, OutOfRoomError, TooManyTurnsError
from gspo.errors import ConfigError
from gspo.system import install_command


class Gymnasium:
    """The environment.

    observation     how the model reads an observation, and action how its answer is read: see codecs.py
    reward          module:function(observation, reward, info) → the reward of a step; default: the environment's own
    potential       module:function(observation) → a number whose change is the reward of a step, instead of `reward`
    success         name in `info` that says whether the episode succeeded: 1 or 0 is then the reward at the end
    max_steps       decisions of an episode; each is held for `hold` steps of the environment
    history         False: each decision sees the last observation only, and is a sequence of its own
    invalid_reward  reward of an answer that is not an action; the model is told, and the episode goes on
    make            arguments of gymnasium.make; modules: packages that register environments, imported before
    prompt          text before the first observation (with history)
    timeout         seconds that reset and step may take
    held_out        the first reset seed of evaluations
    """

    def __init__(
        self,
        id: str,
        *,
        observation: str | Mapping[str, Any] | None = None,
        action: str | Mapping[str, Any] | None = None,
        reward: str | Callable[..., float] | None = None,
        potential: str | Callable[[Any], float] | None = None,
        success: str = "is_success",
        max_steps: int = 100,
        hold: int = 1,
        history: bool = True,
        invalid_reward: float = -1.0,
        make: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        prompt: str = "",
        timeout: float = 30.0,
        at_once: int = 64,
        held_out: int = HELD_OUT,
    ) -> None:
        if held_out < HELD_OUT:
            raise ConfigError(f"env.options.held_out must be at least {HELD_OUT}: smaller seeds are for training")
        if max_steps < 1 or hold < 1 or at_once < 1 or not timeout > 0:
            raise ConfigError("env.options: max_steps, hold and at_once must be at least 1, timeout above 0")
        self._make = _maker(id, dict(make or {}), [modules] if isinstance(modules, str) else modules)
        self._id, self.at_once, self._held_out = id, at_once, held_out
        self._max_steps, self._hold, self._history = max_steps, hold, history
        self._success, self._invalid_reward, self._prompt, self._timeout_s = success, invalid_reward, prompt, timeout
        if reward is not None and potential is not None:
            raise ConfigError("env.options: reward and potential are both set; remove one")
        self._reward = function_of(reward, "env.options.reward")
        self._potential = function_of(potential, "env.options.potential")
        first = self._make()
        self._pool = [first]
        self._observation = ObservationCodec(observation, first.env.observation_space)
        self._action = ActionCodec(action, first.env.action_space)
        self._threads = Threads(max(1, os.cpu_count() or 1))

    def rows(self, split: str, size: int | None) -> list[dict[str, Any]]:
        """One problem per reset seed; held-out seeds are others."""
        return seed_rows(self._prompt.strip() or self._id, split, size, self._held_out)

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> dict[str, float | None]:
        env = self._pool.pop() if self._pool else await self._run(self._make)
        try:
            result = await self._play(env, client, data.get("seed"))
        except BaseException:
            _discard(env)  # it raised or hangs: it is not used again
            raise
        self._pool.append(env)
        return result

    async def _play(self, env: _Instance, client: Client, seed: Any) -> dict[str, float | None]:
        observation, info = await self._run(env.reset, None if seed is None else int(seed))
        total, num_invalid, steps = 0.0, 0, 0
        before = 0.0 if self._potential is None else to_reward(self._potential(observation))
        messages = [{"role": "user", "content": (self._prompt if self._history else "") + self._text(observation)}]
        for steps in range(1, self._max_steps + 1):
            try:
                answer = await client.chat(messages, **self._action.limits)
            except (OutOfRoomError, TooManyTurnsError):
                # Without any answer the episode fails. Later, a full context or the last turn just ends it.
                if steps == 1:
                    raise
                break
            is_over = False
            try:
                action = self._action.read(str(answer.get("content") or ""))
                observation, reward, is_over, info = await self._run(self._step, env, action)
                if self._potential is not None:
                    after = to_reward(self._potential(observation))
                    reward, before = after - before, after
                text = self._text(observation)
            except InvalidActionError as error:
                reward, num_invalid = self._invalid_reward, num_invalid + 1
                # Without history the model could not read the message: it sees the same observation again.
                text = f"error: {error}\n" if self._history else messages[-1]["content"]
            client.reward(reward)
            total += reward
            if is_over:
                break
            user = {"role": "user", "content": text}
            messages = [*messages, answer, user] if self._history else [user]
        success = {"success": float(info[self._success])} if self._success in info else {}
        return {
            # Without a success, the episode's score is its return: the sum of its turns' rewards.
            "reward": success.get("success"), **success,
            "return": total, "steps": float(steps), "invalid": num_invalid / steps,
        }  # fmt: skip

    def _step(self, instance: _Instance, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """`hold` steps with one action: the last observation, the sum of rewards, whether it ended, the last info."""
        total, over, observation, info = 0.0, False, None, {}
        for _ in range(self._hold):
            with instance.lock:
                returned = instance.env.step(action)
            if not isinstance(returned, tuple) or len(returned) != 5:
                what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
                raise EpisodeError(
                    f"step returned {what}, not (observation, reward, terminated, truncated, info): an environment of "
                    "the old gym package needs a wrapper"
                )
            observation, reward, terminated, truncated, info = returned
            total += to_reward(reward if self._reward is None else self._reward(observation, reward, info))
            over = bool(terminated or truncated)
            if over:
                break
        return observation, total, over, info

    def _text(self, observation: Any) -> str:
        try:
            return self._observation.text(observation)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise EpisodeError(f"the observation cannot be written as text: {type(error).__name__}: {error}") from error

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        what = f"the environment's {function.__name__.strip('_')}"
        return await self._threads.run(lambda: function(*args), what, self._timeout_s)

    def close(self) -> None:
        self._threads.close()
        for instance in self._pool:
            instance.env.close()


@dataclass(eq=False)
class _Instance:
    """An environment, and a lock: it must not be closed while a thread steps it."""

    env: Any
    # wait: none, held for one step, which env.options.timeout ends
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        with self.lock:
            return self.env.reset(seed=seed)


def _discard(instance: _Instance) -> None:
    """Close an environment, as soon as the call in which it hangs returns, in a thread of its own."""

    def close() -> None:
        with instance.lock, contextlib.suppress(Exception):
            instance.env.close()

    threading.Thread(target=close, name="gymnasium close", daemon=True).start()


def _maker(id: str, arguments: Mapping[str, Any], modules: Sequence[str]) -> Callable[[], _Instance]:
    """A function that makes the environment; ConfigError if it cannot be made."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(f"env.path: gymnasium:{id} needs gymnasium: {install_command('envs')}") from error
    if (version := str(gymnasium.__version__)).split(".")[0] != "1":
        raise ConfigError(f"env.path: gymnasium:{id} needs gymnasium 1.x, found {version}: {install_command('envs')}")
    for name in modules:
        try:
            gymnasium.register_envs(importlib.import_module(name))
        except ImportError as error:
            raise ConfigError(f"env.options.modules: {name} cannot be imported: {error}") from error

    def make() -> _Instance:
        return _Instance(gymnasium.make(id, **arguments))

    try:
        make().env.close()
    except (Exception, AssertionError) as error:
        hint = " (Fetch environments need mujoco>=3.3,<3.9)" if isinstance(error, AssertionError) else ""
        raise ConfigError(
            f"env.path: gymnasium.make({id!r}) failed: {type(error).__name__}: {str(error)[:300]}{hint}. "
            "A package that registers environments is named in env.options.modules"
        ) from error
    return make
