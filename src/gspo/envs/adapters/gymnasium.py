"""Any Gymnasium environment: `env.path: gymnasium:<id>`. Observations become text, the model's answers become actions.

A group is one reset seed: all G episodes begin in the same state. The reward of a step is the reward of its turn.
Environments are reset and used again; they step in a few threads of their own, off the event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gspo.envs.adapters.codecs import ActionCodec, InvalidActionError, ObservationCodec
from gspo.envs.adapters.seeds import seed_rows
from gspo.envs.client import Client, EpisodeError, OutOfRoomError, TooManyTurnsError
from gspo.errors import ConfigError
from gspo.system.imports import find_function


class StepTimeoutError(EpisodeError):
    """The environment did not return from reset or step in time."""

    kind = "timeout"


class Gymnasium:
    """The environment.

    observation     how the model reads an observation, and action how its answer is read: see codecs.py
    reward          module:function(observation, reward, info) → the reward of a step; default: the environment's own
    success         name in `info` that says whether the episode succeeded: 1 or 0 is then the reward at the end
    max_steps       decisions of an episode; each is held for `hold` steps of the environment
    history         False: each decision sees the last observation only, and is a sequence of its own
    invalid_reward  reward of an answer that is not an action; the model is told, and the episode goes on
    make            arguments of gymnasium.make; modules: packages that register environments, imported before
    prompt          text before the first observation (with history)
    timeout         seconds that reset and step may take
    """

    def __init__(
        self,
        id: str,
        *,
        observation: str | Mapping[str, Any] | None = None,
        action: str | Mapping[str, Any] | None = None,
        reward: str | Callable[..., float] | None = None,
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
    ) -> None:
        if max_steps < 1 or hold < 1 or at_once < 1 or not timeout > 0:
            raise ConfigError("env.options: max_steps, hold and at_once must be at least 1, timeout above 0")
        self._make = _maker(id, dict(make or {}), [modules] if isinstance(modules, str) else modules)
        self._id, self.at_once = id, at_once
        self._max_steps, self._hold, self._history = max_steps, hold, history
        self._success, self._invalid_reward, self._prompt, self._timeout_s = success, invalid_reward, prompt, timeout
        self._reward = _find(reward)
        first = self._make()
        self._pool = [first]
        self._observation = ObservationCodec(observation, first.observation_space)
        self._action = ActionCodec(action, first.action_space)
        self._threads = _Threads()

    def rows(self, split: str, size: int | None) -> list[dict[str, Any]]:
        """One problem per reset seed; held-out seeds are others."""
        return seed_rows(self._prompt.strip() or self._id, split, size)

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> dict[str, float]:
        env = self._pool.pop() if self._pool else await self._run(self._make)
        seed = data.get("seed")
        observation, info = await self._run(env.reset, seed=None if seed is None else int(seed))
        total, num_invalid, steps = 0.0, 0, 0
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
        # Only after success: an environment that raised or hung is not used again.
        self._pool.append(env)
        success = {"success": float(info[self._success])} if self._success in info else {}
        return {
            "reward": success.get("success", 0.0), **success,
            "return": total, "steps": float(steps), "invalid": num_invalid / steps,
        }  # fmt: skip

    def _step(self, env: Any, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """`hold` steps with one action: the last observation, the sum of rewards, whether it ended, the last info."""
        total, over, observation, info = 0.0, False, None, {}
        for _ in range(self._hold):
            observation, reward, terminated, truncated, info = env.step(action)
            total += float(reward if self._reward is None else self._reward(observation, reward, info))
            over = bool(terminated or truncated)
            if over:
                break
        return observation, total, over, info

    def _text(self, observation: Any) -> str:
        try:
            return self._observation.text(observation)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise EpisodeError(f"the observation cannot be written as text: {type(error).__name__}: {error}") from error

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future = self._threads.submit(function, *args, **kwargs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            self._threads.abandon(future)
            name = getattr(function, "__name__", "call")
            raise StepTimeoutError(f"the environment's {name} took longer than {self._timeout_s:g} s") from None

    def close(self) -> None:
        self._threads.close()
        for env in self._pool:
            env.close()


class _Threads:
    """As many daemon threads as cores. A pool of the standard library would wait for a thread that hangs at exit."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._num = max(1, os.cpu_count() or 1)
        self._abandoned: set[Future[Any]] = set()
        for _ in range(self._num):
            self._start()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, lambda: function(*args, **kwargs)))
        return future

    def abandon(self, future: Future[Any]) -> None:
        """Give up on a call: a new thread takes the place of the one that it blocks."""
        self._abandoned.add(future)
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="gymnasium", daemon=True).start()

    def close(self) -> None:
        for _ in range(self._num):
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            if future in self._abandoned:
                self._abandoned.discard(future)
                return  # another thread has taken this one's place


def _maker(id: str, arguments: Mapping[str, Any], modules: Sequence[str]) -> Callable[[], Any]:
    """A function that makes the environment; ConfigError if it cannot be made."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(f"env.path: gymnasium:{id} needs gymnasium: pip install 'gspo[envs]'") from error
    for name in modules:
        try:
            gymnasium.register_envs(importlib.import_module(name))
        except ImportError as error:
            raise ConfigError(f"env.options.modules: {name} cannot be imported: {error}") from error

    def make() -> Any:
        return gymnasium.make(id, **arguments)

    try:
        make().close()
    except (Exception, AssertionError) as error:
        hint = " (Fetch environments need mujoco>=3.3,<3.9)" if isinstance(error, AssertionError) else ""
        raise ConfigError(
            f"env.path: gymnasium.make({id!r}) failed: {type(error).__name__}: {str(error)[:300]}{hint}. "
            "A package that registers environments is named in env.options.modules"
        ) from error
    return make


def _find(function: str | Callable[..., float] | None) -> Callable[..., float] | None:
    try:
        return find_function(function) if isinstance(function, str) else function
    except ValueError as error:
        raise ConfigError(f"env.options.reward: {error}") from error
