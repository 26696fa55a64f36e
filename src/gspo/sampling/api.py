"""The sampler's interface: asynchronous in form, whoever implements it (in process, HTTP, vLLM).

`submit` never blocks and `completed` streams samples as they finish, in any order; who they are is in
`Sample.id`. The in-process engine decodes inside `completed()`; a client of a server only waits there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gspo.types import Request, Sample

if TYPE_CHECKING:
    import torch


class Sampler(Protocol):
    """What `train/` knows of a sampler. Every wait has a deadline; a missed one raises RolloutError."""

    @property
    def version(self) -> int:
        """Of the weights that sample now; every token is tagged with it."""
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
        """Give up caches (and weights, where they are the sampler's own) so that a trainer can use the device."""
        ...

    def wake(self) -> None: ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Sample from `version` on. None: the weights are shared with the trainer and changed in place already.
        Cached keys and values of older weights are dropped; outstanding samples re-prefill."""
        ...

    def health(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...
