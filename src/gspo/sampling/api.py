"""The sampler's interface, asynchronous in form for all implementations (in process, HTTP, vLLM).

`submit` never blocks. `completed` yields samples as they finish, in any order; `Sample.id` tells which request a sample
belongs to. The in-process engine decodes inside `completed()`; a client of servers only waits there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gspo.types import Request, Sample

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
