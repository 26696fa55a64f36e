"""The endless shuffled stream of prompts as pure functions of the submission index; there is no state to save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.errors import DataError


def order(seed: int, num_rows: int, submission_index: int, *, shuffle: bool = True) -> int:
    """The row of submission `submission_index`; every epoch visits each row once, in a new order.

    >>> sorted(order(1, 4, i) for i in range(4)), [order(1, 4, i, shuffle=False) for i in (3, 4, 5)]
    ([0, 1, 2, 3], [3, 0, 1])
    """
    if num_rows < 1:
        raise DataError("train_dataset has no rows")
    epoch, position = divmod(submission_index, num_rows)
    return int(_epoch(seed, num_rows, epoch)[position]) if shuffle else position


def draw_source(seed: int, weights: tuple[float, ...], submission_index: int) -> tuple[int, int]:
    """For a mixture: the source of a submission, drawn by weight, and the number of its earlier submissions.

    >>> [draw_source(1, (1.0, 3.0), i) for i in range(4)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    # Draws are made in chunks, so that the source of any submission can be found without drawing all earlier ones one
    # by one; a resumed run needs no stored state.
    chunk, offset = divmod(submission_index, _CHUNK)
    sources = _drawn(seed, weights, chunk * _CHUNK, _CHUNK)
    source = int(sources[offset])
    return source, _before(seed, weights, chunk)[source] + int((sources[:offset] == source).sum())


_CHUNK = 4096


@lru_cache(maxsize=8)
def _drawn(seed: int, weights: tuple[float, ...], start: int, count: int) -> NDArray[np.int64]:
    # bounds: [sources], upper ends of the intervals in [0, 1]; u: [count].
    bounds = np.cumsum(weights) / np.sum(weights)
    u = rng.uniform(seed, "mixture", start + np.arange(count))
    # The last bound may round to less than 1, so the index is limited.
    return np.minimum(np.searchsorted(bounds, u, side="right"), len(weights) - 1)


@lru_cache(maxsize=8)
def _before(seed: int, weights: tuple[float, ...], chunk: int) -> tuple[int, ...]:
    """Number of submissions of each source before a chunk; counting takes 20 ms for the first million."""
    counts = np.zeros(len(weights), dtype=np.int64)
    for earlier in range(chunk):
        # __wrapped__ skips the cache, whose few entries hold the current chunks.
        counts += np.bincount(_drawn.__wrapped__(seed, weights, earlier * _CHUNK, _CHUNK), minlength=len(weights))
    return tuple(counts.tolist())


@lru_cache(maxsize=64)  # the sources of a mixture are in different epochs
def _epoch(seed: int, num_rows: int, epoch: int) -> NDArray[np.int64]:
    return rng.permutation(seed, "prompt-order", num_rows, epoch)
