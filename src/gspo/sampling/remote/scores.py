"""Log-probs of given tokens, from a server: the teacher of distillation in another process.

Two kinds of servers give them, both at temperature 1 over the whole vocabulary:

    http://HOST:PORT       a sampler server of gspo that no trainer uses: /vocabulary and /score (server.py)
    http://HOST:PORT/v1    vLLM: /v1/completions with prompt_logprobs, and /tokenize; `#NAME` chooses a model

The key comes from the environment (GSPO_TEACHER_KEY). Torch-free.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError, DataError, RolloutError
from gspo.models import refuse_other_vocabulary
from gspo.sampling.engines.base import EngineAddress, InvalidReplyError, prompt_logp, reply_object
from gspo.sampling.remote import protocol as wire
from gspo.system import ReplyTooLargeError, beat

KEY = "GSPO_TEACHER_KEY"
START_S = 60.0  # deadline of the calls before the first step
PER_CALL, CALL_TOKENS = 64, 65536  # sequences and tokens of one call
_LOWEST = -9000.0  # vLLM writes −9999 for −inf
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between two tries
_LATER = (408, 425, 429)  # and every 5xx: the same call may succeed later


class ScoreServer:
    """A gspo server. `timeout_s`: how long one call of `score` may fail before it is an error.

    name  the config key with this address, for messages
    """

    def __init__(self, url: str, *, timeout_s: float, name: str = "teacher.path") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"{name}: {url!r} is not the address of a server; for example http://127.0.0.1:8000")
        self._model, self._timeout_s, self._name = parts.fragment, timeout_s, name
        self._base = url.partition("#")[0].rstrip("/").removesuffix("/v1")
        self._http = EngineAddress(self._base, key=os.environ.get(KEY)).open()

    def check_vocabulary(self, tokenizer: Any) -> None:
        """DataError if token ids mean other tokens to the server's model; ConfigError if it does not answer."""
        own = self._call("GET", "/vocabulary", timeout_s=START_S).get("vocabulary")
        if not isinstance(own, dict):
            raise self._invalid("its vocabulary is missing")
        refuse_other_vocabulary(own, tokenizer.get_vocab(), self._base, self._name)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Log-probs of every token but the first of each sequence."""
        rows: list[NDArray[np.float32]] = []
        for lot in _lots(sequences):
            beat(f"waiting for {self._base} ({self._name})")
            try:
                found = self._ask(lot)
            except (InvalidReplyError, wire.WireError) as error:
                raise self._invalid(str(error)) from None
            if [len(row) for row in found] != [len(tokens) - 1 for tokens in lot]:
                raise self._invalid("it returned another number of log-probs than there are tokens")
            # NaN fails both comparisons. Log-probs slightly above 0 are rounding.
            if not all(bool(((row > _LOWEST) & (row < 1e-3)).all()) for row in found):
                raise self._invalid("it returned numbers that are no log-probs")
            rows += [np.minimum(row, 0.0) for row in found]
        return rows

    def close(self) -> None:
        self._http.close()

    def _ask(self, lot: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
        reply = self._call("POST", "/score", {"sequences": wire.pack_rows(lot, "<i4")})
        return wire.unpack_rows(reply, "logp", "<f4")

    def _call(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """A reply with status 200. Lost connections and replies that may succeed later are tried again in time."""
        data = None if body is None else json.dumps(body).encode()
        deadline, pause = time.monotonic() + (timeout_s or self._timeout_s), _PAUSE_S
        while True:
            try:
                reply = self._http.call(method, route, data, timeout_s=max(deadline - time.monotonic(), 1.0))
                if reply.status == 200:
                    return reply_object(reply)
                text = reply.content.decode("utf-8", "replace")
                reason = f"it answered {route} with {reply.status}: {text[:300]}"
                if reply.status < 500 and reply.status not in _LATER:
                    hint = f"; its key is read from {KEY}" if reply.status in (401, 403) else ""
                    kind = RolloutError if timeout_s is None else ConfigError  # before the first step, or later
                    raise kind(f"{self._name}: {self._base} cannot be the teacher: {reason}{hint}")
            except (InvalidReplyError, ReplyTooLargeError) as error:
                raise self._invalid(str(error)) from None
            except (ConnectionError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            if time.monotonic() + pause > deadline:
                raise self._late(reason, timeout_s)
            time.sleep(pause)  # wait: 0.5 to 10 s, the trainer after rollout.request_timeout (60 s at the start)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            beat(f"trying {self._base} again ({self._name})")

    def _late(self, reason: str, timeout_s: float | None) -> Exception:
        if timeout_s is not None:
            return ConfigError(f"{self._name}: {self._base} did not answer within {timeout_s:g} s: {reason}")
        return RolloutError(
            f"{self._name}: {self._base} scored nothing for {self._timeout_s:g} s (rollout.request_timeout): {reason}"
        )

    def _invalid(self, reason: str) -> RolloutError:
        return RolloutError(f"{self._name}: invalid response of {self._base}: {reason}")


class VllmScores(ScoreServer):
    """A vLLM server, or another one with its API."""

    def check_vocabulary(self, tokenizer: Any) -> None:
        models = self._call("GET", "/v1/models", timeout_s=START_S).get("data")
        names = [m["id"] for m in models if isinstance(m, dict) and "id" in m] if isinstance(models, list) else []
        chosen = self._model or (names[0] if len(names) == 1 else "")
        if chosen not in names:
            raise ConfigError(
                f"{self._name}: {self._base} serves {', '.join(map(str, names)) or 'no model'}; "
                f"name one of them: {self._base}/v1#NAME"
            )
        self._model = chosen
        # vLLM does not give its vocabulary. A text with tokens from everywhere in ours must have the same ids there.
        text = _text_of_vocabulary(tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        theirs = self._call("POST", "/tokenize", body, timeout_s=START_S).get("tokens")
        if theirs != ids:
            raise DataError(
                f"{self._name}: {self._model} at {self._base} has another vocabulary than the tokenizer of this run: a "
                f"text of {len(ids)} of its tokens is {_where_different(ids, theirs)} there. Choose a teacher with the "
                "vocabulary of the policy"
            )

    def _ask(self, lot: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
        body = {"prompt": [list(map(int, tokens)) for tokens in lot], "max_tokens": 1, "temperature": 0}
        reply = self._call("POST", "/v1/completions", {"model": self._model, "prompt_logprobs": 0, **body})
        choices = reply.get("choices")
        if not isinstance(choices, list) or len(choices) != len(lot):
            raise InvalidReplyError(f"it did not answer with {len(lot)} choices")
        return [prompt_logp(choice, tokens) for choice, tokens in zip(choices, lot, strict=True)]


def open_scores(url: str, *, timeout_s: float, name: str = "teacher.path") -> ScoreServer:
    """The client for an address; nothing is sent yet."""
    kind = VllmScores if urlsplit(url).path.rstrip("/").endswith("/v1") else ScoreServer
    return kind(url, timeout_s=timeout_s, name=name)


def _lots(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """At most PER_CALL sequences and CALL_TOKENS tokens each; a longer sequence is a lot of its own.

    >>> [len(lot) for lot in _lots([[1] * 40_000, [1] * 20_000, [1] * 9_000, [1] * 90_000])]
    [2, 1, 1]
    """
    lots: list[list[Sequence[int]]] = []
    room = 0
    for tokens in sequences:
        if not lots or len(lots[-1]) == PER_CALL or len(tokens) > room:
            lots.append([])
            room = CALL_TOKENS
        lots[-1].append(tokens)
        room -= len(tokens)
    return lots


def _text_of_vocabulary(tokenizer: Any, most: int = 512) -> str:
    """The text of tokens that are evenly spread over the vocabulary, without special ones."""
    special = set(tokenizer.all_special_ids)
    ids = sorted(number for number in tokenizer.get_vocab().values() if number not in special)
    return tokenizer.decode(ids[:: max(len(ids) // most, 1)], skip_special_tokens=True)


def _where_different(ids: Sequence[int], theirs: Any) -> str:
    if not isinstance(theirs, list):
        return "not answered with tokens"
    same = sum(a == b for a, b in zip(ids, theirs, strict=False))
    return f"{len(theirs)} tokens, {same} of them the same,"
