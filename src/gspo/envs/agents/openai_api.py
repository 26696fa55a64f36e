"""OpenAI's chat format: requests that a policy in training supports, parsed strictly, and their replies.

A field of a request is used, or has no effect on samples (`user`, `seed`), or is replaced by the run's setting
(`temperature`), or is refused with status 400 and its name. No field that would change a sample is silently ignored.
Pure functions on JSON; torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo.system import RefusedCallError, described, parse_json

T = TypeVar("T")


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


# Settings that are replaced by those of the run, because the trainer needs log-probs of one distribution.
REPLACED = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (-1, 10**9), "min_p": (0.0, 1.0)}
# Fields for the caller's own records, and `seed`: draws are a function of the run's seed.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
) | {"seed", "parallel_tool_calls"}
# Fields of which only the default value is supported.
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "top_logprobs": 0,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "functions": [],
    "function_call": "none",
}
_BOTH = frozenset(("model", "max_tokens", "stop", "stream", "stream_options", "logprobs", "return_token_ids"))
_CHAT = _BOTH | {"messages", "tools", "tool_choice", "max_completion_tokens"}
_COMPLETIONS = _BOTH | {"prompt"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ApiError(RefusedCallError):
    """A call that is answered with an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(status, code, message)
        self.param = param

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A parsed request: a chat (`messages`), or a completion of a text or of tokens (`prompt`).

    >>> read_chat({"model": "policy", "messages": [{"role": "user", "content": "2+2="}]}, "policy").messages
    ({'role': 'user', 'content': '2+2='},)
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    replaced: tuple[str, ...] = ()  # names of settings that were replaced by the run's


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's answer, from which a reply is written.

    >>> Answer("7", (), "stop", 5, (9, 1), (-0.1, -0.2), ("7", "<eos>")).finish
    'stop'
    """

    text: str
    tool_calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON)
    finish: str  # stop, length
    num_prompt: int
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    pieces: tuple[str, ...]  # the text of each token
    prompt: tuple[int, ...] = ()


# Requests


def read_body(read: Callable[[Mapping[str, Any]], T], body: bytes) -> T:
    """The request in a body, by one of the functions below; ApiError whatever is in it."""
    try:
        value = parse_json(body, strict=True)
    except ValueError as cause:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {str(cause)[:300]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", f"the body is a JSON {type(value).__name__}; it must be an object")
    try:
        return read(value)
    except ApiError:
        raise
    except Exception as error:  # the functions depend on the body alone
        raise ApiError(400, "invalid_value", f"the request cannot be read: {described(error)[:300]}") from error


def read_chat(body: Mapping[str, Any], model: str) -> ApiRequest:
    """POST /v1/chat/completions."""
    given = _read(body, _CHAT, model)
    messages = _take(given, "messages", list)
    if not messages:
        raise ApiError(400, "missing_required_parameter", "messages must contain at least one message", "messages")
    # Tools are checked even if tool_choice is none.
    tools = tuple(_tool(tool, i) for i, tool in enumerate(_take(given, "tools", list, [])))
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(
            400,
            "unsupported_value",
            "tool_choice must be auto or none: a policy in training cannot be forced to call a tool",
            "tool_choice",
        )
    # Both names of the limit are in use; the smaller value applies.
    most = [_count(given, name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    return ApiRequest(
        messages=tuple(_message(message, i) for i, message in enumerate(messages)),
        tools=() if choice == "none" else tools,
        max_tokens=min(most, default=None),
        logprobs=_take(given, "logprobs", bool, False),
        **_common(given),
    )


def read_completion(body: Mapping[str, Any], model: str) -> ApiRequest:
    """POST /v1/completions, of a text or of token ids."""
    given = _read(body, _COMPLETIONS, model)
    prompt = _take(given, "prompt", (str, list))
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):  # a batch of one
            prompt = prompt[0]
        if isinstance(prompt, list):
            # type() instead of isinstance(): a bool is an int, too.
            if not all(type(token) is int and 0 <= token < 2**31 for token in prompt):
                raise ApiError(400, "invalid_value", "prompt must be one string, or one list of token ids", "prompt")
            prompt = tuple(prompt)
    if not prompt:
        raise ApiError(400, "invalid_value", "prompt is empty", "prompt")
    how_many = _take(given, "logprobs", int, -1)  # −1: no log-probs
    if how_many > 1:
        raise ApiError(
            400,
            "unsupported_value",
            "logprobs must be 0 or 1: only the log-prob of the sampled token is available",
            "logprobs",
        )
    return ApiRequest(
        prompt=prompt,
        max_tokens=_count(given, "max_tokens") if "max_tokens" in given else None,
        logprobs=how_many >= 0,
        **_common(given),
    )


def read_reward(body: Mapping[str, Any]) -> float:
    """POST /reward with {"reward": number}."""
    value = body.get("reward")
    # A comparison, because an integer of 400 digits has no float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300 or len(body) != 1:
        raise ApiError(400, "invalid_value", 'the body must be {"reward": a finite number}', "reward")
    return float(value)


def _read(body: Mapping[str, Any], known: frozenset[str], model: str) -> dict[str, Any]:
    """The fields of a request after checks; null counts as absent, as in OpenAI's API."""
    given = {name: value for name, value in body.items() if value is not None}
    # Each field is known, without effect, replaced, or neutral. Everything else is refused.
    for name, value in given.items():
        if name in known or name in _WITHOUT_EFFECT:
            continue
        if name in REPLACED:
            low, high = REPLACED[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ApiError(400, "invalid_value", f"{name} must be a number from {low:g} to {high:g}", name)
        elif name not in _NEUTRAL:
            raise ApiError(400, "unknown_parameter", f"this endpoint has no field {name[:64]!r}", name[:64])
        elif value != _NEUTRAL[name]:
            raise ApiError(
                400,
                "unsupported_value",
                f"{name} must be {json.dumps(_NEUTRAL[name])}: other values are not supported in training",
                name,
            )
    # The model's name is required, so that an agent with a wrong setup is noticed.
    asked = _take(given, "model", str)
    if asked != model:
        raise ApiError(
            404,
            "model_not_found",
            f"the model here is {model!r}, got {asked[:64]!r}; let the agent ask for {model!r} ($OPENAI_MODEL)",
            "model",
        )
    return given


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(s, str) and 0 < len(s) <= 256 for s in stop):
        raise ApiError(400, "invalid_value", "stop must be a string, or a list of up to 16 strings", "stop")
    options = _take(given, "stream_options", dict, {})
    return {
        "stop": tuple(stop),
        "stream": _take(given, "stream", bool, False),
        "stream_usage": options.get("include_usage") is True,
        "token_ids": _take(given, "return_token_ids", bool, False),
        "replaced": tuple(sorted(REPLACED.keys() & given.keys())),
    }


