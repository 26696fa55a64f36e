"""A turn as the unit of the ratio: each assistant turn of an episode gets its own s, its own clip, its own advantage.

    s_ik = exp( (1/|y_ik|) Σ_{t in turn k} d_it )
    J    = (1/N) Σ_i Σ_k (|y_ik| / |y_i|) min( s_ik A_ik , clip(s_ik, 1 − ε_low, 1 + ε_high) A_ik )

over N trajectories i with trained tokens |y_i| = Σ_k |y_ik|. This is eq. 5 of arXiv 2507.18071 with turns instead of
sequences, each weighted by its share of the trajectory's tokens. For an episode of one turn nothing changes; with all
ratios 1 the gradient is that of the whole trajectory as one sequence. log s of a sequence is the weighted mean of its
turns' log s.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn_cuts(turns: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed sequences cut where a turn begins: (cu_seqlens of turns [U + 1], sequence of each turn [U]).

    `turns` [N] numbers the turn of each trained token. A sequence without tokens has no turn.

    >>> turn_cuts(torch.tensor([0, 0, 1, 0]), torch.tensor([0, 3, 4]))
    (tensor([0, 2, 3, 4]), tensor([0, 0, 1]))
    """
    # [N + 1] True where a turn begins, and at the end
    begins = torch.ones(len(turns) + 1, dtype=torch.bool, device=turns.device)
    begins[1:-1] = turns[1:] != turns[:-1]
    # Two neighbouring sequences can have the same turn number at their border.
    begins[cu_seqlens] = True
    cuts = begins.nonzero().squeeze(-1)  # [U + 1]
    # right=True: a cut where a sequence begins belongs to that sequence, and empty sequences are passed over.
    sequence = torch.searchsorted(cu_seqlens, cuts[:-1], right=True) - 1  # [U]
    return cuts, sequence


def fold(values: Tensor, sequence: Tensor, num_sequences: int, weights: Tensor | None = None) -> Tensor:
    """Σ over the turns of each sequence, [U] → [B]; with weights [U] their weighted mean."""
    total = values.new_zeros(num_sequences)  # [B]
    if weights is None:
        return total.index_add(0, sequence, values)
    # clamp: a sequence without turns gives 0/1.
    mass = total.index_add(0, sequence, weights).clamp(min=1)  # [B]
    return total.index_add(0, sequence, values * weights) / mass
