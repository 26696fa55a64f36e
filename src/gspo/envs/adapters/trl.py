"""Environments written for TRL's `environment_factory`, unchanged: `env.path: trl:module:Class`.

TRL's contract: the class has `reset(**columns)` and public methods that are the model's tools, with type hints and a
docstring. `reset` may return a text, which is appended to the last user message. An exception of a tool is a result,
`{"error": …}`. The episode ends at an answer without a call. `get_reward()`, if there is one, scores the episode.
Instances are reset and used again, one per running episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo.envs.adapters.common import CallTimeoutError, Threads, function_of
from gspo.envs.client import Client, EpisodeError, OutOfRoomError, TooManyTurnsError
from gspo.errors import ConfigError
from gspo.system import parse_json

_NO_TOOL = ("reset", "get_reward")
_THREADS = 32  # tools mostly wait: for a network, a process


class TrlEnvironment:
    """`factory` is a callable without arguments, or {name: callable} for rows with a column `environment`.

    `reward_funcs` are TRL reward functions that take `environments`: they run here, beside the environment, with lists
    of length one. `max_tool_calling_iterations` limits the rounds of calls, as in TRL. `timeout`: seconds for each call
    of a method or reward function.
    """

    def __init__(
        self,
        factory: str | Callable[[], Any] | Mapping[str, Any],
        *,
        reward_funcs: Sequence[str | Callable[..., Any]] = (),
        max_tool_calling_iterations: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not timeout > 0:
            raise ConfigError(f"env.options.timeout must be above 0, got {timeout!r}")
        named = factory if isinstance(factory, Mapping) else {None: factory}
        self._by_name = isinstance(factory, Mapping)
        self._factories = {name: function_of(value, "env.path") for name, value in named.items()}
        self._rewards = [function_of(value, "env.options.reward_funcs") for value in reward_funcs]
        self._max_rounds, self._timeout_s = max_tool_calling_iterations, timeout
        self._pool: dict[Any, list[Any]] = {}
        self._tools: dict[Any, dict[str, dict[str, Any]]] = {}  # by factory: schema of each tool
        for name, make in self._factories.items():
            instance = _create(make)
            if not callable(getattr(instance, "reset", None)):
                raise ConfigError(f"env.path: {type(instance).__name__} has no method reset, as TRL environments have")
            self._pool[name] = [instance]
            self._tools[name] = _schemas(type(instance))
        self._threads = Threads(_THREADS)

    def close(self) -> None:
        self._threads.close()

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> dict[str, float] | None:
        columns = {"prompt": client.messages, **data}
        name = columns.pop("environment", None) if self._by_name else None
        if name not in self._factories:
            raise EpisodeError(
                f"the row's environment is {name!r}; env.path has {', '.join(map(str, self._factories))}"
            )
        pool = self._pool[name]
        instance = pool.pop() if pool else await self._run(_create, self._factories[name])
        messages = _with_observation(client.messages, await self._run(instance.reset, **columns))
        first = len(messages)
        await self._play(client, instance, messages, list(self._tools[name].values()))
        score = await self._score(client, instance, messages, first, columns)
        # Only after success: an instance that raised may be half reset.
        pool.append(instance)
        return score

    async def _play(self, client: Client, instance: Any, messages: list[Any], tools: list[Any]) -> None:
        rounds = 0
        while True:
            try:
                answer = await client.chat(messages, tools or None)
            except (OutOfRoomError, TooManyTurnsError):
                # Without any answer the episode fails. Later, a full context or the last turn just ends it.
                if rounds == 0:
                    raise
                return
            messages.append(answer)
            calls = answer.get("tool_calls") or ()
            if not calls or (self._max_rounds is not None and rounds >= self._max_rounds):
                return
            rounds += 1
            messages += [
                {"role": "tool", "name": name, "content": _content(result)}
                for name, result in await self._results(instance, calls)
            ]

    async def _score(
        self, client: Client, instance: Any, messages: list[Any], first: int, columns: Mapping[str, Any]
    ) -> dict[str, float] | None:
        parts: dict[str, float] = {}
        if callable(get_reward := getattr(instance, "get_reward", None)):
            parts[type(instance).__name__] = await self._run(get_reward)
        lists = {name: [value] for name, value in columns.items() if name != "prompt"}
        for function in self._rewards:
            values = await self._run(
                function, prompts=[columns["prompt"]], completions=[messages[first:]], environments=[instance],
                completion_ids=[[int(t) for e in client.exchanges for t in e.sample.tokens]], trainer_state=None,
                log_extra=lambda *_: None, log_metric=lambda *_: None, **lists,
            )  # fmt: skip
            if not isinstance(values, Sequence) or len(values) != 1:
                raise EpisodeError(f"{function.__name__} returned {values!r} for one completion; expected [number]")
            # None: TRL leaves this function out for this sample.
            if values[0] is not None:
                parts[function.__name__] = values[0]
        try:
            total = sum(parts.values())
        except TypeError as error:
            raise EpisodeError(f"a reward must be a number, got {str(parts)[:200]}") from error
        return {"reward": total, **(parts if len(parts) > 1 else {})} if parts else None

    async def _results(self, instance: Any, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
        """(tool, result) of each call of a turn; results of async tools come last, as in TRL."""
        results: list[tuple[str, Any]] = []
        waiting: list[tuple[str, Any]] = []
        for call in calls:
            name = call["function"]["name"]
            try:
                tool = getattr(type(instance), name, None)
                if name.startswith("_") or name in _NO_TOOL or not inspect.isfunction(tool):
                    raise ValueError(f"Tool {name} not found.")
                arguments = parse_json(call["function"]["arguments"])
                if inspect.iscoroutinefunction(tool):
                    waiting.append((name, self._run(tool, instance, **arguments)))
                else:
                    results.append((name, await self._run(tool, instance, **arguments)))
            except CallTimeoutError:
                raise
            except Exception as error:
                results.append((name, {"error": str(error)}))
        for (name, _), result in zip(
            waiting,
            # wait: none, each has env.options.timeout
            await asyncio.gather(*(w for _, w in waiting), return_exceptions=True),
            strict=True,
        ):
            if isinstance(result, CallTimeoutError):
                raise result
            results.append((name, {"error": str(result)} if isinstance(result, Exception) else result))
        return results

    async def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a sync function in a thread, so that it does not block the other episodes; await an async one."""
        what = f"the environment's {getattr(function, '__name__', 'call')}"
        if not inspect.iscoroutinefunction(function):
            return await self._threads.run(lambda: function(*args, **kwargs), what, self._timeout_s)
        try:
            # wait: env.options.timeout, the episode
            return await asyncio.wait_for(function(*args, **kwargs), self._timeout_s)
        except TimeoutError as error:
            raise CallTimeoutError(f"{what} took longer than {self._timeout_s:g} s") from error


