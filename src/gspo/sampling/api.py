"""The sampler's interface, asynchronous in form for all implementations, and the checks of requests and samples.

`submit` never blocks. `completed` yields samples as they finish, in any order; `Sample.id` tells which request a sample
belongs to. The in-process engine decodes inside `completed()`; a client of servers only waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from gspo.errors import DataError
from gspo.types import MAX_KEPT, TOKEN_ARRAYS, Kept, Request, Sample

if TYPE_CHECKING:
    import torch


class Sampler(Protocol):
    """What the trainer needs of a sampler. Every wait has a deadline; a missed deadline raises RolloutError."""

    @property
    def version(self) -> int:
        """The version of the current weights; every sampled token is tagged with it."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Bad ones (prompt beyond the context, id outside the vocabulary) raise DataError here."""
        ...

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        """Yield finished samples until nothing is outstanding, the sampler is paused, or the deadline passes."""
        ...

    def abort(self) -> list[Sample]:
        """End all outstanding requests; the partial samples (finish='abort') can be submitted again as prefixes."""
        ...

    def pause(self) -> None:
        """Stop decoding after the current token; outstanding requests stay."""
        ...

    def resume(self) -> None: ...

    def sleep(self) -> None:
        """Release caches, and weights if they are the sampler's own, so that the trainer can use the device."""
        ...

    def wake(self) -> None: ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Sample from `version` from now on. `tensors` None: trainer and sampler share the weights, changed in place.
        Cached keys and values of older weights are dropped; outstanding samples are prefilled again."""
        ...

    def health(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsCache(Protocol):
    """A sampler that keeps keys and values of a finished request (`Request.keep_cache`) for its episode's next turn.

    It keeps one row per episode. The next request of the episode uses it, or drops it if it does not begin with the
    row's tokens. `load_weights`, `abort`, `sleep` and `release` drop rows, too.
    """

    def release(self, submission: int, sample: int) -> None:
        """This episode has ended: drop its row."""
        ...


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


def completes_stop(tokens: Any, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether the last of `tokens` completes a stop string. Only the tail that can hold one is decoded."""
    # A token has at least one byte of the string.
    tail = [int(token) for token in tokens[-max(len(stop.encode()) for stop in stops) - 8 :]]
    # A character that is cut in half decodes to U+FFFD: it was not part of the text before.
    text, before = decode(tail), len(decode(tail[:-1]).rstrip("\ufffd"))
    return any(text.rfind(stop) + len(stop) > before for stop in stops if stop in text)


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


class Experts(NamedTuple):
    """The form of the expert routes of a MoE model's samples; all zero for a dense model."""

    num_layers: int = 0
    per_token: int = 0
    num_experts: int = 0
    needed: bool = False  # a sample without routes is invalid


def invalid_reason(
    request: Request,
    sample: Sample,
    *,
    num_vocab: int,
    ends: Collection[int],
    versions: tuple[int, int],
    aborting: bool = False,
    experts: Experts = Experts(),  # noqa: B008 - a tuple
) -> str | None:
    """Why the sample cannot be an answer to the request; None if it can.

    `versions`: the oldest and the newest weight version that may have sampled new tokens. `aborting`: the request may
    come back incomplete.
    """
    params, num = request.params, len(sample.tokens)
    num_prefix = 0 if request.prefix is None else len(request.prefix.tokens)
    if sample.id != request.id:
        return f"it is sample {tuple(sample.id)}"
    if num > params.max_new_tokens or num < num_prefix:
        return f"{num} tokens, of at most {params.max_new_tokens} (gconfig.max_new_tokens), {num_prefix} in the prefix"
    if request.prefix is not None and not all(
        np.array_equal(getattr(sample, name)[:num_prefix], getattr(request.prefix, name)) for name in TOKEN_ARRAYS
    ):
        return "it does not begin with its prefix"
    tokens, logp = sample.tokens[num_prefix:], sample.behavior_logp[num_prefix:]
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < num_vocab):
        return f"tokens {tokens.min()}…{tokens.max()} are not all inside the vocabulary of {num_vocab}"
    # Rounding may put a log-prob slightly above 0.
    if not (np.isfinite(logp).all() and (logp <= 1e-5).all()):
        return "its log-probs are not finite numbers ≤ 0"
    by, (oldest, newest) = sample.versions[num_prefix:], versions
    if len(by) and not (oldest <= by.min() and by.max() <= newest):
        return f"sampled by weight versions {by.min()}…{by.max()}; expected {oldest}…{newest}"
    # Servers only load newer versions, so versions cannot decrease within a sample.
    if (np.diff(by) < 0).any():
        return "its weight versions decrease along the sample"
    # Tokens whose kept set is unknown are masked; `_invalid_kept` checks that no others are.
    may_mask = params.record_kept and sample.extras.kept is not None
    is_masked = not may_mask and not sample.mask[num_prefix:].all()
    if is_masked or (sample.turns[num_prefix:] != request.id.turn).any():
        return "some of its new tokens are masked, or of another turn"
    if (why := _invalid_routes(request, sample, experts)) is not None:
        return why
    if (why := _invalid_kept(request, sample, num_vocab)) is not None:
        return why
    return _ending(request, sample, ends, num - num_prefix, aborting)


