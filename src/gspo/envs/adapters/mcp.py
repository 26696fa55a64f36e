"""MCP servers as tools (`env.options: {mcp: [...]}`): a client for servers that speak JSON-RPC on stdin and stdout.

It uses no package: the releases of `mcp` that other environments need exclude each other. A server runs with this
user's rights, so its command comes from the config and never from data. Every wait has a deadline; a server that ends
or does not answer in time costs the sample that called it (kind `infra`), and the next call starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import Any

from gspo.envs.client import EpisodeError
from gspo.errors import ConfigError
from gspo.system import describe_exit, dying_with_parent, stop_group

_PROTOCOL = "2025-06-18"  # servers of 2025 and 2026 accept this version
_LONGEST_LINE = 16 * 2**20  # bytes; a longer message ends the server
_LONGEST_STDERR = 2000  # bytes kept for an error message
_MOST_TOOLS = 1000
_START_S, _SEND_S, _STOP_S = 60.0, 10.0, 2.0


class McpError(EpisodeError):
    """The server ended, did not answer in time, or broke the protocol."""

    kind = "infra"


@dataclass(frozen=True)
class ServerSpec:
    """How to start a server. `per_episode`: every episode gets its own process, in an empty folder."""

    command: tuple[str, ...]
    name: str
    env: Mapping[str, str]
    per_episode: bool = False


def read_specs(given: Any) -> list[ServerSpec]:
    """`env.options.mcp`: a list of command lines, or of {command, name, env, per_episode}; raises ConfigError."""
    if isinstance(given, str | Mapping):
        given = [given]
    if not isinstance(given, Sequence):
        raise ConfigError(f"env.options.mcp must be a list of servers, got {given!r}")
    specs = [_spec(entry, f"env.options.mcp[{number}]") for number, entry in enumerate(given)]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"env.options.mcp: two servers are named {twice[0]!r}; give each a `name`")
    return specs


def _spec(entry: Any, key: str) -> ServerSpec:
    entry = dict(entry) if isinstance(entry, Mapping) else {"command": entry}
    unknown = sorted(set(entry) - {"command", "name", "env", "per_episode"})
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]} is not known; a server has command, name, env and per_episode")
    command = entry.get("command")
    words = shlex.split(command) if isinstance(command, str) else command
    if not isinstance(words, Sequence) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{key}.command must be a command line, for example [npx, -y, some-server]; got {command!r}")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{key}.command: there is no program {words[0]!r}; write its full path, or install it")
    env = {str(name): str(value) for name, value in dict(entry.get("env") or {}).items()}
    return ServerSpec(
        tuple(words), str(entry.get("name") or os.path.basename(words[-1])), env, bool(entry.get("per_episode"))
    )


Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool as the OpenAI API describes it, and the function that calls it."""

    schema: Mapping[str, Any]
    call: Callable[[Arguments], Awaitable[str]]

    @property
    def only_argument(self) -> str | None:
        """The argument that a plain text stands for: the only required one, or the only one."""
        parameters = self.schema["function"]["parameters"]
        names = parameters.get("required") or list(parameters.get("properties") or ())
        return names[0] if len(names) == 1 else None


class McpTools:
    """The tools of all configured servers. Servers start here, so that a wrong command is an error before the run.

    A shared server serves all episodes. A server with `per_episode` starts at the first call of an episode and is
    stopped when the episode ends.
    """

    def __init__(self, given: Any, timeout_s: float, taken: Sequence[str] = ()) -> None:
        self._timeout_s = timeout_s
        self._shared: dict[str, McpServer] = {}
        # wait: none, held for the start of a server at most, _START_S
        self._lock = threading.Lock()  # one thread at a time starts a server
        self._known: dict[str, tuple[ServerSpec, str, dict[str, Any]]] = {}  # by the name that the model uses
        for spec in read_specs(given):
            try:
                server = McpServer(spec)
            except McpError as error:
                self.close()
                raise ConfigError(f"env.options.mcp: {error}") from error
            for tool in server.tools:
                # Two servers may have tools of the same name.
                name = tool["name"] if tool["name"] not in {*taken, *self._known} else f"{spec.name}_{tool['name']}"
                self._known[name] = spec, tool["name"], _openai_schema(name, tool)
            if spec.per_episode:
                server.close()
            else:
                self._shared[spec.name] = server

    @contextlib.contextmanager
    def episode(self) -> Iterator[dict[str, Tool]]:
        """The tools of one episode."""
        own: dict[str, McpServer] = {}
        try:
            yield {
                name: Tool(schema, partial(self._call, own, spec, tool))
                for name, (spec, tool, schema) in self._known.items()
            }
        finally:
            for server in own.values():  # in a thread: stopping a process takes time, and other episodes go on
                threading.Thread(target=server.close, daemon=True).start()

    def close(self) -> None:
        for server in self._shared.values():
            server.close()

    async def _call(self, own: dict[str, McpServer], spec: ServerSpec, tool: str, arguments: Arguments) -> str:
        return await asyncio.to_thread(self._blocking_call, own, spec, tool, arguments)

    def _blocking_call(self, own: dict[str, McpServer], spec: ServerSpec, tool: str, arguments: Arguments) -> str:
        running = own if spec.per_episode else self._shared
        with self._lock:
            server = running.get(spec.name)
            if server is None or server.is_over:
                if server is not None:
                    server.close()
                server = running[spec.name] = McpServer(spec)
        return server.call(tool, arguments, self._timeout_s)


