"""Checks of a request before it is queued, and its sample if it was not completed. Errors name the key to change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gspo.errors import DataError
from gspo.types import Request, Sample


def rows_at_once(num_weights: int, max_new_tokens: int, max_staleness: int = 0) -> int:
    """How many sequences the in-process sampler decodes at the same time, if no key sets it.

    A decode step of a small model costs as much for 4 rows as for hundreds, so it takes more of them. Not if sampling
    runs ahead of training: then the number decides which weights sample a token, and recorded runs have 256.

    >>> rows_at_once(336_000, 64), rows_at_once(336_000, 4096), rows_at_once(135_000_000, 64)
    (1024, 256, 256)
    """
    if num_weights >= 2**22 or max_staleness:
        return 256
    return min(max(2**18 // max_new_tokens, 256), 1024)


def completed_by_prefix(request: Request) -> Sample | None:
    """The sample of a request whose prefix already has all tokens it may have; None: there is something to sample."""
    if request.prefix is None or len(request.prefix.tokens) < request.params.max_new_tokens:
        return None
    return replace(request.prefix, id=request.id, finish="length")


def interrupted(request: Request, version: int) -> Sample:
    """The tokens that a request has so far, as a partial sample."""
    return replace(request.prefix or Sample.of(request.id, [], [], version), id=request.id, finish="abort")


def validate_request(
    request: Request, *, num_vocab: int, max_context: int, sees_text: bool, takes_images: bool = False
) -> None:
    """Raise DataError if the request cannot be sampled. `sees_text`: the sampler can decode tokens into text."""
    who, params, num = f"request {tuple(request.id)}", request.params, len(request.prompt)
    if num == 0:
        raise DataError(f"{who}: the prompt is empty; at least one token must precede the completion")
    if request.shown is not None and not takes_images:
        raise DataError(
            f"{who} shows images, and this sampler takes text alone: actor.path must be a vision-language model, and "
            "sampler servers take no images (set rollout.backend: local)"
        )
    prefix = () if request.prefix is None else request.prefix.tokens
    for name, tokens in (("prompt", request.prompt), ("prefix", prefix)):
        ids = np.asarray(tokens)
        if len(ids) and (ids.min() < 0 or ids.max() >= num_vocab):
            bad = int(ids[(ids < 0) | (ids >= num_vocab)][0])
            raise DataError(
                f"{who}: {name} token {bad} is outside the model's vocabulary of {num_vocab}; "
                "does tokenizer_path belong to actor.path?"
            )
    if params.max_new_tokens < 1:
        raise DataError(f"{who}: gconfig.max_new_tokens is {params.max_new_tokens}; it must be at least 1")
    if num + params.max_new_tokens > max_context:
        raise DataError(
            f"{who}: prompt of {num} tokens + gconfig.max_new_tokens {params.max_new_tokens} = "
            f"{num + params.max_new_tokens} exceeds the context of {max_context}; "
            "lower gconfig.max_new_tokens or train_dataset.max_length"
        )
    if not params.greedy and not params.temperature > 0:
        raise DataError(
            f"{who}: gconfig.temperature is {params.temperature}; it must be > 0 "
            "(eval_gconfig.temperature: 0 is greedy decoding)"
        )
    if not 0 < params.top_p <= 1 or params.top_k < 0 or not 0 <= params.min_p <= 1:
        raise DataError(
            f"{who}: gconfig.top_p {params.top_p} must be in (0, 1], gconfig.top_k {params.top_k} ≥ 0, gconfig.min_p "
            f"{params.min_p} in [0, 1]"
        )
    if params.min_new_tokens > params.max_new_tokens:
        raise DataError(
            f"{who}: gconfig.min_new_tokens {params.min_new_tokens} exceeds "
            f"gconfig.max_new_tokens {params.max_new_tokens}"
        )
    if params.stop and not sees_text:
        raise DataError(
            f"{who}: gconfig.stop holds strings, but this sampler has no `decode` function to turn tokens into text"
        )
    if request.prefix is not None and request.prefix.finish == "stop":
        raise DataError(f"{who}: its prefix is already complete (finish 'stop'), so it cannot be continued")
