"""The held-out part of a source that has no test split: chosen by a hash of each problem's text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

HELD_OUT = ("test", "valid", "validation", "val", "dev", "eval", "heldout")
ONE_IN = 20  # a row in so many is held out
FEW = ONE_IN  # with fewer rows nothing need be held out
MOST = 0.25  # largest share that may be held out


def in_held_out(text: str, share: float) -> bool:
    """Whether a problem belongs to the held-out part.

    >>> in_held_out("2+2=", 0.0), in_held_out("2+2=", 1.0)
    (False, True)
    """
    return _hash(text) < share * 2**64


class Division(NamedTuple):
    """Which rows are held out, and what a user should know about it (empty: nothing)."""

    held_out: list[bool] | None  # None: the rows are too few, so training and evaluation use all of them
    note: str = ""


def divide(texts: Sequence[str]) -> Division:
    """Hold out about 5 % of the rows, by their prompts.

    Equal prompts are on the same side. The exception are rows with so few different prompts that a side would be empty,
    or more than a quarter held out (an environment may have one prompt for all rows): these are divided row by row.

    >>> divide(["guess"] * 60).held_out.count(True), divide(["a", "b"]).held_out
    (3, None)
    """
    total = len(texts)
    held = [in_held_out(text, 1 / ONE_IN) for text in texts]
    if any(held) and not all(held) and (total < FEW or sum(held) <= MOST * total):
        return Division(held)
    if total < FEW:
        return Division(None, f"{total} rows are too few to hold some out, so evaluation uses the training rows")
    # Equal prompts are told apart by their position among each other.
    seen, keys = Counter[str](), list[int]()
    for text in texts:
        keys.append(_hash(f"{text} {seen[text]}"))
        seen[text] += 1
    chosen = set(sorted(range(total), key=keys.__getitem__)[: total // ONE_IN])
    prompts = "one prompt" if len(seen) == 1 else f"{len(seen):,} different prompts"
    note = f"{total:,} rows have {prompts}: {len(chosen):,} rows are held out by position, not by prompt"
    return Division([row in chosen for row in range(total)], note)


def _hash(text: str) -> int:
    """64 bits of a text; white space does not matter."""
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
