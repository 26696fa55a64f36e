"""OpenEnv servers: `env.path: openenv:http://127.0.0.1:8000`, or `openenv:<folder or package>`, which is started here.

One websocket is one session and one episode, closed whatever happens. This file speaks the protocol itself: the package
`openenv` and other environment packages need different releases of `mcp`. The HTTP routes /reset and /step are not
used: each call there makes a fresh environment.

The observation becomes the user's message, the model's answer becomes the action, and each step's reward is the reward
of its turn. Environments that offer tools (MCPEnvironment) get the model's tool calls as actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.envs.adapters.common import schema_problem, seed_rows, to_reward
from gspo.envs.client import Client, EpisodeError, OutOfRoomError, TooManyTurnsError
from gspo.errors import ConfigError
from gspo.system import HttpClient, Limits, describe_exit, dying_with_parent, install_command, parse_json, stop_group

_LONGEST = 2**20  # bytes of one message of the server
_LIMITS = Limits(bytes=4 * _LONGEST, values=200_000)
_TOOL_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}  # titles of the action schemas of tool environments


class OpenEnvError(EpisodeError):
    """The server ended, refused a session, did not answer in time, or broke the protocol."""

    kind = "infra"


class OpenEnv:
    """The environment.

    prompt         the instructions before the first observation; default: the server's own description
    observation    the field of the observation that the model reads; default: all fields as JSON
    action         the field of the action that the model's answer fills; default: the only required field, else JSON
    max_steps      actions of an episode
    timeout        seconds that the server may take for a step, and to open a session
    sessions       most episodes at a time; the server's `max_concurrent_envs` must be at least as high
    python         the interpreter that starts a folder or package; default: this one
    start_timeout  seconds until a started server must answer
    """

    def __init__(
        self,
        what: str,
        *,
        prompt: str | None = None,
        observation: str | None = None,
        action: str | None = None,
        max_steps: int = 16,
        timeout: float = 30.0,
        sessions: int = 64,
        python: str | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        try:
            import websockets  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"env.path: openenv needs websockets: {install_command('envs')}") from error
        if max_steps < 1 or sessions < 1 or not timeout > 0:
            raise ConfigError("env.options: max_steps and sessions must be at least 1, timeout above 0")
        self.at_once = sessions
        self._max_steps, self._timeout_s = max_steps, timeout
        self._server: _Server | None = None
        # wait: none, held for the start of a server, env.options.start_timeout
        self._lock = threading.Lock()  # of a restart
        if not what.startswith(("http://", "https://")):
            self._server = _Server(what, python or sys.executable, start_timeout)
            what = self._server.url
        self._url = what.rstrip("/")
        try:
            schema = self._get("schema")
            described = self._get("metadata").get("description") if prompt is None else prompt
            self._prompt = described if isinstance(described, str) else ""
            action_schema, observed = self._checked(schema, "action"), self._checked(schema, "observation")
        except BaseException:
            self.close()
            raise
        self._has_tools = str(action_schema.get("title")) in _TOOL_ACTIONS
        self._fields = {n: s for n, s in (action_schema.get("properties") or {}).items() if n != "metadata"}
        self._observation = _known(observation, observed.get("properties") or {}, "env.options.observation")
        required = [name for name in action_schema.get("required") or list(self._fields) if name in self._fields]
        only = required[0] if len(required) == 1 else None
        self._action = only if action is None else _known(action, self._fields, "env.options.action")

    def rows(self, split: str, size: int | None) -> list[dict[str, Any]]:
        """One problem per reset seed; held-out seeds are others."""
        return seed_rows(self._prompt.strip() or "OpenEnv", split, size)

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> Any:
        if self._server is not None and self._server.has_ended:
            await asyncio.to_thread(self._restart)
        session = _Session(self._url, self._timeout_s)
        try:
            await session.open()
            seed = {"seed": data["seed"]} if "seed" in data else {}
            first = await session.ask("reset", {**seed, "episode_id": "-".join(map(str, client.id))})
            if self._has_tools:
                return await self._play_tools(client, session, first)
            return await self._play(client, session, first)
        finally:
            await session.close()

    def _restart(self) -> None:
        """Start a server again that died: it costs the episodes that it was playing, and no others."""
        with self._lock:
            if self._server is not None and self._server.has_ended:
                try:
                    self._server.start()
                except ConfigError as error:
                    raise OpenEnvError(str(error)) from error

    async def _play(self, client: Client, session: _Session, reply: Mapping[str, Any]) -> float:
        messages = [m for m in client.messages if str(m.get("content") or "").strip()]
        messages = _add_user(messages, self._read(reply))
        for step in range(self._max_steps):
            if reply.get("done"):
                break
            try:
                answer = await client.chat(messages)
            except (OutOfRoomError, TooManyTurnsError):
                # Without any answer the episode fails. Later, a full context or the last turn just ends it.
                if step == 0:
                    raise
                break
            action, why = self._parse(str(answer.get("content") or ""))
            if action is not None:
                try:
                    reply = await session.ask("step", action)
                    client.reward(_reward(reply))
                except _InvalidActionError as error:
                    action, why = None, str(error)
            # An answer that is not an action is the model's mistake: it reads why, and the episode goes on.
            text = self._read(reply) if action is not None else f"error: {why}"
            messages = [*messages, answer, {"role": "user", "content": text}]
        return 0.0  # the reward is the sum of the turns' rewards

    async def _play_tools(self, client: Client, session: _Session, reply: Mapping[str, Any]) -> float:
        listed = await session.ask("step", {"type": "list_tools"})
        tools = _tools_of(listed)
        messages = _add_user(client.messages, self._read(reply) if _content(reply) else "")
        for step in range(self._max_steps):
            try:
                answer = await client.chat(messages, tools)
            except (OutOfRoomError, TooManyTurnsError):
                if step == 0:
                    raise
                break
            messages = [*messages, answer]
            calls = answer.get("tool_calls") or ()
            for call in calls:
                function = call["function"]
                action = {"type": "call_tool", "tool_name": function["name"],
                          "arguments": parse_json(function["arguments"])}  # fmt: skip
                try:
                    reply = await session.ask("step", action)
                    client.reward(_reward(reply))
                    text = _tool_text(_content(reply))
                except _InvalidActionError as error:
                    text = f"error: {error}"
                messages.append({"role": "tool", "name": function["name"], "content": text})
            if not calls or reply.get("done"):
                break
        return 0.0

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _get(self, route: str) -> dict[str, Any]:
        try:
            with HttpClient(max_reply=_LONGEST) as http:
                reply = http.call("GET", f"{self._url}/{route}", timeout_s=self._timeout_s)
            found = parse_json(reply.content, _LIMITS) if reply.status == 200 else f"status {reply.status}"
            if not isinstance(found, dict):
                raise ValueError(f"expected a JSON object, got {str(found)[:100]!r}")
        except (OSError, ValueError) as error:
            what = str(error) or f"no answer within {self._timeout_s:g} s"
            raise ConfigError(
                f"env.path: {self._url}/{route} did not answer as an OpenEnv server does: {what}"
            ) from error
        return found

    def _checked(self, schema: Mapping[str, Any], part: str) -> Mapping[str, Any]:
        problem = "is missing" if schema.get(part) is None else schema_problem(schema[part])
        if problem:
            raise ConfigError(f"env.path: {self._url}/schema is not that of an OpenEnv server: its {part} {problem}")
        return schema[part]

    def _read(self, reply: Mapping[str, Any]) -> str:
        """The observation as the model reads it."""
        content = _content(reply)
        if self._observation is not None:
            value = content.get(self._observation)
            return value if isinstance(value, str) else json.dumps(value)
        return json.dumps(content)

    def _parse(self, text: str) -> tuple[dict[str, Any] | None, str]:
        """(action, "") for an answer of the model, or (None, what is wrong)."""
        text = text.strip()
        if self._action is not None:
            value, field = text, self._fields[self._action]
            kind = field.get("type") if isinstance(field, dict) else None
            if kind in ("integer", "number"):
                try:
                    value = int(text) if kind == "integer" else float(text)
                except ValueError:
                    return None, f"the answer must be one {kind}"
            return {self._action: value}, ""
        start, end = text.find("{"), text.rfind("}")
        with contextlib.suppress(ValueError):
            if isinstance(found := parse_json(text[start : end + 1], _LIMITS), dict):
                return found, ""
        return None, f"the answer must be a JSON object with {', '.join(self._fields)}"


class _InvalidActionError(Exception):
    """The server did not accept the action's fields."""


