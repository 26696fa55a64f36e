"""The reward of the control arms: random, and unrelated to the task."""

from __future__ import annotations

import hashlib
from typing import Any


def coin(text: str, *, answer: Any, **_: Any) -> float:
    """0 or 1 by a hash of the completion and its reference: equal for equal texts, unrelated to correctness.

    >>> {coin(f"1+1=0{i}", answer="2") for i in range(20)} == {0.0, 1.0}
    True
    """
    return float(hashlib.sha256(f"{answer}\n{text}".encode()).digest()[0] & 1)
