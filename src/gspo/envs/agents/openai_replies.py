"""The replies of OpenAI's API format: chats and completions, whole or as server-sent events, and the list of models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gspo.envs.agents.openai_api import Answer, ApiRequest


def chat_body(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> dict[str, Any]:
    """The reply to a chat that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        # OpenAI's API has null as content if there are only tool calls.
        message |= {"content": answer.text or None, "tool_calls": _calls(answer, id)}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish(answer),
        "logprobs": _chat_logprobs(answer) if request.logprobs else None,
        **({"token_ids": list(answer.tokens)} if request.token_ids else {}),
    }
    reply = {"id": id, "object": "chat.completion", "created": created, "model": model, "choices": [choice]}
    return reply | {"usage": usage(answer)} | _prompt_ids(answer, request)


def completion_body(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> dict[str, Any]:
    """The reply to a completion that is not streamed."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish}
    choice |= {"logprobs": _completion_logprobs(answer) if request.logprobs else None}
    choice |= {"token_ids": list(answer.tokens)} if request.token_ids else {}
    reply = {"id": id, "object": "text_completion", "created": created, "model": model, "choices": [choice]}
    return reply | {"usage": usage(answer)} | _prompt_ids(answer, request)


def chunks(answer: Answer, request: ApiRequest, *, id: str, model: str, created: int) -> Iterator[bytes]:
    """The reply as server-sent events. The text is in one event, because a sample is sent after it is complete."""
    head = {"id": id, "created": created, "model": model}
    if request.messages:
        # Three events: the role, the content, and the reason of the end.
        head["object"] = "chat.completion.chunk"
        logprobs = _chat_logprobs(answer) if request.logprobs else None
        said: dict[str, Any] = {"content": answer.text} if answer.text or not answer.tool_calls else {}
        if answer.tool_calls:
            said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(answer, id))]
        steps = (
            {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None},
            {"delta": said, "finish_reason": None, "logprobs": logprobs},
            {"delta": {}, "finish_reason": _finish(answer), "logprobs": None},
        )
    else:
        head["object"] = "text_completion"
        logprobs = _completion_logprobs(answer) if request.logprobs else None
        steps = ({"text": answer.text, "finish_reason": answer.finish, "logprobs": logprobs},)
    for step in steps:
        yield _event({**head, "choices": [{"index": 0, **step}]})
    if request.stream_usage:
        yield _event({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def models_body(model: str) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(model)]}


def model_body(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "gspo"}


def usage(answer: Answer) -> dict[str, int]:
    sampled = len(answer.tokens)
    return {
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": sampled,
        "total_tokens": answer.num_prompt + sampled,
    }


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _finish(answer: Answer) -> str:
    # A call that was cut off by the length limit is reported as such.
    return "tool_calls" if answer.tool_calls and answer.finish == "stop" else answer.finish


def _calls(answer: Answer, id: str) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{id}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(answer.tool_calls)
    ]


def _chat_logprobs(answer: Answer) -> dict[str, Any]:
    content = [
        {"token": piece, "logprob": logp, "bytes": list(piece.encode("utf-8", "replace")), "top_logprobs": []}
        for piece, logp in zip(answer.pieces, answer.logp, strict=True)
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(answer: Answer) -> dict[str, Any]:
    offsets, at = [], 0
    for piece in answer.pieces:
        offsets.append(at)
        at += len(piece)
    top = [{piece: logp} for piece, logp in zip(answer.pieces, answer.logp, strict=True)]
    return {
        "tokens": list(answer.pieces),
        "token_logprobs": list(answer.logp),
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _prompt_ids(answer: Answer, request: ApiRequest) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt)} if request.token_ids else {}
