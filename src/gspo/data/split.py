"""The held-out part of a source that has no test split: chosen by a hash of each problem's text."""

from __future__ import annotations

import hashlib

HELD_OUT = ("test", "valid", "validation", "val", "dev", "eval", "heldout")


def in_held_out(text: str, share: float) -> bool:
    """Whether a problem belongs to the held-out part.

    >>> in_held_out("2+2=", 0.0), in_held_out("2+2=", 1.0)
    (False, True)
    """
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
