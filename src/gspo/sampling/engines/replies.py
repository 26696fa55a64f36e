"""What an inference engine replies, checked before it becomes a sample. Torch-free."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo.system.http_client import Reply
from gspo.types import FinishReason, Request, Sample

_FINISH_OF: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class InvalidReplyError(ValueError):
    """Invalid response: the engine's reply contradicts the request or its own API."""


class NewTokens(NamedTuple):
    """New tokens of one sample."""

    tokens: list[int]
    logp: list[float]
    finish: FinishReason


def reply_object(reply: Reply) -> dict[str, Any]:
    """The JSON object of a reply with status 200; an empty body is an empty object."""
    text = reply.content.decode("utf-8", "replace")
    if reply.status != 200:
        raise InvalidReplyError(f"it answered {reply.status}: {text[:300]}")
    # Some commands answer with status 200 and no body.
    if not text:
        return {}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidReplyError(f"its answer is not JSON: {text[:100]!r}") from None
    if not isinstance(body, dict):
        raise InvalidReplyError(f"its answer is a JSON {type(body).__name__}, not an object")
    return body


def prompt_logp(choice: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """`prompt_logprobs` of a choice of vLLM: log-probs of every token but the first."""
    try:
        # One entry per token: a mapping from token id to its log-prob. The first token has none.
        found = choice["prompt_logprobs"]
        return np.array([found[i][str(token)]["logprob"] for i, token in enumerate(tokens) if i], dtype=np.float32)
    except (TypeError, KeyError, IndexError, ValueError):
        raise InvalidReplyError("its prompt_logprobs are missing, or not those of the prompt's tokens") from None


def parse_completion(tokens: Any, logp: Any, finish_reason: Any) -> NewTokens:
    """Check what can be checked without the request. Log-probs up to 1e-5 above 0 are rounding errors and become 0."""
    finish = _FINISH_OF.get(finish_reason) if isinstance(finish_reason, str) else None
    if finish is None:
        raise InvalidReplyError(f"its finish_reason is {finish_reason!r}")
    # An interrupted request may not have started: it has neither tokens nor log-probs.
    if finish == "abort" and not tokens:
        return NewTokens([], [], finish)
    # type() instead of isinstance(): a bool is an int, too.
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise InvalidReplyError("its token_ids are missing, or not token numbers")
    if not isinstance(logp, list) or not all(type(value) in (float, int) for value in logp):
        raise InvalidReplyError("its log-probs are missing, or not numbers")
    if len(logp) != len(tokens):
        raise InvalidReplyError(f"it returned {len(logp)} log-probs for {len(tokens)} tokens")
    return NewTokens(tokens, [min(float(value), 0.0) if value < 1e-5 else float(value) for value in logp], finish)


def parse_routes(content: Any, num_rows: int) -> NDArray[np.integer[Any]]:
    """Expert routes [num_rows, layers, top_k] from base64 of a .npy file."""
    if not isinstance(content, str):
        raise InvalidReplyError("its routed_experts are missing")
    try:
        rows = np.load(io.BytesIO(base64.b64decode(content, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidReplyError(f"its routed_experts are not base64 of a .npy file ({error})") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or len(rows) != num_rows or rows.dtype.kind not in "iu":
        form = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidReplyError(f"its routed_experts are {form} for {num_rows} positions")
    return rows


def cut_at_stop(sample: Sample, request: Request, decode: Callable[[Sequence[int]], str]) -> Sample:
    """The sample up to the token that completes a stop string.

    An engine searches only the text it generated itself, so it misses a stop string that begins in the prefix.
    """
    num_prefix, params = 0 if request.prefix is None else len(request.prefix.tokens), request.params
    # Without a prefix, the engine has searched the whole completion itself.
    if not num_prefix:
        return sample
    tokens, longest = sample.tokens.tolist(), max(len(stop.encode()) for stop in params.stop)
    # Try every possible end among the new tokens, shortest first.
    for num in range(max(num_prefix + 1, params.min_new_tokens), len(tokens) + 1):
        tail = tokens[max(0, num - longest - 8) : num]
        # A character that is cut in half decodes to U+FFFD: it was not part of the text before.
        text, before = decode(tail), len(decode(tail[:-1]).rstrip("\ufffd"))
        if any(text.rfind(stop) + len(stop) > before for stop in params.stop if stop in text):
            return replace(sample.up_to(num), finish="stop")
    return sample
