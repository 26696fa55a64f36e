"""MCP servers as tools (`env.options: {mcp: [...]}`): a client for servers that speak JSON-RPC on stdin and stdout.

It uses no package: the releases of `mcp` that other environments need exclude each other. A server runs with this
user's rights, so its command comes from the config and never from data. Every call has one total deadline. A server
that ends, is late or answers with nonsense costs the sample that called it (kind `infra`). The next call starts a new
server if the old one has ended or does not answer a ping.
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
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gspo.envs.adapters.common import schema_problem
from gspo.envs.client import EpisodeError
from gspo.errors import ConfigError
from gspo.system import Limits, describe_exit, described, dying_with_parent, parse_json, stop_group

_PROTOCOL = "2025-06-18"  # servers of 2025 and 2026 accept this version
_LONGEST_LINE = 16 * 2**20  # bytes; a longer message fails the calls that wait, and its rest is skipped
_LIMITS = Limits(bytes=_LONGEST_LINE, values=10**6)
_MOST_IDLE = 256 * 2**20  # bytes without an answer to a call (log lines, pings); more end the server
_LONGEST_STDERR = 2000  # bytes kept for an error message
_MOST_TOOLS = 1000
_START_S, _STOP_S, _PING_S = 60.0, 2.0, 2.0
_NOT_SUPPORTED = {"error": {"code": -32601, "message": "not supported"}}


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


@dataclass
class _Slot:
    """The running server of a spec, and the lock of the thread that starts it: other servers are not waited for."""

    server: McpServer | None = None
    # wait: none, held for the end and the start of a server at most, 4 × _STOP_S + _START_S
    lock: threading.Lock = field(default_factory=threading.Lock)


_Running = defaultdict[str, _Slot]
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
        self._shared = _Running(_Slot)
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
                self._shared[spec.name].server = server

    @contextlib.contextmanager
    def episode(self) -> Iterator[dict[str, Tool]]:
        """The tools of one episode."""
        own = _Running(_Slot)
        try:
            yield {
                name: Tool(schema, partial(self._call, own, spec, tool))
                for name, (spec, tool, schema) in self._known.items()
            }
        finally:
            # In a thread: stopping a process takes time, and other episodes go on.
            threading.Thread(target=_close, args=(own,), daemon=True).start()

    def close(self) -> None:
        _close(self._shared)

    async def _call(self, own: _Running, spec: ServerSpec, tool: str, arguments: Arguments) -> str:
        return await asyncio.to_thread(self._blocking_call, own, spec, tool, arguments)

    def _blocking_call(self, own: _Running, spec: ServerSpec, tool: str, arguments: Arguments) -> str:
        slot = (own if spec.per_episode else self._shared)[spec.name]
        with slot.lock:
            if slot.server is None or slot.server.is_over:
                if slot.server is not None:
                    slot.server.close()
                slot.server = McpServer(spec)
            server = slot.server
        return server.call(tool, arguments, self._timeout_s)


def _close(running: _Running) -> None:
    for slot in list(running.values()):
        with slot.lock:  # a call of a cancelled episode may be starting it
            if slot.server is not None:
                slot.server.close()


class McpServer:
    """One running server. Methods block, may be called from several threads, and raise McpError."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()  # wait: none, held for dictionary operations; guards _pending and _over
        self._writing = threading.Lock()  # wait: none, held for one message to stdin, which has the call's timeout
        self._stderr = b""
        self._over: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gspo-mcp-") if spec.per_episode else None
        # The trainer's own variables contain secrets.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
        # A socket instead of a pipe: sending has a deadline even if the server does not read.
        self._stdin, theirs = socket.socketpair()
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
            deadline = time.monotonic() + _START_S
            hello = {"protocolVersion": _PROTOCOL, "capabilities": {}, "clientInfo": {"name": "gspo", "version": "1"}}
            self._call("initialize", hello, _START_S)
            self._send({"method": "notifications/initialized"}, _START_S)
            self.tools = self._list_tools(deadline)
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

    def _list_tools(self, deadline: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        while len(found) < _MOST_TOOLS:
            left = max(deadline - time.monotonic(), 0.0)
            page = self._call("tools/list", {"cursor": cursor} if cursor else {}, left)
            tools = page.get("tools") if isinstance(page, Mapping) else None
            if not isinstance(tools, list):
                raise McpError(f"the MCP server {self.spec.name} answered tools/list without a list of tools")
            for tool in tools:
                if problem := _tool_problem(tool):
                    raise McpError(f"the MCP server {self.spec.name} describes a tool wrongly: {problem}")
            found += tools
            cursor = page.get("nextCursor")
            if not cursor or not tools:
                break
        return found[:_MOST_TOOLS]

    def _call(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
        try:
            self._send({"id": number, "method": method, "params": params}, timeout_s)
            # wait: the tool's timeout, the episode
            return future.result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeout:
            why = f"the MCP server {self.spec.name} did not answer {method} within {timeout_s:g} s"
            if method != "tools/call" or not self._answers_after(number):
                self._fail(why)
            raise McpError(why) from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def _answers_after(self, number: int) -> bool:
        """Whether it answers a ping after a call that was late: then the calls of other episodes go on."""
        try:
            self._send({"method": "notifications/cancelled", "params": {"requestId": number}}, _PING_S)
            self._call("ping", {}, _PING_S)
        except FutureTimeout:  # another message has waited for all this time
            self._fail(f"the MCP server {self.spec.name} does not read its input")
        except McpError:
            pass  # `_over` says why
        return self._over is None

    def _send(self, message: Mapping[str, Any], timeout_s: float) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        if not self._writing.acquire(timeout=timeout_s):  # wait: the call's timeout, the call that is writing
            raise FutureTimeout
        try:
            if self._over is not None:
                raise McpError(self._over)
            self._stdin.settimeout(timeout_s)
            self._stdin.sendall(line)
        except TimeoutError:  # a part of the line may have been sent: the next message would be appended to it
            self._fail(f"the MCP server {self.spec.name} does not read its input")
            raise McpError(str(self._over)) from None
        except OSError:
            pass  # the reader finds out how the server ended and fails the call; else the call's deadline does
        finally:
            self._writing.release()

    def _read(self) -> None:
        """The reader thread: give results to the waiting calls until the server's stdout ends."""
        try:
            self._read_lines()
        except Exception as error:  # no call waits for a reader that is gone
            self._fail(f"the output of the MCP server {self.spec.name} cannot be read: {described(error)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)  # wait: _STOP_S, the server's reader thread
        # wait: _STOP_S, the server's reader thread
        self._readers[1].join(_STOP_S)  # what the server wrote on stderr is part of the message
        code = self._process.returncode
        how = "closed its output" if code is None else describe_exit(code)
        said = self._stderr.decode("utf-8", "replace").strip()[-400:]
        self._fail(f"the MCP server {self.spec.name} {how}: {said or 'no output on stderr'}")

    def _read_lines(self) -> None:
        stdout: Any = self._process.stdout
        idle, is_rest = 0, False
        with stdout:
            while line := stdout.readline(_LONGEST_LINE):
                idle += len(line)
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n") and not is_rest:
                    self._fail_calls(f"the MCP server {self.spec.name} sent a message of more than {len(line)} bytes")
                elif not is_rest and self._handle(line):
                    idle = 0
                is_rest = not line.endswith(b"\n")
                if idle > _MOST_IDLE:
                    return self._fail(f"the MCP server {self.spec.name} sent {idle} bytes and no answer")

    def _handle(self, line: bytes) -> bool:
        """Give a message to the call that waits for it, or answer a ping; whether it was the answer to a call."""
        try:
            message = parse_json(line, _LIMITS)
        except ValueError:
            return False  # some servers print other lines to stdout, also log lines in JSON
        if not isinstance(message, dict):
            return False
        number, method = message.get("id"), message.get("method")
        if method is not None:
            if isinstance(number, int | str) and len(str(number)) <= 100:
                self._answer(number, {"result": {}} if method == "ping" else _NOT_SUPPORTED)
            return False
        with self._lock:
            future = self._pending.get(number) if type(number) is int else None
        if future is None or future.done():
            return False
        error = message.get("error")
        if error is not None:
            words = error.get("message") if isinstance(error, dict) else error
            shown = words if isinstance(words, str) else type(words).__name__
            future.set_exception(McpError(f"the MCP server {self.spec.name} refused: {shown[:300]}"))
        else:
            future.set_result(message.get("result"))
        return True

    def _answer(self, number: int | str, answer: Mapping[str, Any]) -> None:
        """Answer a request if the server reads: the reader thread waits for nothing."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            line = json.dumps({"jsonrpc": "2.0", "id": number, **answer}).encode() + b"\n"
            self._stdin.send(line, socket.MSG_DONTWAIT)  # a line this short is sent as a whole or not at all
        except OSError:
            pass
        finally:
            self._writing.release()

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
        self._fail_calls(why)

    def _fail_calls(self, why: str) -> None:
        with self._lock:
            waiting = list(self._pending.values())
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # it has just been answered
                future.set_exception(McpError(why))


def _tool_problem(tool: Any) -> str:
    """What is wrong with a tool of tools/list, or nothing."""
    if not isinstance(tool, dict) or not isinstance(name := tool.get("name"), str) or not 0 < len(name) <= 256:
        return "its name must be a string of 1 to 256 characters"
    if not isinstance(tool.get("description"), str | None):
        return f"{name}: its description must be a string"
    problem = schema_problem(tool.get("inputSchema"))
    return f"{name}: its inputSchema {problem}" if problem else ""


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
        words if part.get("type") == "text" and isinstance(words := part.get("text"), str)
        else f"[{str(part.get('type'))[:40]}]" for part in parts
    )  # fmt: skip
    return f"error: {text}" if isinstance(result, Mapping) and result.get("isError") else text
