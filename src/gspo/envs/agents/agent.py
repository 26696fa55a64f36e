"""Agents as environments: a program that speaks to an OpenAI-compatible address is trained as it is.

    def agent(base_url, api_key, data):                      # sync: in a thread of its own; or async
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward                                        # or None: the configured reward reads the last answer

or a command line, started for every episode with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment
and the row as JSON on its standard input; the last line that it prints may be the reward. Either may also POST its
reward to /e/EPISODE/reward. `Agents` makes an environment of it for the episode driver. Torch-free; docs/agents.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo.envs.agents.endpoint import Endpoint, Line
from gspo.envs.agents.openai_api import Answer, ApiError, Ask, only_finite
from gspo.envs.client import Client, EpisodeError, EpisodeOverError, OutOfRoomError, TooManyTurnsError
from gspo.envs.episode import Exchange
from gspo.errors import ConfigError
from gspo.rewards.call import find_function

Agent = Callable[..., Any]  # (base_url, api_key, data) → reward, {"reward": …, parts…} or None; sync or async

_KEEPER = Path(__file__).with_name("reaper.py")
_KEPT_OUT, _KEPT_ERR = 64 * 2**10, 4 * 2**10  # bytes of a command's output, from its end
# Threads of episodes that were given up. A thread cannot be killed: where so many hang, no more are started.
MAX_ABANDONED = 64


class AgentError(EpisodeError):
    """The agent ended badly; its sample fails, and nothing else."""


class Agents:
    """The environment `async (client, data)` that runs one agent per episode against one endpoint.

    agent   a function (see the module), or a command line as a list of words
    model   the name under which the policy is served
    """

    def __init__(
        self, agent: Agent | Sequence[str], *, model: str = "policy", request_timeout_s: float = 3600.0
    ) -> None:
        self._agent: Agent | list[str] = agent if callable(agent) else [str(word) for word in agent]
        self.at_once = 256 if callable(agent) else 32  # episodes, where rollout.max_concurrent_rollouts is unset
        self._model, self._request_timeout_s = model, request_timeout_s
        self._endpoint: Endpoint | None = None
        self._abandoned: set[threading.Thread] = set()
        self.counts: Counter[str] = Counter()  # what all episodes' calls came to, since the last `take_counts`
        self._lock = threading.Lock()

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> Any:
        client.by_content = True  # an agent's calls come when they come
        trouble: list[EpisodeError] = []
        line = Line(_name(client), lambda ask: _answered(client, ask, trouble), asyncio.get_running_loop())
        row = {**data, "messages": client.messages}
        base_url, api_key = self.endpoint.open(line)
        try:
            said = await self._run(base_url, api_key, row)
        except Exception as error:
            if trouble and not isinstance(error, EpisodeError):
                # It gave up because of what it was told: that is what became of the episode.
                raise type(trouble[-1])(f"{trouble[-1]} (the agent then raised {type(error).__name__})") from error
            raise
        finally:
            self.endpoint.end(line)
            with self._lock:
                self.counts += line.counts
        return line.reward if said is None else said

    @property
    def endpoint(self) -> Endpoint:
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(model=self._model, request_timeout_s=self._request_timeout_s)
            return self._endpoint

    def take_counts(self) -> Counter[str]:
        """What calls came to since the last time: `calls`, `settings_replaced`, and refusals by their code."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
            return counts

    def metrics(self) -> dict[str, float]:
        """The same by names as in docs/metrics.md."""
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
                    f"{MAX_ABANDONED} agents of earlier episodes never ended, and a thread cannot be ended from "
                    "outside; give the agent's requests a timeout, or run it as env.command"
                )
            return await _in_thread(self._agent, (base_url, api_key, row), self._abandoned)
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": self._model}
        leash = _Leash()
        try:
            return await _in_thread(_run_command, (self._agent, row, variables, leash), self._abandoned)
        finally:
            leash.let_go()


def find_agent(name: str, options: Mapping[str, Any] | None = None) -> Agent:
    """`module:function` or `file.py:function`, with `options` as keyword arguments; ConfigError where it cannot be."""
    try:
        found = find_function(name)
        inspect.signature(found).bind("", "", {}, **(options or {}))
    except ValueError as error:
        raise ConfigError(f"env.agent: {error}") from error
    except TypeError as error:
        raise ConfigError(f"env.agent: {name} must take (base_url, api_key, data) and env.options: {error}") from error
    return partial(found, **options) if options else found


