"""Which tokens belong to which sequence: one view of padded and of packed batches.

Padded: tensors [B, T] and a mask. Packed: tensors [N] with cu_seqlens [B + 1] (sequence i is
cu_seqlens[i]:cu_seqlens[i+1]) and, where spans inside are not trained, a mask [N].
Everything else in `objectives/` is written once, on `sum_tokens` and `spread`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """B sequences over token-shaped tensors; `mask` None means that every token is trained."""

    mask: Tensor | None  # bool, [B, T] or [N]
    cu_seqlens: Tensor | None  # [B + 1], packed only
    num_tokens: Tensor  # [B] trained tokens |y_i|, in the compute dtype
    shape: torch.Size  # of every token-shaped tensor

    @property
    def num_sequences(self) -> int:
        return self.num_tokens.shape[0]

    @cached_property
    def sequence_of(self) -> Tensor:
        """[N] sequence index of each token, packed only; made when first asked for, sequence ratios never do."""
        assert self.cu_seqlens is not None
        return torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.shape[0])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 at least: 1 ± 3e-4 is 1 in bfloat16."""
    return torch.promote_types(dtype, torch.float32)


def rows(like: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None = None) -> Rows:
    """Read the layout of a batch from a token-shaped tensor, its mask and, if packed, cu_seqlens."""
    if mask is not None and mask.shape != like.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the log-probs {tuple(like.shape)}; they must be equal")
    keep = None if mask is None else mask if mask.dtype == torch.bool else mask != 0
    dtype = compute_dtype(like.dtype)
    if cu_seqlens is None:
        if like.ndim != 2:
            raise ValueError(f"padded tensors are [B, T], got shape {tuple(like.shape)}; packed ones need cu_seqlens")
        if keep is None:
            num_tokens = like.new_full((like.shape[0],), like.shape[1], dtype=dtype)
        else:
            num_tokens = keep.sum(-1).to(dtype)
        return Rows(keep, None, num_tokens, like.shape)
    if like.ndim != 1:
        raise ValueError(f"with cu_seqlens the tensors are packed [N], got shape {tuple(like.shape)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens is an integer tensor [B + 1], got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    # On CPU reading a value costs nothing; on CUDA it would wait for the device.
    if cu_seqlens.device.type == "cpu" and (
        int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != like.shape[0] or bool((cu_seqlens.diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must rise from 0 to {like.shape[0]}, got {cu_seqlens.tolist()}")
    layout = Rows(keep, cu_seqlens, cu_seqlens.diff().to(dtype), like.shape)
    return layout if keep is None else replace(layout, num_tokens=sum_tokens(keep.to(dtype), layout))


def keep_trained(x: Tensor, rows: Rows) -> Tensor:
    """x at trained tokens and 0 elsewhere, whatever garbage stood there; its gradient there is 0 too."""
    return x if rows.mask is None else torch.where(rows.mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def sum_tokens(x: Tensor, rows: Rows) -> Tensor:
    """Σ_t x_it for each sequence: token-shaped in, [B] out. x must be 0 at masked tokens."""
    if rows.cu_seqlens is None:
        return x.sum(-1)
    # unsafe=True skips a check of the offsets that would wait for the device.
    return torch.segment_reduce(x, "sum", offsets=rows.cu_seqlens, unsafe=True, initial=0)


def mean_tokens(x: Tensor, rows: Rows) -> Tensor:
    """(1/|y_i|) Σ_t x_it; 0 for a sequence without trained tokens. x must be 0 at masked tokens."""
    return sum_tokens(x, rows) / rows.num_tokens.clamp(min=1)


def spread(x: Tensor, rows: Rows) -> Tensor:
    """One value per sequence, repeated at each of its tokens: [B] in, token-shaped out."""
    if rows.cu_seqlens is None:
        return x.unsqueeze(-1).expand(rows.shape)
    return x.index_select(0, rows.sequence_of)