def is_trl_class(found: Any) -> bool:
    """Whether a class has TRL's shape: `reset`, and no `__call__` as our environments have."""
    has_call = inspect.isclass(found) and any("__call__" in vars(base) for base in found.__mro__)
    return inspect.isclass(found) and callable(getattr(found, "reset", None)) and not has_call


def _create(factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"env.path: creating the environment failed: {type(error).__name__}: {error}") from error


def _schemas(cls: type) -> dict[str, dict[str, Any]]:
    """The public functions of the class, as JSON schemas; made from type hints and docstrings as TRL does."""
    from transformers.utils.chat_template_utils import get_json_schema

    found: dict[str, dict[str, Any]] = {}
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in _NO_TOOL:
            continue
        try:
            found[name] = get_json_schema(function)
        except Exception as error:
            raise ConfigError(
                f"env.path: {cls.__name__}.{name} cannot be a tool: {error}. A tool needs type hints and a docstring "
                "with an Args section; start the name with _ if it is no tool"
            ) from error
    return found


def _with_observation(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned, appended to the last user message."""
    if observation is None:
        return messages
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
    if last is None:
        return [*messages, {"role": "user", "content": _content(observation)}]
    content = f"{messages[last].get('content') or ''}{_content(observation)}"
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]


def _content(value: Any) -> str:
    """A tool's result or an observation as text: content blocks by their text, anything else by str()."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        if other := sorted({str(part["type"]) for part in value} - {"text"}):
            raise EpisodeError(f"the environment returned {other[0]} content; only text is supported here")
        return "".join(str(part.get("text", "")) for part in value)
    return str(value)