def _take(given: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    # A field without a default is required.
    if name not in given:
        if default is not None:
            return default
        raise ApiError(400, "missing_required_parameter", f"{name} is missing", name)
    value = given[name]
    # In Python, bool is a subclass of int.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise ApiError(400, "invalid_type", f"{name} must be {names}, got {type(value).__name__}", name)
    return value


def _count(given: Mapping[str, Any], name: str) -> int:
    if (value := _take(given, name, int)) < 1:
        raise ApiError(400, "invalid_value", f"{name} must be 1 or more, got {value}", name)
    return value


def _message(message: Any, index: int) -> Mapping[str, Any]:
    """A message in the form that is rendered and compared: fields without content are left out.

    >>> _message({"role": "assistant", "content": [{"type": "text", "text": "hm"}], "refusal": None}, 0)
    {'role': 'assistant', 'content': 'hm'}
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ApiError(400, "invalid_type", f"{where} must be an object", where)
    # Client libraries send unset fields as null or as empty lists.
    given = {name: value for name, value in message.items() if value not in (None, [])}
    role = _ROLES.get(str(given.pop("role", None)))
    if role is None:
        raise ApiError(400, "invalid_value", f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    read: dict[str, Any] = {"role": role, "content": as_text(given.pop("content", ""), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if name in given:
            read[name] = _take(given, name, str)
            del given[name]
    if role == "assistant" and (calls := given.pop("tool_calls", None)) is not None:
        read["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in as_list(calls, f"{where}.tool_calls")]
    # What is left was not understood: a silently ignored field could change the prompt.
    if given:
        name = next(iter(given))
        raise ApiError(400, "unknown_parameter", f"{where} has a field {name[:64]!r} that is not supported", where)
    return read


def as_text(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A string, or a list of text parts joined; `kinds`: the types of part that an API calls text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in as_list(content, where):
        # Other fields of a part (cache_control, citations) do not change what the model reads.
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, "unsupported_value", f"{where} can contain text only", where)
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any, where: str) -> Mapping[str, Any]:
    is_call = isinstance(call, dict) and call.get("type") in (None, "function")
    function = call.get("function") if is_call else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "invalid_value", f"{where} must contain function calls, each with a name", where)
    arguments = function.get("arguments", "{}")
    # OpenAI's API has the arguments as a JSON string; an object is accepted, too.
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(tool: Any, index: int) -> Mapping[str, Any]:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "unsupported_value", f"{where} must be a function with a name", where)
    if not isinstance(function.get("parameters"), dict | None):
        raise ApiError(400, "invalid_type", f"{where}: the parameters must be a JSON schema, an object", where)
    if not isinstance(function.get("description"), str | None):
        raise ApiError(400, "invalid_type", f"{where}: the description must be a string", where)
    return tool


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ApiError(400, "invalid_type", f"{where} must be a list, got {type(value).__name__}", where)
    return value


def only_finite(values: Sequence[float]) -> tuple[float, ...]:
    """Log-probs that JSON can represent: −∞ becomes −1e30."""
    return tuple(value if math.isfinite(value) else -1e30 for value in values)
