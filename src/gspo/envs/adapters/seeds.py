"""Problems of environments that are told apart by a reset seed."""

from __future__ import annotations

from typing import Any

# Held-out seeds begin here, so that no training seed is among them.
HELD_OUT = 1_000_000
_TRAIN, _TEST = 4096, 256


def seed_rows(prompt: str, split: str, size: int | None, first_held_out: int = HELD_OUT) -> list[dict[str, Any]]:
    """One row per reset seed: 0, 1, … for training, 1,000,000 and up held out. All have the same prompt.

    >>> seed_rows("Reach the goal.", "test", 2)[1]
    {'prompt': 'Reach the goal.', 'seed': 1000001}
    """
    held_out = split != "train"
    first, num = (first_held_out, _TEST) if held_out else (0, _TRAIN)
    return [{"prompt": prompt, "seed": first + i} for i in range(min(size or num, HELD_OUT))]
