"""Anthropic's API format, `POST /v1/messages`: a request is translated to a chat request, and the answer back.

What the chat format refuses is refused here, too. Server-side threads are refused with the error that makes the client
send its whole history: a request that continues a thread contains neither the earlier messages nor the tools. Pure
functions on JSON; torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gspo.envs.agents.openai_api import Answer, ApiError, ApiRequest, as_list, as_text, read_chat
from gspo.system import parse_json

# Fields that have the same name and meaning in a chat request, or no effect.
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier")
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessagesError(ApiError):
    """The same refusal in Anthropic's error format."""

    def __init__(self, error: ApiError, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(error.status, error.code, str(error), error.param)
        self._details = details

    def body(self) -> dict[str, Any]:
        error = super().body()["error"] | {"type": _KINDS.get(self.status, "api_error")}
        return {"type": "error", "error": error | ({"details": self._details} if self._details else {})}


def read_messages(body: Mapping[str, Any], model: str, *, needs_max_tokens: bool = True) -> ApiRequest:
    """The request as a chat request; raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    if "thread" in given:
        refused = ApiError(400, "thread_unsupported_request", "threads are not kept here: send the whole conversation")
        raise MessagesError(refused, {"error_code": "thread_unsupported_request", "unsupported": []})
    if needs_max_tokens and "max_tokens" not in given:
        raise ApiError(400, "missing_required_parameter", "max_tokens is missing", "max_tokens")
    chat: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
    chat["messages"] = [
        *_system(given.pop("system", None)),
        *(m for i, message in enumerate(as_list(given.pop("messages", None), "messages"))
          for m in _messages(message, f"messages[{i}]")),
    ]  # fmt: skip
    if "max_tokens" in given:
        chat["max_tokens"] = given.pop("max_tokens")
    if "stop_sequences" in given:
        chat["stop"] = as_list(given.pop("stop_sequences"), "stop_sequences")
    if "tools" in given:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(as_list(given.pop("tools"), "tools"))]
    if "tool_choice" in given:
        choice = given.pop("tool_choice")
        chat["tool_choice"] = choice.get("type") if isinstance(choice, dict) else choice
    if given.get("thinking", {}) in ({}, {"type": "disabled"}):
        given.pop("thinking", None)
    # Whatever is left is refused by its name.
    return read_chat({**given, **chat}, model)


def _system(given: Any) -> list[dict[str, Any]]:
    return [] if given is None else [{"role": "system", "content": as_text(given, "system")}]


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """One message as chat messages: results of tools become messages of their own, before the user's text."""
    if not isinstance(message, dict):
        raise ApiError(400, "invalid_type", f"{where} must be an object", where)
    unknown = [name[:64] for name, value in message.items() if name not in ("role", "content") and value is not None]
    if unknown:
        raise ApiError(400, "unknown_parameter", f"{where} has a field {unknown[0]!r} that is not supported", where)
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for i, block in enumerate(as_list(content, f"{where}.content")):
        at, kind = f"{where}.content[{i}]", block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(as_text([block], at))
        elif kind == "tool_use" and role == "assistant":
            given = _default(block.get("input"), {})
            if not isinstance(given, dict):
                raise ApiError(400, "invalid_type", f"{at}.input must be an object", at)
            function = {"name": block.get("name"), "arguments": given}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            num_results += 1
            result = as_text(_default(block.get("content"), ""), at)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")),
                   "content": f"error: {result}" if block.get("is_error") else result}  # fmt: skip
        else:
            raise ApiError(400, "unsupported_value", f"{at} has type {str(kind)[:40]!r}, which is not supported", at)
    if texts or calls or not num_results:
        yield {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise ApiError(400, "unsupported_value", f"{where} must be a tool with name and input_schema", where)
    function = {"name": tool["name"], "description": _default(tool.get("description"), ""),
                "parameters": _default(tool.get("input_schema"), {"type": "object", "properties": {}})}  # fmt: skip
    return {"type": "function", "function": function}


def _default(given: Any, default: Any) -> Any:
    return default if given is None else given


def message_body(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> dict[str, Any]:
    """The reply that is not streamed."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answer, id),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt, "output_tokens": len(answer.tokens)},
    }


def message_events(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> Iterator[bytes]:
    """The reply as server-sent events; each block is one delta, because a sample is sent after it is complete."""
    whole = message_body(answer, request, id=id, model=model, created=created)
    start = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield _event("message_start", message=start)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield _event("message_stop")


def _blocks(answer: Answer, id: str) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.tool_calls else []
    return text + [
        {"type": "tool_use", "id": f"toolu_{id}_{i}", "name": name, "input": parse_json(arguments)}
        for i, (name, arguments) in enumerate(answer.tool_calls)
    ]


def _stop_reason(answer: Answer) -> str:
    return "tool_use" if answer.tool_calls and answer.finish == "stop" else _STOP_REASONS[answer.finish]


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
