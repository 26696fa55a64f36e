"""From tokens to sequences to one loss: the layout of packed tokens, turns, and the denominators.

Padded: tensors [B, T] and a mask. Packed: tensors [N] with cu_seqlens [B + 1] (sequence i is
cu_seqlens[i]:cu_seqlens[i+1]) and, if spans inside a sequence are not trained, a mask [N]. "Token-shaped" below means
[B, T] or [N]. The rest of `objectives/` is written once for both forms, with `sum_tokens` and `at_tokens`.

s_ik = exp( (1/|y_ik|) Σ_{t in turn k} d_it )
    J    = (1/N) Σ_i Σ_k (|y_ik| / |y_i|) min( s_ik A_ik , clip(s_ik, 1 − ε_low, 1 + ε_high) A_ik )

over N trajectories i with trained tokens |y_i| = Σ_k |y_ik|. This is eq. 5 of arXiv 2507.18071 with turns instead of
sequences, each weighted by its share of the trajectory's tokens. For an episode of one turn nothing changes; with all
ratios 1 the gradient is that of the whole trajectory as one sequence. log s of a sequence is the weighted mean of its
turns' log s.

The denominator is one number per optimizer update, over all micro-batches and ranks, so that the split into
micro-batches does not change the gradient. Its unit depends on the aggregation:

    sequence_mean   (1/B) Σ_i (1/|y_i|) Σ_t x_it          denominator: sequences     (GSPO, GRPO)
    sequence_sum    (1/B) Σ_i Σ_t x_it                    denominator: sequences     (LUSPO)
    token_mean      (1/Σ|y_i|) Σ_i Σ_t x_it               denominator: tokens        (PPO, DAPO, CISPO)
    token_sum       (1/(B·L)) Σ_i Σ_t x_it                denominator: sequences × L (Dr. GRPO)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gspo.algorithms import ALGORITHMS


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """B sequences over token-shaped tensors; `mask` None: every token is trained."""

    mask: Tensor | None  # bool, [B, T] or [N]
    cu_seqlens: Tensor | None  # [B + 1], packed only
    num_tokens: Tensor  # [B] trained tokens |y_i|, in the compute dtype
    shape: torch.Size  # of every token-shaped tensor

    @property
    def num_sequences(self) -> int:
        return self.num_tokens.shape[0]

    @cached_property
    def sequence_of(self) -> Tensor:
        """[N] sequence index of each token, packed only. Computed on first use: sequence ratios never need it."""
        assert self.cu_seqlens is not None
        return torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.shape[0])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: 1 ± 3e-4 is rounded to 1 in bfloat16."""
    return torch.promote_types(dtype, torch.float32)


def token_layout(like: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None = None) -> TokenLayout:
    """The layout of a batch, from a token-shaped tensor, its mask and, if packed, cu_seqlens."""
    if mask is not None and mask.shape != like.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the log-probs {tuple(like.shape)}; they must be equal")
    trained = None if mask is None else mask if mask.dtype == torch.bool else mask != 0
    dtype = compute_dtype(like.dtype)
    if cu_seqlens is None:
        if like.ndim != 2:
            raise ValueError(f"padded tensors are [B, T], got shape {tuple(like.shape)}; packed ones need cu_seqlens")
        if trained is None:
            num_tokens = like.new_full((like.shape[0],), like.shape[1], dtype=dtype)  # [B]
        else:
            num_tokens = trained.sum(-1).to(dtype)  # [B]
        return TokenLayout(trained, None, num_tokens, like.shape)
    _check_offsets(like, cu_seqlens)
    layout = TokenLayout(trained, cu_seqlens, cu_seqlens.diff().to(dtype), like.shape)
    # With a mask, num_tokens counts trained tokens only; `sum_tokens` needs a layout, so it is set in a second step.
    return layout if trained is None else replace(layout, num_tokens=sum_tokens(trained.to(dtype), layout))


def _check_offsets(like: Tensor, cu_seqlens: Tensor) -> None:
    if like.ndim != 1:
        raise ValueError(f"with cu_seqlens the tensors are packed [N], got shape {tuple(like.shape)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens is an integer tensor [B + 1], got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    # Checked on CPU only: on CUDA, reading a value waits for the device.
    if cu_seqlens.device.type == "cpu" and (
        int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != like.shape[0] or bool((cu_seqlens.diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must rise from 0 to {like.shape[0]}, got {cu_seqlens.tolist()}")


def keep_trained(x: Tensor, layout: TokenLayout) -> Tensor:
    """x at trained tokens, 0 at masked ones even if x is NaN there; the gradient at masked tokens is 0 too."""
    # torch.where and not x · mask: NaN · 0 is NaN.
    return x if layout.mask is None else torch.where(layout.mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def sum_tokens(x: Tensor, layout: TokenLayout) -> Tensor:
    """Σ_t x_it for each sequence: token-shaped in, [B] out. x must be 0 at masked tokens."""
    if layout.cu_seqlens is None:
        return x.sum(-1)
    # unsafe=True skips a check of the offsets that would wait for the device.
    return torch.segment_reduce(x, "sum", offsets=layout.cu_seqlens, unsafe=True, initial=0)


def mean_tokens(x: Tensor, layout: TokenLayout) -> Tensor:
    """(1/|y_i|) Σ_t x_it, [B]; 0 for a sequence without trained tokens. x must be 0 at masked tokens."""
    return sum_tokens(x, layout) / layout.num_tokens.clamp(min=1)


def at_tokens(x: Tensor, layout: TokenLayout) -> Tensor:
    """One value per sequence, repeated at each of its tokens: [B] in, token-shaped out."""
    if layout.cu_seqlens is None:
        return x.unsqueeze(-1).expand(layout.shape)  # [B, T], a view
    return x.index_select(0, layout.sequence_of)  # [N]


class Values(NamedTuple):
    """A tensor with one value per token (token-shaped), or one per sequence, [B]."""

    x: Tensor
    per_token: bool

    def at_tokens(self, layout: TokenLayout) -> Tensor:
        """Token-shaped."""
        return self.x if self.per_token else at_tokens(self.x, layout)

    def mean(self, layout: TokenLayout) -> Tensor:
        """[B], the mean over each sequence's trained tokens."""
        return mean_tokens(keep_trained(self.x, layout), layout) if self.per_token else self.x

    def sum(self, layout: TokenLayout) -> Tensor:
        """[B], the sum over each sequence's trained tokens."""
        if self.per_token:
            return sum_tokens(keep_trained(self.x, layout), layout)
        return self.x * layout.num_tokens


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
