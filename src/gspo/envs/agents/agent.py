"""Agents as environments: a program that calls an OpenAI-compatible API is trained without changes.

    def agent(base_url, api_key, data):                      # sync: runs in a thread of its own; or async
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward                                        # or None: the configured reward scores the last answer

or a command line, started for every episode with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment
and the row as JSON on stdin; the last line of its output may be the reward. Both may also POST the reward to
/e/EPISODE/reward. `Agents` makes an environment of it for the episode driver. Torch-free; see docs/agents.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gspo.envs.agents.command import AgentError, Lifeline, run_command
from gspo.envs.agents.endpoint import Endpoint, OpenEpisode
from gspo.envs.agents.openai_api import Answer, ApiError, ApiRequest, only_finite
from gspo.envs.client import Client, EpisodeError, EpisodeOverError, OutOfRoomError, TooManyTurnsError
from gspo.envs.episode import Exchange
from gspo.errors import ConfigError
from gspo.system import find_function, user_lines

Agent = Callable[..., Any]  # (base_url, api_key, data) → reward, {"reward": …, parts…} or None; sync or async

# Threads of cancelled episodes that still run. A thread cannot be killed: beyond this number no agent is started.
MAX_ABANDONED = 64


class Agents:
    """The environment `async (client, data)` that runs one agent per episode against one endpoint.

    agent   a function (see the module's docstring), or a command line as a list of words
    model   the name under which the policy is served
    """

    def __init__(
        self, agent: Agent | Sequence[str], *, model: str = "policy", request_timeout_s: float = 3600.0
    ) -> None:
        self._agent: Agent | list[str] = agent if callable(agent) else [str(word) for word in agent]
        # A process costs more than a thread, so fewer run at a time.
        self.at_once = 256 if callable(agent) else 32  # episodes at a time if rollout.max_concurrent_rollouts is unset
        self._model, self._request_timeout_s = model, request_timeout_s
        self._endpoint: Endpoint | None = None
        self._abandoned: set[threading.Thread] = set()
        self.counts: Counter[str] = Counter()  # results of API calls since the last `take_counts`
        self._lock = threading.Lock()  # wait: none, held for the start of the endpoint at most

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> Any:
        client.by_content = True  # the order of an agent's calls depends on timing
        errors: list[EpisodeError] = []
        # API requests arrive in the server's thread; they are answered in the event loop of this episode.
        line = open_episode(client, errors)
        row = {**data, "messages": client.messages}
        base_url, api_key = self.endpoint.open(line)
        try:
            result = await self._run(base_url, api_key, row)
        except Exception as error:
            if errors and not isinstance(error, EpisodeError):
                # The agent failed because a request was refused: report that refusal as the reason.
                then = f"(the agent then raised {type(error).__name__}){user_lines(error)}"
                raise type(errors[-1])(f"{errors[-1]} {then}") from error
            raise
        finally:
            # Later calls of the agent get status 410.
            self.endpoint.end(line)
            with self._lock:
                self.counts += line.counts
        # The agent's own result counts before a reward that was posted.
        return line.reward if result is None else result

    @property
    def endpoint(self) -> Endpoint:
        # Created on first use, and once: episodes run in parallel.
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(model=self._model, request_timeout_s=self._request_timeout_s)
            return self._endpoint

    def take_counts(self) -> Counter[str]:
        """Counts since the last call: `calls`, `settings_replaced`, and refused requests by error code."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
            return counts

    def metrics(self) -> dict[str, float]:
        """The same counts under the names of docs/metrics.md."""
        counts = self.take_counts()
        named = {f"agent/{name}": counts.pop(name, 0) for name in ("calls", "settings_replaced")}
        return {**named, **{f"agent/refused_{code}": count for code, count in sorted(counts.items())}}

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        if callable(self._agent):
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
            if len(self._abandoned) >= MAX_ABANDONED:
                raise AgentError(
                    f"{MAX_ABANDONED} agents of cancelled episodes are still running, and a thread cannot be killed; "
                    "set a timeout for the agent's requests, or run it as a process (a command line in env.agent)"
                )
            return await _in_thread(self._agent, (base_url, api_key, row), self._abandoned)
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": self._model}
        # Anthropic's clients add /v1 themselves.
        variables |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        lifeline = Lifeline()
        try:
            return await _in_thread(run_command, (self._agent, row, variables, lifeline), self._abandoned)
        # Closing the pipe kills the command, also if this episode was cancelled.
        finally:
            lifeline.close()


def find_agent(name: str, options: Mapping[str, Any] | None = None) -> Agent:
    """Import `module:function` or `file.py:function` and bind `options` as keyword arguments; raises ConfigError."""
    try:
        found = find_function(name)
        # Check the arguments now, not in the first episode.
        inspect.signature(found).bind("", "", {}, **(options or {}))
    except ValueError as error:
        raise ConfigError(f"env.agent: {error}") from error
    except TypeError as error:
        raise ConfigError(f"env.agent: {name} must take (base_url, api_key, data) and env.options: {error}") from error
    return partial(found, **options) if options else found


def open_episode(client: Client, errors: list[EpisodeError]) -> OpenEpisode:
    """The episode as the endpoint serves it, in the running event loop; `errors` collects the refused requests."""
    return OpenEpisode(
        _name(client),
        lambda request: _answered(client, request, errors),
        asyncio.get_running_loop(),
        lambda request: _counted(client, request),
    )


def _counted(client: Client, request: ApiRequest) -> int:
    try:
        return client.count_tokens(request.messages, request.tools or None)
    except EpisodeError as error:
        raise _refusal(error) from error


async def _answered(client: Client, request: ApiRequest, errors: list[EpisodeError]) -> Answer:
    """Answer one API request of the agent with the episode's client."""
    sampling: dict[str, Any] = {}
    if request.max_tokens is not None:
        sampling["max_new_tokens"] = request.max_tokens
    if request.stop:
        # The run's stop strings still apply: the agent can only add some.
        sampling["stop"] = (*client.params.stop, *request.stop)
    try:
        if request.messages:
            found = await client.answer(request.messages, request.tools or None, **sampling)
            exchange, message = found.exchange, found.message
        else:
            tokens = request.prompt if isinstance(request.prompt, tuple) else _tokens_of(client, request.prompt)
            exchange = Exchange(tokens, await client.complete(tokens, **sampling))
            message: dict[str, Any] = {"content": client.decode(exchange.sample.tokens.tolist())}
    # Remembered: if the agent fails because of this refusal, the episode reports it as the reason.
    except EpisodeError as error:
        errors.append(error)
        raise _refusal(error) from error
    sample = exchange.sample
    tokens = tuple(sample.tokens.tolist())
    calls: list[dict[str, str]] = [call["function"] for call in message.get("tool_calls", ())]
    return Answer(
        text=message["content"],
        tool_calls=tuple((call["name"], call["arguments"]) for call in calls),
        finish="length" if sample.finish == "length" else "stop",
        num_prompt=len(exchange.prompt),
        tokens=tokens,
        logp=only_finite(sample.behavior_logp.tolist()),
        # Decoding each token takes time; only requests for log-probs need it.
        pieces=tuple(client.decode([token]) for token in tokens) if request.logprobs else (),
        prompt=exchange.prompt,
    )


def _tokens_of(client: Client, text: str) -> tuple[int, ...]:
    # The data set has tokenised the unchanged prompt already.
    return client.prompt.tokens if text == client.prompt.text else client.encode(text, begins=True)


def _refusal(error: EpisodeError) -> ApiError:
    """The HTTP error for a refused request: 400 if another request could succeed, 410 if none can."""
    if isinstance(error, OutOfRoomError):
        return ApiError(400, "context_length_exceeded", str(error), "messages")
    if isinstance(error, TooManyTurnsError):
        return ApiError(410, "too_many_turns", str(error))
    if isinstance(error, EpisodeOverError):
        return ApiError(410, "episode_ended", str(error))
    return ApiError(400, "refused", str(error), "messages")


def _name(client: Client) -> str:
    """Name of the episode in a URL: the same in every run, not a secret."""
    id = client.id
    return f"{id.submission}-{id.sample}" + (f"-{id.attempt}" if id.attempt else "")


async def _in_thread(agent: Agent, args: tuple[Any, ...], abandoned: set[threading.Thread]) -> Any:
    """Run an agent in a thread; returns its result or raises its exception.

    On cancellation an async agent is cancelled; a sync one ends when its API calls fail.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    # loop and task of an async agent, to cancel it
    inner: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def awaited(value: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        inner.append((asyncio.get_running_loop(), task))
        return await value

    def run() -> None:
        try:
            result = agent(*args)
            if inspect.isawaitable(result):
                # In an event loop of its own: an agent that blocks does not stop other episodes.
                result = asyncio.run(awaited(result))  # wait: none, env.timeout cancels the agent
            resolve(done.set_result, result)
        except asyncio.CancelledError:
            pass  # the caller has cancelled it and does not wait
        except BaseException as error:  # SystemExit of an agent ends only this agent
            shown = error if isinstance(error, Exception) else AgentError(f"the agent raised {type(error).__name__}")
            resolve(done.set_exception, shown)

    def resolve(set_future: Callable[[Any], None], value: Any) -> None:
        # Called from the agent's thread: futures of the loop may be set only in the loop's thread.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else set_future(value))

    # A daemon thread: an agent that never ends does not block the end of the trainer.
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        # A thread cannot be killed: count it until it ends.
        abandoned.add(thread)
        # An async agent can be cancelled, in its own loop.
        for own, task in inner:
            with contextlib.suppress(RuntimeError):
                own.call_soon_threadsafe(task.cancel)
        raise
