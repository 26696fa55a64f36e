"""What an environment calls; the outcome of an episode, and a played one for people.

async def env(client, data):
        answer = await client.chat(client.messages)
        return float(data["answer"] in answer["content"])

The client renders messages, records every request with its sampled tokens, and limits the number and length of
requests. It may be used from any thread and any event loop: the driver (`driver.py`) samples the answers. Torch-free.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo.envs.chat import Chat, Message, TemplateError, continues, same_message
from gspo.envs.episode import Exchange
from gspo.errors import DataError
from gspo.system import described, user_lines
from gspo.types import Failure, Outcome, Prompt, Request, Sample, SampleId, SamplingParams, Score

# No tokenizer has more characters per token on average: longer texts cannot fit and are refused before tokenising.
_CHARACTERS_PER_TOKEN = 64
_SETTABLE = ("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids")


class EpisodeError(Exception):
    """The episode cannot continue. An environment may catch it and end; otherwise its sample fails with this kind."""

    kind: Literal["limit", "timeout", "crash", "infra"] = "crash"


class TooManyTurnsError(EpisodeError):
    """The episode has reached its maximum number of requests (env.max_turns)."""

    kind = "limit"


class OutOfRoomError(EpisodeError):
    """The conversation fills the context; not even one more token fits."""

    kind = "limit"


class EpisodeOverError(EpisodeError):
    """A request came after the episode had ended or was cancelled."""

    kind = "timeout"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An assistant message and the tokens of its request and answer."""

    message: dict[str, Any]
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a conversation up to an answer."""

    messages: tuple[Message, ...]  # the last one is the answer
    tools: str
    exchange: Exchange


class Client:
    """Access to the model for one episode.

    prompt      the problem: its `data` (the row's columns), `text`, `messages` and `tokens`
    messages    the problem as a new list of chat messages
    exchanges   all answered requests, in order
    """

    def __init__(
        self,
        request: Request,
        *,
        chat: Chat,
        submit: Callable[[Request], Future[Sample]],
        max_turns: int,
        max_context: int,
    ) -> None:
        if request.shown is not None:
            raise DataError(
                f"request {tuple(request.id)} shows images, and episodes take text alone; remove the images"
            )
        self._request, self._chat, self._submit = request, chat, submit
        self._max_turns, self._max_context = max_turns, max_context
        self.prompt = request.origin or Prompt(request.prompt, "")
        self._lock = threading.Lock()  # wait: none, held for rendering a conversation
        self._num_asked = 0
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}  # by their position in the episode
        self._in_use: dict[int, set[int]] = {}  # for by_content: digest → numbers of equal requests
        self._conversations: list[_Conversation] = []
        self._over: str | None = None
        # The order of parallel requests, or of requests from another process, depends on timing. If True, random draws
        # are keyed by the content of a request: equal requests of an episode get equal draws in any order.
        self.by_content = False
        self.turn_rewards: dict[int, float] = {}

    @property
    def id(self) -> SampleId:
        """Id of the sample that this episode makes."""
        return self._request.id

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [dict(m) for m in self.prompt.messages] or [{"role": "user", "content": self.prompt.text}]

    @property
    def is_plain(self) -> bool:
        """Whether there is no chat template: the prompt is then the concatenated contents of the messages."""
        return self._chat.is_plain

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of answers (gconfig, or eval_gconfig)."""
        return self._request.params

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        with self._lock:
            # By place, not by arrival: parallel requests finish in any order.
            found = [self._exchanges[place] for place in sorted(self._exchanges)]
        if not self.by_content:
            return tuple(found)
        # With `by_content`, ids are digests. The training data needs turn numbers: 0, 1, … in the order of places.
        return tuple(
            replace(
                e, sample=replace(e.sample, id=self._request.id._replace(turn=i), turns=np.full_like(e.sample.turns, i))
            )
            for i, e in enumerate(found)
        )

    async def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any) -> dict:
        """The model's answer as an assistant message: `content`, and `tool_calls` if it calls tools.

        If the messages continue an earlier answer of this episode, new messages are appended to the sampled tokens of
        that answer. If the history was edited, the conversation is rendered again and trained as a separate sequence.
        `tools` are JSON schemas in the format of the OpenAI API. `sampling` may set max_new_tokens (at most gconfig's),
        min_new_tokens, stop and stop_token_ids.
        """
        return (await self.answer(messages, tools, **sampling)).message

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> ChatAnswer:
        """As `chat`, but returns the tokens, too."""
        # Copies: the environment may change its list of messages while it waits.
        messages = tuple(dict(m) for m in messages)
        key = _tools_key(tools)
        exchange = await self._exchange(self._render(messages, tools, key), sampling)
        message = self._chat.parse(exchange.sample.tokens.tolist())
        with self._lock:
            self._conversations.append(_Conversation((*messages, message), key, exchange))
        return ChatAnswer(message, exchange)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> int:
        """The tokens of a conversation up to where the next answer begins."""
        return len(self._render(tuple(messages), tools, _tools_key(tools)))

    async def complete(self, tokens: Sequence[int], **sampling: Any) -> Sample:
        """The model's completion of these tokens."""
        return (await self._exchange(tuple(int(t) for t in tokens), sampling)).sample

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Tokens of a text for `complete`; `begins`: the text is the start of a sequence and gets special tokens."""
        self._refuse_long(len(text))
        try:
            return self._chat.encode(text, begins=begins)
        except TemplateError as error:
            raise EpisodeError(str(error)) from error

    def decode(self, tokens: Sequence[int]) -> str:
        return self._chat.text(tokens)

    def reward(self, value: float) -> None:
        """Add `value` to the reward of the last answered turn.

        The episode's reward is the sum of turn rewards and the value that the environment returns. See
        actor.sequence_unit and env.turn_discount for how turn rewards are used.
        """
        value = float(value)
        if not math.isfinite(value):
            raise EpisodeError(f"a turn's reward is {value}; it must be a finite number")
        with self._lock:
            if not self._exchanges:
                raise EpisodeError("there is no answered turn to reward yet")
            # With `by_content`, a place does not begin with the number of the turn.
            turn = len(self._exchanges) - 1 if self.by_content else max(self._exchanges)[0]
            self.turn_rewards[turn] = self.turn_rewards.get(turn, 0.0) + value

    def close(self, why: str) -> None:
        """Refuse further requests with the message `why`; called by the driver."""
        with self._lock:
            self._over = why

    async def _exchange(self, prompt: tuple[int, ...], sampling: dict[str, Any]) -> Exchange:
        # Checked first: a request that cannot fit does not count as a turn.
        params = self._params(sampling, self._max_context - len(prompt))
        # One lock for all checks and the new number: parallel requests must not exceed max_turns together.
        with self._lock:
            if self._over is not None:
                raise EpisodeOverError(self._over)
            if self._num_asked >= self._max_turns:
                raise TooManyTurnsError(f"the episode has made {self._max_turns} requests, the maximum (env.max_turns)")
            turn, answered = self._num_asked, len(self._exchanges)
            self._num_asked += 1
            id, place = self._request.id._replace(turn=turn), (turn,)
            if self.by_content:
                # Requests made after equally many answers are ordered by their content.
                id = self._id_by_content(prompt, params)
                place = (answered, prompt, id.attempt, id.turn)
        try:
            # The driver's thread completes the future; this environment's event loop waits for it.
            sample = await asyncio.wrap_future(self._submit(Request(id, prompt, params)))
        except BaseException:
            with self._lock:  # a repeated request gets the same draws as this one
                self._in_use.get(id.attempt, set()).discard(id.turn)
            raise
        exchange = Exchange(prompt, sample)
        # After the end of an episode its sequences are fixed: a late answer is not recorded.
        with self._lock:
            if self._over is None:
                self._exchanges[place] = exchange
        return exchange

    def _id_by_content(self, prompt: tuple[int, ...], params: SamplingParams) -> SampleId:
        """The id with (digest of the request, number of equal requests) in place of (attempt, turn)."""
        own = self._request.id
        # The episode's own attempt is part of the digest: a repeated episode gets other draws.
        content = np.array(prompt, dtype=np.int64).tobytes() + repr((own.attempt, params)).encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=6).digest())
        used = self._in_use.setdefault(digest, set())
        # The lowest free number: equal requests that run at the same time get different draws.
        number = next(number for number in itertools.count() if number not in used)
        used.add(number)
        return own._replace(turn=number, attempt=digest)

    def _params(self, sampling: dict[str, Any], room: int) -> SamplingParams:
        if unknown := [name for name in sampling if name not in _SETTABLE]:
            raise EpisodeError(
                f"an episode cannot set {', '.join(unknown)}: gconfig applies to the whole run, because the trainer "
                f"needs the log-probs of that distribution; it can set {', '.join(_SETTABLE)}"
            )
        if room < 1:
            raise OutOfRoomError(
                f"the conversation fills the context of {self._max_context} tokens (gconfig.max_tokens)"
            )
        own = self._request.params
        given = {k: tuple([v] if isinstance(v, str) else v) if k.startswith("stop") else v for k, v in sampling.items()}
        params = replace(own, **given)
        # At least one token, and no more than the run allows or the context has room for.
        limit = max(1, min(int(params.max_new_tokens), own.max_new_tokens, room))
        return replace(params, max_new_tokens=limit, min_new_tokens=min(params.min_new_tokens, limit))

    def _render(self, messages: tuple[Message, ...], tools: Sequence[Any] | None, key: str) -> tuple[int, ...]:
        with self._lock:
            # The longest match leaves the fewest messages to render. Longest first: an episode of T turns then compares
            # T² messages and not T³.
            longest_first = sorted(self._conversations, key=lambda s: len(s.messages), reverse=True)
        # Other tools change the rendered prompt, so the earlier tokens would not fit.
        last = next((s for s in longest_first if s.tools == key and continues(s.messages, messages)), None)
        if last is not None:
            new = messages[len(last.messages) :]
            self._refuse_long(sum(len(str(m.get("content") or "")) for m in new))
            answer = last.exchange.sample.tokens.tolist()
            try:
                return last.exchange.tokens + self._chat.continue_after(answer, last.messages[:-1], new, tools)
            except TemplateError:
                pass  # it cannot be continued: render everything as a separate sequence
        # The conversation is the unchanged problem.
        elif not tools and len(messages) == len(self.messages) and all(map(same_message, messages, self.messages)):
            return self.prompt.tokens  # the data set has rendered it
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


def _tools_key(tools: Sequence[Any] | None) -> str:
    return json.dumps(list(tools), sort_keys=True, default=str) if tools else ""


def outcome_of(returned: Any, turn_rewards: Mapping[int, float]) -> Outcome | None:
    """The outcome for an environment's return value: a number, {"reward": number, part: number, …}, or None.

    Evaluations decide by the first part, `reward`, whether the episode was correct.

    >>> outcome_of({"reward": 1.0, "format": 0.5}, {0: 0.25})
    Score(value=1.25, parts={'reward': 1.0, 'format': 0.5})
    >>> outcome_of(0.5, {})
    Score(value=0.5, parts={})
    >>> outcome_of({"reward": None, "steps": 2}, {0: 1.0, 1: 2.0})  # the rewards of turns are all there is
    Score(value=3.0, parts={'reward': 3.0, 'steps': 2.0})
    """
    if returned is None:
        # Only turn rewards: their sum is the reward. None at all: the configured reward scores the episode.
        if not turn_rewards:
            return None
        returned, turn_rewards = sum(turn_rewards.values()), {}
    if not isinstance(returned, Mapping):
        returned = {"reward": returned}
    if turn_rewards and returned.get("reward", 0) is None:
        returned, turn_rewards = {**returned, "reward": sum(turn_rewards.values())}, {}
    parts = {str(name): _number(value, str(name)) for name, value in returned.items()}
    if "reward" not in parts:
        raise EpisodeError("an environment's dict needs a 'reward'; got " + (", ".join(parts) or "an empty one"))
    # `reward` becomes the first part, in whatever order the environment listed the parts.
    parts = {"reward": parts["reward"], **parts}
    value = parts["reward"] + sum(turn_rewards.values())
    if not math.isfinite(value):
        raise EpisodeError(f"the sum of the rewards is {value}; it must be a finite number")
    shown = {} if len(parts) == 1 and not turn_rewards else parts
    return Score(value, shown, {name: 0.0 for name in shown if name != "reward"})


def _number(value: Any, name: str) -> float:
    if not hasattr(value, "__float__") or isinstance(value, str | bytes):
        raise EpisodeError(f"{name} must be a number, got {type(value).__name__}: an environment returns a number, a "
                           "dict of numbers, or None")  # fmt: skip
    number = float(value)
    if not math.isfinite(number):
        raise EpisodeError(f"{name} is {number}; it must be a finite number")
    return number


# async (client, data) → a reward, {"reward": …, parts…}, or None: the configured reward scores the last completion.
Environment = Callable[[Client, Mapping[str, Any]], Awaitable[Any]]

CANCELLED = Failure("crash", "environment: its task was cancelled")
_LONGEST = 2000  # most characters kept of an environment's error message


async def play(environment: Environment, client: Client) -> Outcome | None:
    """The outcome of one episode; nothing is raised."""
    try:
        # A copy of the row: an environment may change it, also inside its lists.
        row = copy.deepcopy({"reference": client.prompt.reference, **client.prompt.data})
        return outcome_of(await environment(client, row), client.turn_rewards)
    except EpisodeError as error:
        # Limits are reached in every run; an error has a line that must be mended.
        lines = user_lines(error) if error.kind == "crash" else ""
        return Failure(error.kind, f"environment: {error}"[:_LONGEST] + lines)
    except asyncio.CancelledError:
        # By the driver, which has recorded the end and ignores this message, or by the environment itself.
        return CANCELLED
    except BaseException as error:  # a SystemExit in the user's code must not end this thread
        return Failure("crash", f"environment: {described(error)}")
