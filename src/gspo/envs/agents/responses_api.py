"""OpenAI's newer format, `POST /v1/responses`: a request is translated to a chat request, and the answer back.

What the chat format refuses is refused here, too. State on the server is not kept: `previous_response_id` is refused
with the error for an unknown id, so that a client sends its whole history. Pure functions on JSON; torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gspo.envs.agents.openai_api import Answer, ApiError, ApiRequest, as_list, as_text, read_chat

_SAME = ("model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "metadata", "user", "store",
         "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")  # fmt: skip
# Fields that have no effect here, or of which only one value is supported.
_NEUTRAL: Mapping[str, Any] = {"truncation": "disabled", "background": False, "top_logprobs": 0, "reasoning": {}}
# The default, in the forms in which clients write it.
_FORMATS: tuple[Any, ...] = (None, {}, {"type": "text"})
_TEXTS = ({}, *({"format": f} | v for f in _FORMATS for v in ({}, {"verbosity": None}, {"verbosity": "medium"})),
          {"verbosity": None}, {"verbosity": "medium"})  # fmt: skip
_STATE = ("conversation", "prompt")
_TEXT_KINDS = ("input_text", "output_text", "text")


def read_response(body: Mapping[str, Any], model: str) -> ApiRequest:
    """The request as a chat request; raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    if "previous_response_id" in given:
        raise ApiError(
            400, "previous_response_not_found",
            "responses are not kept here: send the whole conversation in `input`", "previous_response_id",
        )  # fmt: skip
    for name in _STATE:
        if name in given:
            raise ApiError(400, "unsupported_value", f"{name} is kept on the server and is not supported here", name)
    chat: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
    instructions = given.pop("instructions", None)
    chat["messages"] = [
        *([] if instructions is None else [{"role": "system", "content": instructions}]),
        *_messages(given.pop("input", None)),
    ]
    if "max_output_tokens" in given:
        chat["max_tokens"] = given.pop("max_output_tokens")
    if (tools := given.pop("tools", None)) is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(as_list(tools, "tools"))]
    given.pop("include", None)  # asks for parts of a reply that this server never has
    given.pop("stream_options", None)
    if given.pop("text", {}) not in _TEXTS:
        only = 'text must be {"format": {"type": "text"}}: sampling is not constrained'
        raise ApiError(400, "unsupported_value", only, "text")
    for name, neutral in _NEUTRAL.items():
        value = given.pop(name, neutral)
        if value != neutral and not (isinstance(value, dict) and not any(value.values())):
            raise ApiError(400, "unsupported_value", f"{name} must be {json.dumps(neutral)}", name)
    # Whatever is left is refused by its name.
    return read_chat({**given, **chat}, model)


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(as_list(given, "input")):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise ApiError(400, "invalid_type", f"{where} must be an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": as_text(item.get("content"), where, _TEXT_KINDS)})
        elif kind == "function_call":
            arguments = item.get("arguments")
            function = {"name": item.get("name"), "arguments": "{}" if arguments in (None, "") else arguments}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            # Calls of one answer are several items; in a chat they belong to one message, with its text.
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = as_text(item.get("output"), where, _TEXT_KINDS)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        else:
            raise ApiError(400, "unsupported_value", f"{where} has type {str(kind)[:40]!r}, not supported here", where)
    return messages


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(400, "unsupported_value", f"{where} must be a function with a name", where)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def response_body(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> dict[str, Any]:
    """The reply that is not streamed."""
    is_whole = answer.finish == "stop"
    sampled = len(answer.tokens)
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": _items(answer, id),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": answer.num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt + sampled,
        },
    }


def response_events(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> Iterator[bytes]:
    """The reply as server-sent events; each item is one delta, because a sample is sent after it is complete."""
    whole = response_body(answer, request, id=id, model=model, created=created)
    empty = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for number, (kind, fields) in enumerate(_steps(whole, empty)):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()


def _steps(whole: Mapping[str, Any], empty: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": empty}
    yield "response.in_progress", {"response": empty}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            bare = {**item, "status": "in_progress", "content": []}
            yield "response.output_item.added", {"output_index": index, "item": bare}
            at["content_index"] = 0
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            bare = {**item, "status": "in_progress", "arguments": ""}
            yield "response.output_item.added", {"output_index": index, "item": bare}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _items(answer: Answer, id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "completed" if answer.finish == "stop" else "incomplete"
        items.append({"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": [part]})
    for i, (name, arguments) in enumerate(answer.tool_calls):
        call = {"call_id": f"call_{id}_{i}", "name": name, "arguments": arguments}
        items.append({"id": f"fc_{id}_{i}", "type": "function_call", "status": "completed", **call})
    return items