async def _answered(client: Client, ask: Ask, trouble: list[EpisodeError]) -> Answer:
    """One request of the agent, by way of the episode's client."""
    sampling: dict[str, Any] = {}
    if ask.max_tokens is not None:
        sampling["max_new_tokens"] = ask.max_tokens
    if ask.stop:
        sampling["stop"] = (*client.params.stop, *ask.stop)
    try:
        if ask.messages:
            found = await client.answer(ask.messages, ask.tools or None, **sampling)
            exchange, message = found.exchange, found.message
        else:
            tokens = ask.prompt if isinstance(ask.prompt, tuple) else _tokens_of(client, ask.prompt)
            exchange = Exchange(tokens, await client.complete(tokens, **sampling))
            message: dict[str, Any] = {"content": client.decode(exchange.sample.tokens.tolist())}
    except EpisodeError as error:
        trouble.append(error)
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
        pieces=tuple(client.decode([token]) for token in tokens) if ask.logprobs else (),
        prompt=exchange.prompt,
    )


def _tokens_of(client: Client, text: str) -> tuple[int, ...]:
    return client.prompt.tokens if text == client.prompt.text else client.encode(text, begins=True)


def _refusal(error: EpisodeError) -> ApiError:
    """What an episode's refusal is in HTTP: only what may be asked otherwise is 400."""
    if isinstance(error, OutOfRoomError):
        return ApiError(400, "context_length_exceeded", str(error), "messages")
    if isinstance(error, TooManyTurnsError):
        return ApiError(410, "too_many_turns", str(error))
    if isinstance(error, EpisodeOverError):
        return ApiError(410, "episode_ended", str(error))
    return ApiError(400, "refused", str(error), "messages")


def _name(client: Client) -> str:
    """The episode in an address: the same in every run, and no secret."""
    id = client.id
    return f"{id.submission}-{id.sample}" + (f"-{id.attempt}" if id.attempt else "")


# A function, in a thread


async def _in_thread(agent: Agent, args: tuple[Any, ...], abandoned: set[threading.Thread]) -> Any:
    """What the agent returns or raises. Given up, an async agent is cancelled; a sync one ends when its calls fail."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    inner: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def awaited(value: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        inner.append((asyncio.get_running_loop(), task))
        return await value

    def run() -> None:
        try:
            said = agent(*args)
            if inspect.isawaitable(said):
                said = asyncio.run(awaited(said))
            tell(done.set_result, said)
        except asyncio.CancelledError:
            pass  # its end was said by whoever gave it up
        except BaseException as error:  # SystemExit of an agent is its own end alone
            shown = error if isinstance(error, Exception) else AgentError(f"the agent raised {type(error).__name__}")
            tell(done.set_exception, shown)

    def tell(how: Callable[[Any], None], what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: None if done.done() else how(what))

    # A daemon: an agent that never ends does not keep the trainer from ending.
    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        abandoned.add(thread)
        for own, task in inner:
            with contextlib.suppress(RuntimeError):
                own.call_soon_threadsafe(task.cancel)
        raise


# A command, in processes of its own


class _Leash:
    """A pipe whose writing end keeps a command alive: closed, by whoever or by our death, it is killed."""

    def __init__(self) -> None:
        self.end, self._held = os.pipe()
        self._lock = threading.Lock()

    def let_go(self) -> None:
        with self._lock:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1


def _run_command(command: Sequence[str], row: Mapping[str, Any], variables: Mapping[str, str], leash: _Leash) -> Any:
    """What the command's last line says. Blocks until it has ended, or the leash was let go and all of it is killed."""
    # The trainer's own secrets are none of an agent's business.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    try:
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(row, default=str).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_KEEPER), str(leash.end), *command],
                    stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(leash.end,),
                    env={**inherited, **variables},
                )  # fmt: skip
            finally:
                os.close(leash.end)
        with process:
            out, err = _tails(process)
            code = process.wait()
    finally:
        leash.let_go()
    if code:
        why = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        raise AgentError(f"{command[0]} {why}: {err.strip()[-400:] or 'it said nothing'}")
    return read_reward(out)


def _tails(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """All output is read and its end kept: a command that prints without end is not held up, and fills no memory."""
    limits, kept = {process.stdout: _KEPT_OUT, process.stderr: _KEPT_ERR}, {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as ready:
        for stream in limits:
            assert stream is not None
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                stream: Any = key.fileobj
                if not (part := os.read(stream.fileno(), 2**16)):
                    ready.unregister(stream)
                kept[stream] = (kept[stream] + part)[-limits[stream] :]
    out, err = (kept[stream].decode("utf-8", "replace") for stream in limits)
    return out, err


def read_reward(printed: str) -> Any:
    """The reward in the last line that is not empty: a number, or an object with a `reward`; else None.

    >>> read_reward("thinking…\\n0.5\\n"), read_reward('{"reward": 1, "format": 0.2}'), read_reward("done")
    (0.5, {'reward': 1, 'format': 0.2}, None)
    """
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(last)
        if isinstance(value, dict) and "reward" in value:
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None
