"""The endless shuffled stream of prompts, as a pure function: a resumed run needs only its submission index."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.errors import DataError


def order(seed: int, num_rows: int, submission_index: int, *, shuffle: bool = True) -> int:
    """The row that is submitted as number `submission_index`: every epoch visits each row once, in its own order.

    >>> sorted(order(1, 4, i) for i in range(4)), [order(1, 4, i, shuffle=False) for i in (3, 4, 5)]
    ([0, 1, 2, 3], [3, 0, 1])
    """
    if num_rows < 1:
        raise DataError("train_dataset is empty: there is no row to submit")
    epoch, position = divmod(submission_index, num_rows)
    return int(_epoch(seed, num_rows, epoch)[position]) if shuffle else position


@lru_cache(maxsize=4)
def _epoch(seed: int, num_rows: int, epoch: int) -> NDArray[np.int64]:
    return rng.permutation(seed, "prompt-order", num_rows, epoch)
