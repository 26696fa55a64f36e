"""Environments of verifiers: `env.path: verifiers:<package>`, of its v1 API (0.4) or the classic one (up to 0.3).

The environment brings tasks, tools and rewards; its model calls go to this trainer's endpoint, which records
tokens. All episodes share one address and are told apart by the header X-Session-ID, because verifiers keeps one HTTP
client for each address it has seen. A v1 environment runs the chat loop of `verifiers_harness.py` in this process; a
harness that runs code of the model must be allowed by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from gspo.envs.agents.agent import open_episode
from gspo.envs.agents.endpoint import SHARED, Endpoint
from gspo.envs.client import Client, EpisodeError
from gspo.errors import ConfigError

_KEY_VARIABLE = "GSPO_VERIFIERS_API_KEY"  # verifiers strips names with API_KEY from the processes that it starts
_VERSIONS = "verifiers>=0.3.1,<0.5"
_MOST_TASKS = 4096  # of a taskset that never ends
_HOLD_OUT = 20  # every 20th task is held out
_HARNESS = "gspo_verifiers_harness"
_KINDS = {"SandboxError": "infra", "TunnelError": "infra", "InterceptionError": "infra"}


class VerifiersError(EpisodeError):
    """The environment failed; `kind` says how."""

    def __init__(self, message: str, kind: Any = "crash") -> None:
        super().__init__(message)
        self.kind = kind


class Verifiers:
    """The environment.

    taskset     settings of a v1 taskset; args: arguments of a classic `load_environment`
    max_turns   most answers of the model in an episode (v1)
    harness     the v1 harness; default: a chat loop in this process. One that runs the model's code needs
                allow_code: true, and runs it with this user's rights
    timeout     seconds for an episode
    """

    def __init__(
        self,
        name: str,
        *,
        taskset: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        harness: str | None = None,
        allow_code: bool = False,
        timeout: float = 600.0,
        at_once: int = 64,
    ) -> None:
        self.at_once = at_once
        self._endpoint: Endpoint | None = None
        try:
            verifiers = importlib.import_module("verifiers")
        except ImportError as error:
            raise ConfigError(
                f"env.path: verifiers:{name} needs verifiers: pip install '{_VERSIONS}' into the virtual "
                "environment of gspo (docs/environments.md)"
            ) from error
        if not (installed := metadata.version("verifiers")).startswith(("0.3.", "0.4.")):
            raise ConfigError(
                f"env.path: verifiers:{name} needs verifiers 0.3 or 0.4, found {installed}: pip install '{_VERSIONS}'"
            )
        try:
            if hasattr(verifiers, "load_environment") and not taskset and harness is None:
                self._backend: _Classic | _V1 = _Classic(verifiers, name, dict(args or {}))
            else:
                settings = {"id": name, **dict(taskset or {})}
                self._backend = _V1(settings, max_turns, harness or _HARNESS, allow_code, timeout)
        except ConfigError:
            raise
        except Exception as error:  # whatever the package or the user's environment raises
            raise ConfigError(
                f"env.path: verifiers:{name} cannot be loaded: {type(error).__name__}: {str(error)[:400]}"
            ) from error

    def rows(self, split: str, size: int | None) -> list[dict[str, Any]]:
        """The tasks as rows; every 20th is held out."""
        rows = self._backend.rows()
        held_out = split != "train"
        if len(rows) < 2 * _HOLD_OUT:  # too few: the last one alone is held out
            chosen = rows[-1:] if held_out else rows[:-1] or rows
        else:
            chosen = [row for i, row in enumerate(rows) if (i % _HOLD_OUT == _HOLD_OUT - 1) == held_out]
        return chosen if size is None else chosen[:size]

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> dict[str, float]:
        client.by_content = True  # requests arrive over HTTP, so that their order depends on timing
        errors: list[EpisodeError] = []
        line = open_episode(client, errors)
        self.endpoint.open(line)
        try:
            return await self._backend.play(self.endpoint, line, int(data["idx"]))
        except VerifiersError as error:
            # If a refused request was the reason, report that refusal and its kind.
            raise (errors[-1] if errors else error) from error
        finally:
            self.endpoint.end(line)

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint()
            os.environ[_KEY_VARIABLE] = self._endpoint.key(SHARED)
        return self._endpoint

    def close(self) -> None:
        self._backend.close()
        if self._endpoint is not None:
            self._endpoint.close()


class _V1:
    """verifiers 0.4: tasks, harnesses, traces."""

    def __init__(
        self, taskset: Mapping[str, Any], max_turns: int | None, harness: str, allow_code: bool, timeout_s: float
    ) -> None:
        self._vf: Any = importlib.import_module("verifiers.v1")
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        if harness == _HARNESS:
            # Its name must be that of a top-level module.
            sys.modules[_HARNESS] = importlib.import_module("gspo.envs.adapters.verifiers_harness")
        elif loaders.harness_class(harness).EXECUTES_CODE and not allow_code:
            raise ConfigError(
                f"env.options.harness: {harness} runs code that the model writes, with this user's rights; set "
                "env.options.allow_code: true on a machine whose data may be lost"
            )
        seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        bare = self._vf.resolve_env_config({"taskset": dict(taskset)})
        seats = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(bare)
        if len(seats) != 1:
            raise ConfigError(
                f"env.path: {taskset['id']} has {len(seats)} agents ({', '.join(seats)}); only one can be trained here"
            )
        config = {"taskset": dict(taskset), next(iter(seats)): seat, "timeout": {"episode": timeout_s}}
        self._env = self._vf.load_environment(self._vf.resolve_env_config(config))
        tasks = self._env.taskset
        self._tasks = list(itertools.islice(tasks, _MOST_TASKS) if tasks.INFINITE else tasks)
        if not self._tasks:
            raise ConfigError(f"env.path: {taskset['id']} has no tasks")
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Task[None], asyncio.Event] | None = None

    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": _prompt(task.data), "idx": i} for i, task in enumerate(self._tasks)]

    async def play(self, endpoint: Endpoint, line: Any, idx: int) -> dict[str, float]:
        await self._serve()
        address = self._vf.EvalClientConfig(base_url=endpoint.address(), api_key_var=_KEY_VARIABLE)
        context = self._vf.ModelContext(model=endpoint.model, client=address)
        episode = await self._env.run_episode(
            self._tasks[idx], context, on_trace=lambda trace: endpoint.share(str(trace.id), line)
        )
        # A failed episode has reward 0 and no parts: look at `ok` first.
        if not episode.ok:
            raise _failure(episode)
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        parts = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
        parts |= {name: float(r.score) for trace in traces for name, r in trace.rewards.items() if r is not None}
        return {**parts, "reward": float(sum(trace.reward for trace in traces))}

    async def _serve(self) -> None:
        """Hold `serving()` open in a task of this event loop; the driver may have changed the loop."""
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving[0] is not loop:
            ready = asyncio.Event()
            self._serving = loop, loop.create_task(self._hold(ready)), ready
        _, task, ready = self._serving
        waiting = asyncio.ensure_future(ready.wait())  # wait: none, env.timeout cancels it
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)  # wait: none, env.timeout cancels it
        if not ready.is_set():
            waiting.cancel()
            self._serving = None
            raise VerifiersError(f"its servers did not start: {task.exception()}", "infra")

    async def _hold(self, ready: asyncio.Event) -> None:
        async with self._env.serving():
            ready.set()
            # wait: none, close cancels the task
            await asyncio.Event().wait()  # until the loop ends and cancels this task

    def close(self) -> None:
        if self._serving is not None:
            loop, task, _ = self._serving
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)


class _Classic:
    """verifiers up to 0.3: `load_environment(**args)` returns an Environment."""

    def __init__(self, verifiers: Any, name: str, args: Mapping[str, Any]) -> None:
        self._vf = verifiers
        self._env = verifiers.load_environment(name, **args)
        if getattr(self._env, "requires_group_rollouts", False):
            raise ConfigError(f"env.path: {name} scores whole groups, which is not supported")
        self._rows = self._env.get_dataset().to_list()

    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": row["prompt"], "idx": i} for i, row in enumerate(self._rows)]

    async def play(self, endpoint: Endpoint, line: Any, idx: int) -> dict[str, float]:
        openai: Any = importlib.import_module("openai")
        session = line.name
        endpoint.share(session, line)
        async with openai.AsyncOpenAI(
            base_url=endpoint.address(), api_key=endpoint.key(SHARED), default_headers={"X-Session-ID": session}
        ) as model:
            client = self._vf.OpenAIChatCompletionsClient(model)
            done = await self._env.run_rollout(self._rows[idx], client, endpoint.model, {})
        if done.get("error"):
            raise VerifiersError(f"verifiers: {str(done['error'])[:300]}")
        metrics = {name: float(value) for name, value in (done.get("metrics") or {}).items() if value is not None}
        return {**metrics, "reward": float(done["reward"])}

    def close(self) -> None:
        pass


def _prompt(data: Any) -> Any:
    """The task's prompt as a text, or as messages if it has a system prompt or is a conversation."""
    prompt = data.prompt
    if prompt is not None and not isinstance(prompt, str):
        messages = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in prompt]
    else:
        messages = [{"role": "user", "content": prompt or " "}]
    if data.system_prompt:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return messages[0]["content"] if len(messages) == 1 and isinstance(prompt, str | None) else messages


def _failure(episode: Any) -> VerifiersError:
    errors = [*episode.errors, *(error for trace in episode.traces for error in getattr(trace, "errors", ()))]
    last = errors[-1] if errors else None
    name, message = (last.type, last.message) if last is not None else ("Error", "the episode failed")
    kind = "timeout" if episode.is_timeout else _KINDS.get(name, "crash")
    return VerifiersError(f"verifiers: {name}: {str(message)[:300]}", kind)
