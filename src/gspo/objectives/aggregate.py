"""From tokens and sequences to one loss: `loss == per_sequence.sum() / denominator`.

The denominator is one number per optimizer update, over all micro-batches and ranks, so that the split into
micro-batches does not change the gradient. Its unit depends on the aggregation:

    sequence_mean   (1/B) Σ_i (1/|y_i|) Σ_t x_it          denominator: sequences     (GSPO, GRPO)
    sequence_sum    (1/B) Σ_i Σ_t x_it                    denominator: sequences     (LUSPO)
    token_mean      (1/Σ|y_i|) Σ_i Σ_t x_it               denominator: tokens        (PPO, DAPO, CISPO)
    token_sum       (1/(B·L)) Σ_i Σ_t x_it                denominator: sequences × L (Dr. GRPO)
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from gspo.algorithms import ALGORITHMS
from gspo.objectives.layout import TokenLayout, mean_tokens, sum_tokens

Number = TypeVar("Number", int, float, Tensor)


def tokens(x: Tensor, layout: TokenLayout, aggregation: str) -> Tensor:
    """Each sequence's share of the numerator, from token values that are 0 at masked tokens. Returns [B]."""
    return mean_tokens(x, layout) if aggregation == "sequence_mean" else sum_tokens(x, layout)


def sequences(x: Tensor, layout: TokenLayout, aggregation: str) -> Tensor:
    """The same from one value per sequence, [B], as if each of its trained tokens had that value. Returns [B].

    A sequence without trained tokens contributes 0.
    """
    # The mean of |y_i| equal values is x, their sum x · |y_i|. clamp(max=1) is 1, or 0 without trained tokens.
    return x * (layout.num_tokens.clamp(max=1) if aggregation == "sequence_mean" else layout.num_tokens)


def denominator(
    name: str,
    *,
    num_sequences: Number,
    num_tokens: Number,
    max_new_tokens: int | None = None,
    aggregation: str | None = None,
) -> Number:
    """The value by which the loss of a whole optimizer update is divided, for preset `name`.

    Pass counts over all micro-batches and ranks of the update, skipped sequences included.

    >>> denominator("gspo", num_sequences=64, num_tokens=9000)
    64
    >>> denominator("dapo", num_sequences=64, num_tokens=9000)
    9000
    >>> denominator("dr_grpo", num_sequences=64, num_tokens=9000, max_new_tokens=512)
    32768
    """
    aggregation = aggregation or ALGORITHMS[name].aggregation
    if aggregation == "token_mean":
        return num_tokens
    if aggregation == "token_sum":
        if max_new_tokens is None:
            raise ValueError(f"{name}: token_sum divides by sequences × max_new_tokens; pass max_new_tokens")
        # A constant L instead of |y_i|: the length of a completion does not change the weight of its tokens.
        return num_sequences * max_new_tokens
    return num_sequences
