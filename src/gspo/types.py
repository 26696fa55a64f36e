"""The objects that folders pass to each other. Frozen, torch-free, each with an example.

Vocabulary: a *prompt* is answered by a *group* of *samples*; each sample has one *completion* (its tokens after the
prompt); a *step* trains on one rollout batch of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]

# The arrays of a Sample that have one entry per token, [T]. `Sample.concatenate` and `Sample.up_to` handle all of them.
TOKEN_ARRAYS = ("tokens", "behavior_logp", "versions", "mask", "turns")

# A recorded kept set has at most this many tokens: 16 KB per sampled token. If top-p, top-k or min-p keep more, only
# the most likely ones of them are sampled from, so that the recorded set is always the whole set.
MAX_KEPT = 4096


class SampleId(NamedTuple):
    """The identity of a sample, and the key of its random numbers.

    >>> SampleId(submission=17, sample=3)
    SampleId(submission=17, sample=3, turn=0, attempt=0)
    """

    submission: int  # position of its prompt in the run's endless stream of prompts
    sample: int  # index inside the group
    turn: int = 0  # assistant turn of an episode
    attempt: int = 0  # increased when the same sample must be drawn again, e.g. after a refill


class ImageFile(NamedTuple):
    """An image that can be opened as often as it is needed."""

    name: str  # for people: a file, or row and column
    open: Callable[[], Any]  # → PIL.Image.Image


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a prompt. Pixels are not kept: `prepare` opens the images again whenever a model needs them.

    Two of them are equal if their pixels are.

    >>> Images("9f86d0", dict, names=("cat.png",), sizes=((448, 448),)) == Images("9f86d0", dict)
    True
    """

    digest: str  # sha256 of sizes and pixels, in their order
    # The arguments of the model for these images, made by the model's own processor: pixel_values and others.
    prepare: Callable[[], Mapping[str, NDArray[Any]]] = field(compare=False, repr=False)
    names: tuple[str, ...] = field(default=(), compare=False)  # where each image is from: a file, or row and column
    sizes: tuple[tuple[int, int], ...] = field(default=(), compare=False)  # width and height of each
    # A small WebP file of all of them, for people.
    thumbnail: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)