class McpServer:
    """One running server. Methods block, may be called from several threads, and raise McpError."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        # wait: none, held for the start of a server at most, _START_S
        self._lock = threading.Lock()  # guards _pending and writes to stdin
        self._stderr = b""
        self._over: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gspo-mcp-") if spec.per_episode else None
        # The trainer's own variables contain secrets.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
        # A socket instead of a pipe: sending has a deadline even if the server does not read.
        self._stdin, theirs = socket.socketpair()
        self._stdin.settimeout(_SEND_S)
        with theirs:
            self._process = subprocess.Popen(
                dying_with_parent(list(spec.command)), stdin=theirs.fileno(), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env={**inherited, **spec.env}, start_new_session=True,
                cwd=self._folder.name if self._folder else None,
            )  # fmt: skip
        self._readers = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_stderr)]
        for reader in self._readers:
            reader.start()
        try:
            hello = {"protocolVersion": _PROTOCOL, "capabilities": {}, "clientInfo": {"name": "gspo", "version": "1"}}
            self._call("initialize", hello, _START_S)
            self._send({"method": "notifications/initialized"})
            self.tools = self._list_tools()
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        return self._over is not None

    def call(self, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """The result of a tool as text. An error of the tool is a text, too: "error: …"."""
        result = self._call("tools/call", {"name": tool, "arguments": dict(arguments)}, timeout_s)
        return _text_of(result)

    def close(self) -> None:
        self._fail("the MCP server was closed")
        self._stdin.close()  # a well-behaved server ends now
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)  # wait: _STOP_S, the episode
        stop_group(self._process, _STOP_S)
        for reader in self._readers:
            reader.join(_STOP_S)  # wait: _STOP_S, the episode
        if self._folder is not None:
            self._folder.cleanup()

    def _list_tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        while len(found) < _MOST_TOOLS:
            page = self._call("tools/list", {"cursor": cursor} if cursor else {}, _START_S)
            tools = page.get("tools") if isinstance(page, Mapping) else None
            if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("name") for t in tools):
                raise McpError(f"the MCP server {self.spec.name} answered tools/list with {str(page)[:200]!r}")
            found += tools
            cursor = page.get("nextCursor")
            if not cursor or not tools:
                break
        return found[:_MOST_TOOLS]

    def _call(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
        try:
            self._send({"id": number, "method": method, "params": params})
            return future.result(timeout_s)  # wait: the tool's timeout, the episode
        except FutureTimeout:
            # It may still hold the answer of an old call: a server that was late once is not used again.
            self._fail(f"the MCP server {self.spec.name} did not answer {method} within {timeout_s:g} s")
            raise McpError(str(self._over)) from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        with self._lock:
            if self._over is not None:
                raise McpError(self._over)
            # On an error the reader finds out how the server ended, and fails the call; else the call's deadline does.
            with contextlib.suppress(OSError):
                self._stdin.sendall(line)

    def _read(self) -> None:
        """The reader thread: give results to the waiting calls until the server's stdout ends."""
        stdout: Any = self._process.stdout
        with stdout:
            while line := stdout.readline(_LONGEST_LINE):
                if not line.endswith(b"\n"):
                    self._fail(f"the MCP server {self.spec.name} sent a message of more than {_LONGEST_LINE} bytes")
                    break
                # Some servers print other lines to stdout; they are ignored.
                with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
                    self._handle(json.loads(line))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)  # wait: _STOP_S, the server's reader thread
        # wait: _STOP_S, the server's reader thread
        self._readers[1].join(_STOP_S)  # what the server wrote on stderr is part of the message
        code = self._process.returncode
        how = "closed its output" if code is None else describe_exit(code)
        said = self._stderr.decode("utf-8", "replace").strip()[-400:]
        self._fail(f"the MCP server {self.spec.name} {how}: {said or 'no output on stderr'}")

    def _handle(self, message: dict[str, Any]) -> None:
        if "method" in message:
            if "id" in message:  # a request of the server: only `ping` has an answer here
                pong: dict[str, Any] = {"result": {}} if message["method"] == "ping" else {
                    "error": {"code": -32601, "message": "not supported"}
                }  # fmt: skip
                self._send({"id": message["id"], **pong})
            return
        with self._lock:
            future = self._pending.get(message["id"])
        if future is None or future.done():
            return
        if (error := message.get("error")) is not None:
            future.set_exception(McpError(f"the MCP server {self.spec.name} refused: {str(error)[:300]}"))
        else:
            future.set_result(message.get("result"))

    def _read_stderr(self) -> None:
        """Read all of stderr, so that the server never blocks on it; keep its end."""
        stderr: Any = self._process.stderr
        with stderr:
            while part := os.read(stderr.fileno(), 2**16):  # wait: none, end of file; a daemon thread
                self._stderr = (self._stderr + part)[-_LONGEST_STDERR:]

    def _fail(self, why: str) -> None:
        """Refuse further calls, and end the calls that wait; only the first reason counts."""
        with self._lock:
            if self._over is not None:
                return
            self._over = why
            waiting = [future for future in self._pending.values() if not future.done()]
        for future in waiting:
            future.set_exception(McpError(why))


def _openai_schema(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": name, "description": str(tool.get("description") or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def _text_of(result: Any) -> str:
    """The content of a `tools/call` result: its text parts, other parts by their type in brackets.

    >>> _text_of({"content": [{"type": "text", "text": "4"}, {"type": "image", "data": "…"}]})
    '4\\n[image]'
    >>> _text_of({"content": [{"type": "text", "text": "no such file"}], "isError": True})
    'error: no such file'
    """
    content = result.get("content") if isinstance(result, Mapping) else None
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    text = "\n".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts
    )
    return f"error: {text}" if isinstance(result, Mapping) and result.get("isError") else text
