"""The forest of segments on CUDA: the visibility of `tree.py` as a block mask for torch's flex attention.

Registered with transformers as `gspo_tree_flex`. Segments are numbered in a depth-first walk; a segment is an ancestor
of another one iff the other's number lies in its interval. So visibility is three comparisons per pair, at any depth,
and blocks without a visible pair are skipped. On a CPU it runs forward only and uncompiled, which is how it is tested.
On a user's GPU `PolicyModule.probe` compares its result at load, and falls back to `tree.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from gspo.models.tree import EVERYTHING, Reach, TreeLayout, tree_call, with_sinks

FLEX = "gspo_tree_flex"


def intervals(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] number of each segment in a depth-first walk, and [S] the first number after its descendants.

    >>> enter, leave = intervals(np.array([-1, 0, 0, 2]))
    >>> enter.tolist(), leave.tolist()
    ([0, 1, 2, 3], [4, 2, 4, 4])
    """
    num = len(parent)
    size = np.ones(num, dtype=np.int64)  # [S] segments in each subtree
    for s in range(num - 1, -1, -1):  # children before their parents
        if parent[s] >= 0:
            size[parent[s]] += size[s]
    # Parents come first: each gives its children consecutive intervals of numbers inside its own.
    enter, next_free, roots = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64), 0
    for s, up in enumerate(parent.tolist()):
        if up < 0:
            enter[s], roots = roots, roots + size[s]
        else:
            enter[s], next_free[up] = next_free[up], next_free[up] + size[s]
        next_free[s] = enter[s] + 1
    return enter, enter + size


def block_mask(layout: TreeLayout, reach: Reach, device: torch.device) -> BlockMask:
    """Which token attends to which, made once per layout, reach and device."""
    key = ("flex", reach, device)
    if key not in layout.cache:
        # [N] each: the interval of a token's segment
        enter, leave = (torch.from_numpy(np.repeat(x, layout.length)).to(device) for x in intervals(layout.parent))
        position = torch.from_numpy(layout.positions).to(device)  # [N]
        first = torch.from_numpy(reach.first(layout.positions)).to(device)  # [N]
        block = None if layout.blocks is None else torch.from_numpy(layout.blocks).to(device)  # [N]

        def is_visible(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            # Not later than the row, and in the row's own segment or an ancestor of it.
            seen = (position[col] <= position[row]) & (enter[col] <= enter[row]) & (enter[row] < leave[col])
            if block is not None:  # or in the same span that sees itself both ways
                seen = seen | ((block[col] == block[row]) & (block[row] >= 0))
            return seen if reach == EVERYTHING else seen & (first[row] <= position[col])

        num = len(layout.positions)
        layout.cache[key] = create_block_mask(is_visible, None, None, num, num, device=device)
    return layout.cache[key]


@cache
def _kernel(on_cuda: bool) -> Any:
    # Uncompiled, flex attention materialises all scores [H, N, N]: fine for a test, too large for training.
    return torch.compile(flex_attention, dynamic=True) if on_cuda else flex_attention


def flex_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `tree.tree_attention`: q [H, N, D], k [J, N, D], v [J, N, E] → [N, H, E]."""
    bound = softcap or 1.0

    def cap(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    out = _kernel(q.is_cuda)(
        q[None],  # [1, H, N, D]
        k[None],  # [1, J, N, D]
        v[None],  # [1, J, N, E]
        score_mod=cap if softcap is not None else None,
        block_mask=block_mask(layout, reach, q.device),
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return out[0].transpose(0, 1)  # [N, H, E]
    out, aux = out  # [1, H, N, E]; lse is [1, H, N]
    return with_sinks(out[0].transpose(0, 1), aux.lse[0].T, sinks)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return tree_call(flex_tree_attention, module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(FLEX, _forward)
