"""Counter-based random numbers: every draw is a pure function of its key, so there is no RNG state to save.

A key is (seed, purpose, *counters); for sampled tokens the counters are (submission index, sample, turn, token,
attempt). The order of completion, the batch composition and restarts cannot change a draw. Torch-free, vectorised over
numpy arrays.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULT_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULT_2 = np.uint64(0x94D049BB133111EB)


def _mix(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a bijection of 64 bits in which every output bit depends on every input bit."""
    h = (h ^ (h >> np.uint64(30))) * _MULT_1
    h = (h ^ (h >> np.uint64(27))) * _MULT_2
    return h ^ (h >> np.uint64(31))


def bits(seed: int, purpose: str, *counters: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for each key; counters broadcast against each other.

    >>> bits(1, "sample", [0, 1]).shape
    (2,)
    """
    # CRC-32 and not hash(), which depends on PYTHONHASHSEED.
    start = np.uint64(seed & 0xFFFFFFFFFFFFFFFF) ^ (np.uint64(zlib.crc32(purpose.encode())) << np.uint64(32))
    with np.errstate(over="ignore"):
        h = _mix(np.asarray(start, dtype=np.uint64) + _GOLDEN)
        for counter in counters:
            # Chaining through the finaliser makes (1, 2) and (2, 1) different keys.
            h = _mix((h ^ np.asarray(counter).astype(np.uint64)) + _GOLDEN)
    return h


def uniform(seed: int, purpose: str, *counters: ArrayLike) -> NDArray[np.float64]:
    """A float in [0, 1) for each key, with 53 random bits."""
    return (bits(seed, purpose, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A numpy generator started from one key, for code that needs many draws (shuffles, synthetic data)."""
    return np.random.Generator(np.random.Philox(key=int(bits(seed, purpose, *counters))))


def permutation(seed: int, purpose: str, n: int, *counters: int) -> NDArray[np.int64]:
    """A permutation of range(n) that depends on the key only, for example one per epoch."""
    return generator(seed, purpose, *counters).permutation(n)
