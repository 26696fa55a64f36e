"""The weights probe: log-probs of fixed random sequences tell whether two processes hold the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo import rng

# Log-probs of every token but the first of each sequence.
ScoreSequences = Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]]

_PART = 256  # positions whose log-probs are computed together

# Largest |log-prob difference| between two correct computations of the probe, by the dtype of the weights.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


def probe_sequences(num_vocab: int, count: int = 3, length: int = 12) -> list[list[int]]:
    """`count` fixed random sequences of `length` tokens."""
    return rng.generator(0, "weights probe").integers(0, num_vocab, (count, length)).tolist()


def sequence_logp(model: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Log-probs of every token but the first of each sequence, by a plain forward pass."""
    values = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([list(tokens)], device=model.device)  # [1, T]
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]  # [T−1, V]
            # float64, so that the result depends on the logits and not on the rounding of the softmax; in parts, as it
            # takes eight bytes per token and word.
            parts = [
                torch.log_softmax(part.double(), -1).gather(1, chosen)[:, 0].float()
                for part, chosen in zip(logits.split(_PART), ids[0, 1:, None].split(_PART), strict=True)
            ]
            values.append(torch.cat(parts).cpu().numpy())  # [T−1]
    return values


def mismatch(one: Sequence[NDArray], other: Sequence[NDArray], dtype: torch.dtype) -> str | None:
    """Why two probe results come from different weights; None if they agree."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return "the probe result has another number of log-probs"
    gap = float(np.abs(np.concatenate(one) - np.concatenate(other)).max())  # largest difference of any token
    bound = TOLERANCE.get(dtype, 0.2)
    if gap <= bound:  # False for NaN
        return None
    return f"log-probs of the probe differ by {gap:.2g} (allowed {bound:g}): it samples from another model"


class ProbeCheck:
    """Compares the probe results of servers with the trainer's, or with the first server's if `reference` is None."""

    def __init__(self, num_vocab: int, dtype: torch.dtype, reference: ScoreSequences | None) -> None:
        self.sequences = probe_sequences(num_vocab)
        self.expected: list[NDArray] | None = None  # for the version published last
        self._dtype, self._reference = dtype, reference

    def reference_values(self) -> list[NDArray[np.float32]] | None:
        """What the trainer expects of its current weights."""
        return None if self._reference is None else self._reference(self.sequences)

    def mismatch(self, values: Any) -> str | None:
        """Why a server's result is wrong; None if it agrees. The first result is the reference if there is none."""
        try:
            rows = [np.array(row, dtype=np.float64) for row in values]
        except (TypeError, ValueError):
            rows = []
        if not rows:
            return "it did not report the log-probs of the probe"
        # Without a reference of the trainer, the first server's result becomes the reference.
        if self.expected is None:
            self.expected = rows
        return mismatch(rows, self.expected, self._dtype)
