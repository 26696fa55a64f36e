"""What the scheduler (`engine.py`) needs of a stepper: the part of an in-process engine that runs the model.

A stepper computes the logits of the next token of every running row, in its own way: `packed.py` stores keys and values
itself, `by_length.py` uses transformers' caches or none. The scheduler owns requests, draws and stop rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray
from torch import Tensor

from gspo.sampling.local.rows import Rows
from gspo.types import PromptKey, Request, Sample


@dataclass(slots=True)
class StoredPrompt:
    """A prompt that was computed once for all of its rows."""

    logits: Tensor  # [V] at its last token; the first token of every row is drawn from them
    routes: NDArray | None  # [P, layers, top_k] experts of its positions; None for a dense model
    slot: int = 0  # `packed`: its group slot
    delta: int = 0  # `packed`: rotary position of the first token after it, minus its length
    cache: Any = None  # `by_length`: the cache that holds it
    index: int = 0  # `by_length`: its row in that cache


def first_of_each(requests: Iterable[Request]) -> list[Request]:
    """One request for each prompt, in order of first appearance."""
    found: dict[PromptKey, Request] = {}
    for request in requests:
        found.setdefault(request.key, request)
    return list(found.values())


@dataclass(slots=True)
class KeptRow:
    """The keys and values of an episode's last turn, for its next one."""

    tokens: tuple[int, ...]  # whose keys and values are stored: prompt and completion without the last token
    slot: int  # its group slot
    routes: NDArray | None  # [len(tokens), layers, top_k]; None for a dense model


class Finished(NamedTuple):
    """A row that has just finished; the table of rows still holds its tokens."""

    slot: int
    request: Request
    sample: Sample


class Step(NamedTuple):
    """The result of one token: N rows."""

    slots: NDArray  # [N] row slots
    logits: Tensor  # [N, V]
    routes: NDArray | None  # [N, layers, top_k]


class Stepper(Protocol):
    """The state of a stepper belongs to one table of rows; a new table gets a new stepper."""

    prompts: dict[PromptKey, StoredPrompt]
    kept: dict[tuple[int, int], KeptRow]  # by (submission, sample)

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the prompts of these requests that are needed and not stored yet; use up the rows kept for them."""
        ...

    def join(self, slots: NDArray) -> None:
        """These rows run from now on. Those that continue have tokens already."""
        ...

    def step(self) -> Step:
        """Feed the last token of every running row."""
        ...

    def keep(self, finished: Sequence[Finished], dropped: Sequence[PromptKey]) -> None:
        """Keep these rows in `kept`, if the stepper can. No request needs the dropped prompts any more."""
        ...

    def leave(self, slots: NDArray, moves: tuple[list[int], list[int]], dropped: Sequence[PromptKey]) -> None:
        """These rows are finished; then rows moved (from, to) in the table; no request needs the dropped prompts."""
        ...

    def num_bytes(self) -> int: ...


class Engine(NamedTuple):
    """A stepper that may be chosen for a model."""

    name: str
    attention: str  # the attention implementation while it runs
    start: Callable[[Rows, Counter[str]], Stepper]  # for a table of rows; counts what it computes
    is_packed: bool = False  # a forward is one sequence [1, tokens]
