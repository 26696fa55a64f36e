"""What an environment holds of the model: one `Client` per episode, token in and token out.

    async def env(client, data):
        answer = await client.chat(client.messages)
        return float(data["answer"] in answer["content"])

The client renders messages, keeps every request with the tokens that answered it, and refuses what would never end.
It belongs to one episode and may be used from any thread and any event loop: a request is handed to the driver
(`train/episodes.py`) and its answer awaited. Torch-free.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo.envs.chat import Chat, Message, TemplateError, continues, same_message
from gspo.envs.episode import Exchange
from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams

# No tokenizer makes so few tokens of a text: what is longer than this per token of context is refused unread.
_CHARACTERS_PER_TOKEN = 64
_SETTABLE = ("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids")


class EpisodeError(Exception):
    """Why an episode cannot go on. An environment may catch it and end; else its sample fails with this kind."""

    kind: Literal["limit", "timeout", "crash", "infra"] = "crash"


class TooManyTurnsError(EpisodeError):
    """The episode has used all its requests (env.max_turns)."""

    kind = "limit"


class OutOfRoomError(EpisodeError):
    """The conversation fills the context: there is no room for another token."""

    kind = "limit"


class EpisodeOverError(EpisodeError):
    """The episode has ended, or was given up, and somebody still asks."""

    kind = "timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant's message, and the exchange of tokens behind it."""

    message: dict[str, Any]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A conversation as it stood after an answer."""

    messages: tuple[Message, ...]  # the answer last
    tools: str
    exchange: Exchange


class Client:
    """One episode's way to the model.

    prompt      the problem: its `data` (the row's columns), `text`, `messages` and `tokens`
    messages    the problem as chat messages, a new list
    exchanges   every request that was answered so far, in the order of asking
    """

    def __init__(
        self,
        request: Request,
        *,
        chat: Chat,
        ask: Callable[[Request], Future[Sample]],
        max_turns: int,
        max_context: int,
    ) -> None:
        self._request, self._chat, self._ask = request, chat, ask
        self._max_turns, self._max_context = max_turns, max_context
        self.prompt = request.origin or Prompt(request.prompt, "")
        self._lock = threading.Lock()
        self._num_asked = 0
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}  # by their place in the episode
        self._in_use: dict[int, set[int]] = {}  # of requests known by content: how often each was asked
        self._spoken: list[_Spoken] = []
        self._over: str | None = None
        # Who asks in parallel, or in another process, asks in an order that is the clock's. Draws are then keyed by
        # what was asked: the same request of the same episode draws the same, whenever it comes.
        self.by_content = False
        self.turn_rewards: dict[int, float] = {}

    @property
    def id(self) -> SampleId:
        """Whose episode this is."""
        return self._request.id

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [dict(m) for m in self.prompt.messages] or [{"role": "user", "content": self.prompt.text}]

    @property
    def is_plain(self) -> bool:
        """Whether the model is spoken to without a chat template: messages are their contents, end to end."""
        return self._chat.is_plain

    @property
    def params(self) -> SamplingParams:
        """How answers are drawn (gconfig, or eval_gconfig)."""
        return self._request.params

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        with self._lock:
            found = [self._exchanges[place] for place in sorted(self._exchanges)]
        if not self.by_content:
            return tuple(found)
        return tuple(
            replace(
                e, sample=replace(e.sample, id=self._request.id._replace(turn=i), turns=np.full_like(e.sample.turns, i))
            )
            for i, e in enumerate(found)
        )

    async def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any) -> dict:
        """The assistant's message to these messages: `content`, and `tool_calls` where it calls tools.

        Messages that go on from an earlier answer of this episode are put behind the tokens of that answer as they
        were sampled. Where the history was edited the conversation is rendered anew and trained as a sequence of its
        own. `tools` are JSON schemas as the OpenAI API takes them; `sampling` may set max_new_tokens (not above
        gconfig's), min_new_tokens, stop and stop_token_ids.
        """
        return (await self.answer(messages, tools, **sampling)).message

    async def answer(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any) -> Answer:
        """As `chat`, with the tokens behind the message."""
        messages = tuple(dict(m) for m in messages)
        key = json.dumps(list(tools), sort_keys=True, default=str) if tools else ""
        exchange = await self._exchange(self._render(messages, tools, key), sampling)
        message = self._chat.parse(exchange.sample.tokens.tolist())
        with self._lock:
            self._spoken.append(_Spoken((*messages, message), key, exchange))
        return Answer(message, exchange)

    async def complete(self, tokens: Sequence[int], **sampling: Any) -> Sample:
        """What the model says after these tokens."""
        return (await self._exchange(tuple(int(t) for t in tokens), sampling)).sample

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """The tokens of a text for `complete`: one that follows others, or one that begins (with special tokens)."""
        self._refuse_long(len(text))
        return tuple(int(t) for t in self._chat.tokenizer.encode(text, add_special_tokens=begins))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.text(tokens)

    def reward(self, value: float) -> None:
        """Credit the last answered turn with `value`; the episode's reward is the sum of these and what `env` returns.

        See actor.sequence_unit and env.turn_discount for what turns make of it.
        """
        value = float(value)
        if not math.isfinite(value):
            raise EpisodeError(f"a turn's reward is {value}; it must be a finite number")
        with self._lock:
            if not self._exchanges:
                raise EpisodeError("there is no turn to reward yet: ask first")
            turn = len(self._exchanges) - 1 if self.by_content else max(self._exchanges)[0]
            self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + value

    def close(self, why: str) -> None:
        """No more requests; called by the driver."""
        with self._lock:
            self._over = why

    async def _exchange(self, prompt: tuple[int, ...], sampling: dict[str, Any]) -> Exchange:
        params = self._params(sampling, self._max_context - len(prompt))
        with self._lock:
            if self._over is not None:
                raise EpisodeOverError(self._over)
            if self._num_asked >= self._max_turns:
                raise TooManyTurnsError(f"the episode has asked {self._max_turns} times; env.max_turns bounds it")
            turn, answered = self._num_asked, len(self._exchanges)
            self._num_asked += 1
            id, place = self._request.id._replace(turn=turn), (turn,)
            if self.by_content:
                # Those that know equally many answers are told apart by what they ask.
                id = self._id_by_content(prompt, params)
                place = (answered, prompt, id.attempt, id.turn)
        try:
            sample = await asyncio.wrap_future(self._ask(Request(id, prompt, params)))
        except BaseException:
            with self._lock:  # what nobody heard is drawn alike when it is asked again
                self._in_use.get(id.attempt, set()).discard(id.turn)
            raise
        exchange = Exchange(prompt, sample)
        with self._lock:
            if self._over is None:
                self._exchanges[place] = exchange
        return exchange

    def _id_by_content(self, prompt: tuple[int, ...], params: SamplingParams) -> SampleId:
        """(a digest of the request, how often it was asked) in place of (attempt, turn)."""
        own = self._request.id
        content = np.array(prompt, dtype=np.int64).tobytes() + repr((own.attempt, params)).encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=6).digest())
        used = self._in_use.setdefault(digest, set())
        again = next(number for number in itertools.count() if number not in used)
        used.add(again)
        return own._replace(turn=again, attempt=digest)

    def _params(self, sampling: dict[str, Any], room: int) -> SamplingParams:
        if foreign := [name for name in sampling if name not in _SETTABLE]:
            raise EpisodeError(
                f"an episode cannot set {', '.join(foreign)}: all of a run is sampled as gconfig says, for the trainer "
                f"to know its log-probs; it can set {', '.join(_SETTABLE)}"
            )
        if room < 1:
            raise OutOfRoomError(
                f"the conversation fills the context of {self._max_context} tokens; see gconfig.max_tokens"
            )
        own = self._request.params
        given = {k: tuple([v] if isinstance(v, str) else v) if k.startswith("stop") else v for k, v in sampling.items()}
        params = replace(own, **given)
        most = max(1, min(int(params.max_new_tokens), own.max_new_tokens, room))
        return replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most))

    def _render(self, messages: tuple[Message, ...], tools: Sequence[Any] | None, key: str) -> tuple[int, ...]:
        with self._lock:
            before = [s for s in self._spoken if s.tools == key and continues(s.messages, messages)]
        if before:
            last = max(before, key=lambda s: len(s.messages))
            new = messages[len(last.messages) :]
            self._refuse_long(sum(len(str(m.get("content") or "")) for m in new))
            said = last.exchange.sample.tokens.tolist()
            try:
                return last.exchange.tokens + self._chat.continue_after(said, last.messages[:-1], new, tools)
            except TemplateError:
                pass  # it cannot be continued: a sequence of its own
        elif not tools and len(messages) == len(self.messages) and all(map(same_message, messages, self.messages)):
            return self.prompt.tokens  # rendered already
        self._refuse_long(sum(len(str(m.get("content") or "")) for m in messages))
        try:
            return self._chat.render(messages, tools)
        except TemplateError as error:
            raise EpisodeError(str(error)) from error

    def _refuse_long(self, characters: int) -> None:
        if characters > _CHARACTERS_PER_TOKEN * self._max_context:
            raise OutOfRoomError(
                f"a message of {characters} characters cannot fit a context of {self._max_context} tokens"
            )