# The identity of a prompt: its tokens and the digest of its images ("" without images). Two prompts with the same
# tokens and other images never share a prefill, a group or a cache.
PromptKey = tuple[tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class ShownPrompt:
    """A prompt that shows images."""

    tokens: tuple[int, ...]
    images: Images

    @property
    def key(self) -> PromptKey:
        return self.tokens, self.images.digest


@dataclass(frozen=True, eq=False)
class Shown:
    """Which segments of a packed row belong to prompts with images."""

    prompts: tuple[ShownPrompt, ...]
    of_segment: NDArray[np.int64]  # [S] index of the prompt that a segment belongs to or continues; −1: text alone
    num_prompt: NDArray[np.int64]  # [S] how many of its first tokens are the prompt; 0 if it comes after the prompt

    @staticmethod
    def of(prompts: Sequence[ShownPrompt | None], num_prompt: Any) -> Shown | None:
        """`prompts`: that of each segment, [S]. Equal ones are encoded once. None: text alone."""
        found = {prompt.key: prompt for prompt in prompts if prompt is not None}
        numbers = {key: number for number, key in enumerate(found)}
        of_segment = np.array([-1 if prompt is None else numbers[prompt.key] for prompt in prompts], dtype=np.int64)
        return Shown(tuple(found.values()), of_segment, np.array(num_prompt, dtype=np.int64)) if found else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered to tokens once; text is never tokenised again.

    >>> Prompt(tokens=(5, 6, 7), text="2+2=", data={"answer": "4"}).data["answer"]
    '4'
    """

    tokens: tuple[int, ...]
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)  # the row's columns as they are, passed to rewards
    source: str = ""  # the data set it came from
    row: int = 0  # its row there
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation before rendering, for judges and reward models
    reference: Any = None  # the final answer, which built-in rewards compare with; None: the row has no answer
    images: Images | None = None  # what it shows; `tokens` contain the placeholders for all features of these images
    target: Sample | None = None  # the data set's completion, for supervised fine-tuning (`data/chat.py`)

    @property
    def shown(self) -> ShownPrompt | None:
        """Tokens and images, for models; None: text alone."""
        return None if self.images is None else ShownPrompt(self.tokens, self.images)

    @property
    def answer(self) -> Any:
        """The right answer, to be shown."""
        return self.data.get("answer") if self.reference is None else self.reference


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn. `greedy` is argmax; log-probs are then of the tempered distribution.

    >>> SamplingParams(max_new_tokens=64, temperature=1.0).top_p
    1.0
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    record_kept: bool = False  # record `Extras.kept`; sets are then at most MAX_KEPT tokens large

    @property
    def is_truncated(self) -> bool:
        """Whether only a part of the vocabulary is sampled from at each token."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a sampler for one completion. Requests with equal `key` share a prefill and its cache.

    `prefix` continues an interrupted sample: its tokens are kept and prefilled again.

    >>> Request(SampleId(0, 0), (1, 2, 3), SamplingParams(max_new_tokens=8)).prefix is None
    True
    """

    id: SampleId
    prompt: tuple[int, ...]
    params: SamplingParams
    prefix: Sample | None = None
    # A hint: the next request of the same (submission, sample) probably continues this one, so a sampler may keep keys
    # and values of this row for it (`sampling.api.KeepsCache`); not of one with images.
    keep_cache: bool = field(default=False, compare=False)
    # The Prompt that `prompt` was rendered from, for environments and images; it stays in the trainer's process.
    origin: Prompt | None = field(default=None, compare=False, repr=False)

    @property
    def shown(self) -> ShownPrompt | None:
        """The prompt with its images; None: text alone."""
        images = None if self.origin is None else self.origin.images
        return None if images is None else ShownPrompt(self.prompt, images)

    @property
    def key(self) -> PromptKey:
        """The identity of the prompt."""
        return (self.prompt, "") if (shown := self.shown) is None else shown.key


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The kept set of each token: the part of the vocabulary that top-p, top-k or min-p left to sample it from.

    >>> kept = Kept.of([[4, 9], [9]])
    >>> Kept.concatenate([kept, None], [2, 1]).counts.tolist(), kept.up_to(1).ids.tolist()
    ([2, 1, 0], [4, 9])
    """

    counts: NDArray[np.int32]  # [T] tokens in each set; 0: the whole vocabulary
    ids: NDArray[np.int32]  # [Σ counts] the sets, one after another, each ascending

    @staticmethod
    def of(sets: Sequence[Any]) -> Kept:
        counts = np.array([len(ids) for ids in sets], dtype=np.int32)
        return Kept(counts, np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32))

    @staticmethod
    def whole(num: int) -> Kept:
        """Of `num` tokens that were not sampled from a truncated distribution, or not sampled at all."""
        return Kept(np.zeros(num, dtype=np.int32), np.zeros(0, dtype=np.int32))

    @staticmethod
    def concatenate(parts: Sequence[Kept | None], lengths: Sequence[int]) -> Kept | None:
        """Of sequences of these lengths, end to end; None if none of them has sets."""
        if all(part is None for part in parts):
            return None
        known = [part or Kept.whole(num) for part, num in zip(parts, lengths, strict=True)]
        return Kept(np.concatenate([p.counts for p in known]), np.concatenate([p.ids for p in known]))

    def sets(self) -> list[NDArray[np.int32]]:
        """One array of ids per token."""
        return np.split(self.ids, np.cumsum(self.counts)[:-1]) if len(self.counts) else []

    def up_to(self, num: int) -> Kept:
        """Of the first `num` tokens."""
        return Kept(self.counts[:num], self.ids[: self.counts[:num].sum()])

    def where(self, mask: NDArray[np.bool_]) -> Kept:
        """Of the tokens at which `mask` [T] is True."""
        return Kept(self.counts[mask], self.ids[np.repeat(mask, self.counts)])


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts that the routers of a mixture of experts chose; uint8, or int16 for more than 256 experts."""

    prompt: NDArray[np.integer[Any]]  # [P, layers, top_k] at the prompt's positions; one array for the whole group
    own: NDArray[np.integer[Any]]  # [T, layers, top_k] at the position that predicted each token

    @property
    def inputs(self) -> NDArray[np.integer[Any]]:
        """At every position but the last token's, [P + T − 1, layers, top_k]."""
        # The prompt's last token predicts the first token: the last row of `prompt` is the first row of `own`.
        return np.concatenate([self.prompt[:-1], self.own])


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What only some runs have of a sample. Code that passes samples on uses the operations and names no field.

    >>> Extras.concatenate([Extras(kept=Kept.of([[4]])), Extras()], [1, 2]).kept.counts.tolist()
    [1, 0, 0]
    """

    routes: Routes | None = None  # mixture of experts only
    kept: Kept | None = None  # truncated sampling only: the tokens that each token was drawn from

    @staticmethod
    def concatenate(parts: Sequence[Extras], lengths: Sequence[int]) -> Extras:
        """Of sequences of these lengths, end to end, after the prompt of the first."""
        # Routes cover all tokens or are left out; kept sets may be unknown for a part of them.
        routes = [part.routes for part, num in zip(parts, lengths, strict=True) if num]
        known = [each for each in routes if each is not None]
        joined = Routes(known[0].prompt, np.concatenate([each.own for each in known])) if known else None
        kept = Kept.concatenate([part.kept for part in parts], lengths)
        return Extras(joined if len(known) == len(routes) else None, kept)

    def up_to(self, num: int) -> Extras:
        """Of the first `num` tokens."""
        routes = None if self.routes is None else replace(self.routes, own=self.routes.own[:num])
        return Extras(routes, None if self.kept is None else self.kept.up_to(num))

    def of_prompt(self, begin: int) -> Extras:
        """Of the prompt's tokens from `begin` on, as if they were a completion of those before."""
        if self.routes is None:
            return Extras()
        return Extras(Routes(self.routes.prompt[:begin], self.routes.prompt[begin - 1 : -1]))

    @staticmethod
    def arrays(parts: Sequence[Extras], lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Of several sequences, end to end, as checkpoints store them."""
        routes = [part.routes for part in parts if part.routes is not None]
        kept = Kept.concatenate([part.kept for part in parts], lengths)
        arrays: dict[str, NDArray[Any]] = {} if kept is None else {"kept_counts": kept.counts, "kept_ids": kept.ids}
        # Stored only if every sequence has them.
        if len(routes) == len(parts):
            arrays["routes"] = np.concatenate([each.own for each in routes])
            arrays["prompt_routes"] = np.concatenate([each.prompt for each in routes])
        return arrays

    @staticmethod
    def of_arrays(
        arrays: Mapping[str, NDArray[Any]], lengths: Sequence[int], prompt_lengths: Sequence[int]
    ) -> list[Extras]:
        """One for each sequence, from `arrays`."""
        routes = kept = [None] * len(lengths)
        if "routes" in arrays:
            routes = map(Routes, cut(arrays["prompt_routes"], prompt_lengths), cut(arrays["routes"], lengths))
        if "kept_counts" in arrays:
            counts = cut(arrays["kept_counts"], lengths)
            ids = cut(arrays["kept_ids"], [int(each.sum()) for each in counts])
            kept = [Kept(*each) if each[0].any() else None for each in zip(counts, ids, strict=True)]
        return [Extras(*each) for each in zip(routes, kept, strict=True)]


def cut(array: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Copies of parts of these lengths, in their order: a slice would keep the whole array in memory."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [array[end - num : end].copy() for end, num in zip(ends, lengths, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion, or one episode (docs/episodes.md): arrays with one entry per token, [T].

    Requests of an episode that continue each other are one sequence, with the tool and environment tokens between them
    (mask False). A request that does not continue an earlier one begins another sequence of the same sample, in `rest`.

    >>> Sample.of(SampleId(0, 0), tokens=[4, 9], behavior_logp=[-0.1, -0.7], version=3).versions.tolist()
    [3, 3]
    """

    id: SampleId
    tokens: NDArray[np.int32]  # a sampled EOS is one of them
    behavior_logp: NDArray[np.float32]  # of the distribution actually sampled
    versions: NDArray[np.int32]  # weight version that sampled each token
    mask: NDArray[np.bool_]  # True at trained tokens (False: tool and environment tokens)
    turns: NDArray[np.int16]  # assistant turn of each token
    finish: FinishReason
    extras: Extras = Extras()
    prompt: tuple[int, ...] | None = None  # the tokens before it, if they are not its group's prompt
    rest: tuple[Sample, ...] = ()  # the episode's further sequences, each with its prompt; they have no rest
    outcome: Outcome | None = None  # the environment's reward; None: the reward functions compute it
    turn_rewards: Mapping[int, float] = field(default_factory=dict)  # part of the outcome's value, by turn

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """The sample's sequences: itself and `rest`."""
        return (self, *self.rest)

    @property
    def is_episode(self) -> bool:
        """Whether it comes from an environment."""
        return self.outcome is not None or bool(self.rest) or bool(self.turns.any())

    @property
    def trained_kept(self) -> Kept | None:
        """The kept sets of its trained tokens."""
        return None if self.extras.kept is None else self.extras.kept.where(self.mask)

    @property
    def _last(self) -> Sample:
        return max(self.sequences, key=lambda s: int(s.turns.max(initial=0)))

    @property
    def ending(self) -> FinishReason:
        """The finish reason of the last turn."""
        return self._last.finish

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """The tokens that rewards read as the answer: those of an episode's last turn, else all."""
        last = self._last
        return last.tokens if not last.turns.any() else last.tokens[last.mask & (last.turns == last.turns.max())]

    @staticmethod
    def concatenate(parts: Sequence[Sample]) -> Sample:
        """The tokens of all parts end to end, with their extras; every other field is that of the last part.

        >>> one = Sample.of(SampleId(0, 0), [4], [-0.1], version=3)
        >>> Sample.concatenate([one, Sample.of(SampleId(0, 0), [9], [-0.7], version=4)]).versions.tolist()
        [3, 4]
        """
        joined: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in TOKEN_ARRAYS}
        extras = Extras.concatenate([p.extras for p in parts], [len(p.tokens) for p in parts])
        return replace(parts[-1], **joined, extras=extras)

    def up_to(self, num: int) -> Sample:
        """The first `num` tokens.

        >>> Sample.of(SampleId(0, 0), [4, 9], [-0.1, -0.7], version=3).up_to(1).tokens.tolist()
        [4]
        """
        arrays: dict[str, Any] = {name: getattr(self, name)[:num] for name in TOKEN_ARRAYS}
        return replace(self, **arrays, extras=self.extras.up_to(num))

    @staticmethod
    def of(
        id: SampleId, tokens: Any, behavior_logp: Any, version: int, finish: FinishReason = "stop", mask: Any = None
    ) -> Sample:
        tokens_array = np.asarray(tokens, dtype=np.int32)
        num = len(tokens_array)
        return Sample(
            id=id,
            tokens=tokens_array,
            behavior_logp=np.asarray(behavior_logp, dtype=np.float32),
            versions=np.full(num, version, dtype=np.int32),
            mask=np.ones(num, dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_),
            turns=np.full(num, id.turn, dtype=np.int16),
            finish=finish,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A computed reward, with its named parts before weighting.

    >>> Score(1.1, {"math": 1.0, "format": 0.1}).value
    1.1
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    # Of parts whose weight is not 1. Weight 0: the part is shown and not added.
    weights: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """The reward function or the environment failed; never a number. The sample is masked and counted.

    >>> Failure("timeout", "numeric: no answer in 5 s").kind
    'timeout'
    """

    kind: Literal["timeout", "crash", "infra", "limit"]  # limit: the episode did not end within its limits
    message: str


Outcome = Score | Failure


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, its samples, and their rewards.

    >>> Group(0, Prompt((1,), "?"), samples=(), texts=(), outcomes=()).outcomes
    ()
    """

    submission: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    texts: tuple[str, ...]  # completions as text, for rewards and people
    outcomes: tuple[Outcome, ...]