def _invalid_routes(request: Request, sample: Sample, experts: Experts) -> str | None:
    """Routes are [tokens, layers, experts per token], of the sample and of its prompt: both or neither."""
    prefix = request.prefix if request.prefix is not None and len(request.prefix.tokens) else None
    routes, given = sample.extras.routes, None if prefix is None else prefix.extras.routes
    if routes is None:
        # An aborted request may not have been prefilled. A prefix without routes leaves none to continue.
        excused = sample.finish == "abort" or (prefix is not None and given is None)
        return "it has no routes, but actor.routing_replay needs them" if experts.needed and not excused else None
    kind = np.uint8 if experts.num_experts <= 256 else np.int16
    own = "routes", routes.own, given and given.own, len(sample.tokens)
    for name, each, before, num in (own, ("prompt_routes", routes.prompt, given and given.prompt, len(request.prompt))):
        shape = (num, experts.num_layers, experts.per_token)
        if each.shape != shape or each.dtype != kind or not experts.num_layers:
            return f"its {name} are {each.dtype} {each.shape}; this model's are {np.dtype(kind)} {shape}"
        if each.size and not (each.min() >= 0 and each.max() < experts.num_experts):
            return f"its {name} name experts {each.min()}…{each.max()} of {experts.num_experts}"
        if (np.diff(np.sort(each, -1).astype(np.int16), axis=-1) == 0).any():
            return f"its {name} name an expert twice for one token"
        if prefix is not None and (before is None or not np.array_equal(each[: len(before)], before)):
            return f"its {name} are not those of its prefix"
    return None


def _invalid_kept(request: Request, sample: Sample, num_vocab: int) -> str | None:
    """Kept sets are there if the request wants them; each new token is in its set, or masked because it has none."""
    kept = sample.extras.kept
    if not request.params.record_kept or not len(sample.tokens):
        return None if kept is None or not len(kept.counts) else "it has kept sets that were not requested"
    if kept is None or len(kept.counts) != len(sample.tokens):
        return "it has no kept sets, but actor.sampling_mask_replay needs them"
    num_prefix = 0 if request.prefix is None else len(request.prefix.tokens)
    begin = int(kept.counts[:num_prefix].sum())
    if request.prefix is not None and num_prefix:
        given = request.prefix.extras.kept or Kept.whole(num_prefix)
        if not (np.array_equal(kept.counts[:num_prefix], given.counts) and np.array_equal(kept.ids[:begin], given.ids)):
            return "its kept sets are not those of its prefix"
    counts, ids = kept.counts[num_prefix:], kept.ids[begin:]
    if ((counts > 0) != sample.mask[num_prefix:]).any():
        return "a token without a kept set is trained, or one with a set is not"
    if len(counts) and counts.max() > MAX_KEPT:
        return f"a kept set has {counts.max()} tokens; expected at most {MAX_KEPT}"
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_vocab):
        return f"its kept sets name tokens {ids.min()}…{ids.max()} of {num_vocab}"
    of_token = np.repeat(np.arange(len(counts)), counts)  # [ids] the token whose set it is in
    # Within a set, ids ascend.
    if ((np.diff(ids) <= 0) & (np.diff(of_token) == 0)).any():
        return "its kept sets are not in ascending order"
    hits = np.bincount(of_token, ids == sample.tokens[num_prefix:][of_token], minlength=len(counts))
    return None if (hits == (counts > 0)).all() else "a token is not in its kept set"


def _ending(request: Request, sample: Sample, ends: Collection[int], fresh: int, aborting: bool) -> str | None:
    params, num = request.params, len(sample.tokens)
    if sample.finish == "abort":
        return None if aborting else "it was aborted, but the trainer did not abort it"
    if sample.finish == "length":
        return None if num == params.max_new_tokens else f"it ends at {num} of {params.max_new_tokens} tokens"
    if not fresh:
        return "it has no new tokens"
    if num < params.min_new_tokens:
        return f"it stops after {num} tokens, before gconfig.min_new_tokens {params.min_new_tokens}"
    # Without a tokenizer a stop string cannot be searched for: with stop strings, every last token is accepted.
    endings = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    if not params.stop and int(sample.tokens[-1]) not in endings:
        return f"it stops at token {int(sample.tokens[-1])}, which is not an end token"
    return None
