"""The environment `tools`: the model may call a calculator, Python in the sandbox, or MCP servers before it answers.

A call and its result are one turn; the configured reward scores the last answer. If a call fails, the model reads
"error: …" and the episode continues; the sample fails only if the machine cannot run the tool. A changed word in these
messages changes what is sampled.

Two call formats. With a chat template: that of Hermes and Qwen (`envs/chat.py`); the template describes the tools.
Without one: brackets, followed by the result: `[calculator 12*34]408`, or with a single tool `[12*34]408`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.envs.adapters.mcp import Arguments, McpTools, Tool
from gspo.envs.builtin.calculator import CalculatorError, calculate
from gspo.envs.client import Client, EpisodeError, OutOfRoomError
from gspo.errors import ConfigError, SandboxError
from gspo.rewards import box as sandbox
from gspo.system import parse_json

OPEN, CLOSE = "[", "]"
# Each as the OpenAI API describes it.
SCHEMAS: Mapping[str, dict[str, Any]] = parse_json(Path(__file__).with_name("tools.json").read_bytes())
# One program at a time: the sandbox limits processes per user id, which all programs share.
_BOX = threading.Lock()  # wait: none, held for one program, which has a time limit


class Tools:
    """The environment; `tools` are the names of the tools that may be called, `mcp` the MCP servers whose tools may be.

    max_turns    answers of the model, calls included; a call in the last one is not run
    max_output   maximum number of characters of a result
    timeout      seconds that a program or a call of an MCP server may run
    """

    def __init__(
        self,
        tools: Sequence[str] | None = None,
        *,
        mcp: Any = (),
        max_turns: int = 4,
        max_output: int = 500,
        timeout: float = 5.0,
        allow_unsandboxed: bool = False,
    ) -> None:
        default = () if mcp else ("calculator",)
        names = [tools] if isinstance(tools, str) else list(default if tools is None else tools)
        unknown = sorted(set(map(str, names)) - set(SCHEMAS))
        if unknown or not (names or mcp):
            found = f"there is no tool {unknown[0]!r}" if unknown else "the list is empty"
            raise ConfigError(f"env.options.tools: {found}; available tools are {', '.join(SCHEMAS)}")
        if max_turns < 1 or max_output < 1 or not timeout > 0:
            raise ConfigError("env.options: max_turns and max_output must be at least 1, timeout above 0")
        # Checked before the run starts, not at the first call.
        if "python" in names and not allow_unsandboxed and (why := sandbox.unavailable()):
            raise ConfigError(
                f"env.options.tools: python cannot run here: {why}. env.options.allow_unsandboxed=true runs "
                "model-written programs with this user's rights; use it only on a machine whose data may be lost"
            )
        self._max_turns, self._max_output = max_turns, max_output
        self._limits = sandbox.Limits(timeout_s=timeout)
        self._allow_unsandboxed = allow_unsandboxed
        known = {"calculator": self._calculator, "python": self._python}
        self._tools = {name: Tool(SCHEMAS[name], known[name]) for name in names}
        self._mcp = McpTools(mcp, timeout, taken=names)

    async def __call__(self, client: Client, data: Mapping[str, Any]) -> None:
        with self._mcp.episode() as more:
            await self._play(client, {**self._tools, **more})

    async def _play(self, client: Client, tools: Mapping[str, Tool]) -> None:
        messages, plain = client.messages, client.is_plain
        # Without a template, sampling stops at the closing bracket, so that the result can follow.
        asked: dict[str, Any] = {"stop": CLOSE} if plain else {"tools": [tool.schema for tool in tools.values()]}
        for turn in range(self._max_turns):
            try:
                answer = await client.chat(messages, **asked)
            except OutOfRoomError:
                # Without any answer the episode fails. Later, a full context just ends it.
                if turn == 0:
                    raise
                return
            calls = _inline(answer["content"], tools) if plain else _calls(answer)
            # No call: this is the final answer.
            if not calls:
                return
            results = [await self._call(tools, name, argument) for name, argument in calls]
            messages += [answer, *({"role": "tool", "content": result} for result in results)]

    async def call(self, name: str, argument: Any) -> str:
        """The result of a tool, or an error message for the model."""
        with self._mcp.episode() as more:
            return await self._call({**self._tools, **more}, name, argument)

    async def _call(self, tools: Mapping[str, Tool], name: str, argument: Any) -> str:
        if name not in tools:
            return f"error: there is no tool {str(name)[:40]!r}; there are {', '.join(tools)}"
        result = await tools[name].call(_arguments(tools[name], argument))
        return (
            result if len(result) <= self._max_output else f"{result[: self._max_output]}… ({len(result)} characters)"
        )

    def close(self) -> None:
        self._mcp.close()

    async def _calculator(self, arguments: Arguments) -> str:
        if not isinstance(expression := arguments.get("expression"), str):
            return "error: calculator takes 'expression', a text"
        try:
            return calculate(expression)
        except CalculatorError as error:
            return f"error: {error}"

    async def _python(self, arguments: Arguments) -> str:
        if not isinstance(code := arguments.get("code"), str):
            return "error: python takes 'code', a text"
        # In a thread: the event loop serves all other episodes meanwhile.
        ended = await asyncio.to_thread(self._run, code)
        return f"{ended.output}error: {ended.reason}" if ended.reason else ended.output

    def _run(self, code: str) -> sandbox.Ended:
        with _BOX:
            try:
                return sandbox.run_program(code, self._limits, allow_unsandboxed=self._allow_unsandboxed)
            except SandboxError as error:
                raise ToolUnavailableError(str(error)) from error


class ToolUnavailableError(EpisodeError):
    """The machine could not run the tool."""

    kind = "infra"


def _calls(answer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], parse_json(c["function"]["arguments"])) for c in answer.get("tool_calls") or ()]


def _inline(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
    """The call in brackets at the end of a plain text."""
    if not text.endswith(CLOSE):
        return []
    inside = text[:-1].rpartition(OPEN)[2]
    if len(tools) == 1:
        return [(next(iter(tools)), inside)]
    name, _, argument = inside.partition(" ")
    return [(name, argument)]


def _arguments(tool: Tool, given: Any) -> Arguments:
    """Named arguments. A plain text is the tool's only argument, or a JSON object of several."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, str) and tool.only_argument is not None:
        return {tool.only_argument: given}
    with contextlib.suppress(ValueError):
        if isinstance(given, str) and isinstance(named := parse_json(given), dict):
            return named
    return {}