class _Session:
    """One websocket: one environment on the server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.replace("http", "ws", 1) + "/ws"
        self._timeout_s = timeout_s
        self._socket: Any = None

    async def open(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            self._socket = await connect(
                self._url, open_timeout=self._timeout_s, close_timeout=2, max_size=_LONGEST, proxy=None
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise OpenEnvError(f"{self._url} refused a session: {type(error).__name__}: {error}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
                reply = parse_json(await self._socket.recv(), _LIMITS)  # wait: none, asyncio.timeout around it
                content = reply["data"]
                if not isinstance(content, dict):
                    raise TypeError(f"data is {type(content).__name__}, not an object")
                message = str(content.get("message"))[:300]
        except TimeoutError:
            raise OpenEnvError(f"the server did not answer {kind} within {self._timeout_s:g} s") from None
        except (WebSocketException, ValueError, KeyError, TypeError) as error:
            raise OpenEnvError(f"{kind}: {type(error).__name__}: {str(error)[:200]}") from error
        if reply.get("type") != "error":
            return content
        code = content.get("code")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise _InvalidActionError(message)
        remedy = ": set env.options.sessions lower, or the server's max_concurrent_envs higher"
        raise OpenEnvError(f"{kind}: {code}: {message}{remedy if code == 'CAPACITY_REACHED' else ''}")

    async def close(self) -> None:
        """Give the session back; in any case, also if the episode was cancelled."""
        if self._socket is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._socket.close(), 3)  # wait: 3 s, the episode


class _Server:
    """A server that this process started from a folder or package with `server/app.py`."""

    def __init__(self, what: str, python: str, start_timeout_s: float) -> None:
        folder = Path(what)
        app = "server.app:app" if folder.is_dir() else f"{what}.server.app:app"
        if folder.is_dir() and not (folder / "server" / "app.py").is_file():
            raise ConfigError(f"env.path: {folder} has no server/app.py, so it is not the folder of an OpenEnv server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._what, self._folder, self._timeout_s = what, folder if folder.is_dir() else None, start_timeout_s
        self._command = [
            python,
            "-m",
            "uvicorn",
            app,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "warning",
        ]
        self.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def start(self) -> None:
        self._process = subprocess.Popen(
            dying_with_parent(self._command), stdin=subprocess.DEVNULL, start_new_session=True, cwd=self._folder
        )
        deadline = time.monotonic() + self._timeout_s
        with HttpClient(max_reply=_LONGEST) as http:
            self._wait_until_healthy(http, deadline)

    def _wait_until_healthy(self, http: HttpClient, deadline: float) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                if http.call("GET", f"{self.url}/health", timeout_s=2).status == 200:
                    return
            if (code := self._process.poll()) is not None:
                raise ConfigError(
                    f"env.path: the OpenEnv server {self._what} {describe_exit(code)}; its output is above"
                )
            if time.monotonic() > deadline:
                self.close()
                raise ConfigError(
                    f"env.path: the OpenEnv server {self._what} did not answer within {self._timeout_s:g} s "
                    "(env.options.start_timeout)"
                )
            time.sleep(0.1)  # wait: 0.1 s, the trainer

    def close(self) -> None:
        stop_group(self._process, 5)


def _known(name: str | None, fields: Mapping[str, Any], key: str) -> str | None:
    if name is not None and name not in fields:
        raise ConfigError(f"{key}: the server has no field {name!r}; it has {', '.join(fields)}")
    return name


def _content(reply: Mapping[str, Any]) -> dict[str, Any]:
    found = reply.get("observation")
    return (
        {k: v for k, v in found.items() if k not in ("metadata", "reward", "done")} if isinstance(found, dict) else {}
    )


def _reward(reply: Mapping[str, Any]) -> float:
    value = reply.get("reward")
    if not isinstance(value, int | float | None):
        raise OpenEnvError(f"the reward of a step must be a number, got {type(value).__name__}")
    return 0.0 if value is None else to_reward(value)


def _tools_of(listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = _content(listed).get("tools") or []
    if not isinstance(tools, list):
        raise OpenEnvError("list_tools: its tools are not a list")
    found: list[dict[str, Any]] = []
    for tool in tools:
        name = tool.get("name") if isinstance(tool, dict) else None
        problem = schema_problem(tool.get("input_schema")) if isinstance(name, str) else "belongs to no name"
        if problem:
            raise OpenEnvError(f"list_tools: the input_schema of {str(name)[:64]!r} {problem}")
        function = {"name": name, "description": str(tool.get("description") or ""),
                    "parameters": tool.get("input_schema") or {"type": "object"}}  # fmt: skip
        found.append({"type": "function", "function": function})
    return found


def _add_user(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text appended to the last user message, or as a new one."""
    if not text:
        return messages
    if messages and messages[-1].get("role") == "user":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


def _tool_text(observation: Mapping[str, Any]) -> str:
    if error := observation.get("error"):
        return f"error: {error.get('message') if isinstance(error, dict) else error}"
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    text = "\n".join(str(p.get("text", "")) for p in parts or () if isinstance(p, dict))
    is_error = isinstance(result, dict) and (result.get("is_error") or result.get("isError"))
    return f"error: {text}" if is_error else text
