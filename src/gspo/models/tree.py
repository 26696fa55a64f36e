"""Shared prefixes: a forest of segments in one row, and the attention over it.

Each segment's causal triangle is cut into tiles of rows, so that a long prompt does not compute its masked half. Each
segment that has children gives one rectangle: the rows of all children against the path from the root to that segment.
Keys of a prefix are never copied per child. Rectangles of similar shape are batched.

Registered with transformers as `gspo_tree`. The model is called with one row [1, N] of tokens and their true positions,
inside `use_attention(model, TREE, layout)`. A token attends to every token of its ancestor segments and causally to its
own segment; a window or a chunk of the layer limits both. Tokens of the same block (an image, where the model says so)
also see each other.

A token is in one tile of its segment and in at most one rectangle of its path; its two partial softmaxes are merged by
their log-sum-exp. The plan is made once per layout and used by every layer. The backward pass recomputes the scores, so
memory is linear in N.

Shapes: N tokens, S segments, H query heads, J key/value heads, R = H/J, D head size, E value size; per call B
rectangles of Q rows by C columns. It runs on any device; on CUDA `flex.py` gives the same layout to a fused kernel.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from gspo.models.vision.parts import text_modules

# Rows of a tile: small enough to skip most of a long triangle's masked half, large enough for efficient GEMMs.
_TILE_ROWS = 128
# Scores per head of one batched call, so that the working set of a call fits the CPU cache.
_CALL_SCORES = 1 << 17
# A rectangle is added to a call while the padding costs less than another call.
_PAD_RATIO, _PAD_FREE = 1.2, 1 << 12


@dataclass(frozen=True)
class Reach:
    """How far back a layer's tokens see, in true positions. `window`: less than so many back. `chunk`: positions are
    cut into chunks of this length, and a token sees its own chunk only (Llama 4)."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: Any) -> Any:
        """The first position that a token at `position` sees."""
        first = position * 0
        if self.window is not None:
            first = np.maximum(first, position - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, position - position % self.chunk)
        return first


EVERYTHING = Reach()  # no limit


@dataclass(frozen=True, eq=False)
class TileBatch:
    """One batch of rectangles. Padded rows and columns are masked, so they add exactly zero."""

    path: bool  # rows against their ancestors; merged into the result of the triangles
    rows: Tensor  # [J·B·Q] indices into [N·J]
    cols: Tensor  # [J·B·C] indices into [N·J]
    shape: tuple[int, int, int]  # B, Q, C
    mask: Tensor | None  # additive [B or 1, Q, 1, C]


class TreeLayout:
    """Segments of one packed row, and the plans (one per reach, head count, dtype and device) made from them.

    start, length, parent: [S]; parent −1 is a root, parents come before children, segments cover the row. blocks: [N]
    the number of the span of neighbours, inside one segment, that see each other both ways; −1: none.

    >>> TreeLayout([0, 2, 5], [2, 3, 1], [-1, 0, 0]).positions.tolist()
    [0, 1, 2, 3, 4, 2]
    """

    def __init__(self, start: Any, length: Any, parent: Any, blocks: NDArray[np.int64] | None = None) -> None:
        self.start, self.length, self.parent = (np.asarray(x, dtype=np.int64) for x in (start, length, parent))
        self.blocks = blocks
        offset = np.zeros_like(self.start)  # [S] true position of a segment's first token
        # By segment with children: the token indices from the root to its end.
        self._paths: dict[int, NDArray[np.int64]] = {-1: np.zeros(0, np.int64)}
        parents = set(self.parent.tolist())
        for s, (begin, num, up) in enumerate(
            zip(self.start.tolist(), self.length.tolist(), self.parent.tolist(), strict=True)
        ):
            if up >= s:
                raise ValueError(f"segment {s} has parent {up}; parents must precede children")
            # Paths are stored only for segments with children: leaves need none.
            above = self._paths[up]
            offset[s] = len(above)
            if s in parents:
                self._paths[s] = np.concatenate([above, np.arange(begin, begin + num)])
        # [N] true position of each token
        self.positions = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(o, o + n) for o, n in zip(offset, self.length, strict=True))]
        )
        self.cache: dict[Any, Any] = {}  # plans and block masks made from this layout

    def plan(self, reach: Reach, num_kv_heads: int, dtype: torch.dtype, device: torch.device) -> list[TileBatch]:
        """Triangles first, then path rectangles: the merge needs the result of the triangles."""
        key = (reach, num_kv_heads, dtype, device)
        if key not in self.cache:
            self.cache[key] = [
                _call(path, batch, self, reach, num_kv_heads, dtype, device)
                for path, rectangles in ((False, self._triangles(reach)), (True, self._path_rectangles(reach)))
                for batch in _batches(rectangles)
            ]
        return self.cache[key]

    def _triangles(self, reach: Reach) -> list[_Rectangle]:
        rectangles: list[_Rectangle] = []
        for begin, num in zip(self.start.tolist(), self.length.tolist(), strict=True):
            # Tiles of nearly equal height; a tile has the columns up to its own last row.
            num_tiles = max(1, round(num / _TILE_ROWS))
            edges = [num * i // num_tiles for i in range(num_tiles + 1)]
            for low, high in itertools.pairwise(edges):
                # Columns before this one are out of reach of every row of the tile.
                offset = int(self.positions[begin]) if num else 0
                first = max(0, int(reach.first(np.int64(offset + low))) - offset)
                end = self._block_end(begin + high)
                rectangles.append((np.arange(begin + low, begin + high), np.arange(begin + first, end)))
        return [r for r in rectangles if len(r[0])]

    def _block_end(self, end: int) -> int:
        """`end`, or the end of the block that the token before `end` is in."""
        if self.blocks is None or not end or self.blocks[end - 1] < 0:
            return end
        return int(np.flatnonzero(self.blocks == self.blocks[end - 1])[-1]) + 1

    def _path_rectangles(self, reach: Reach) -> list[_Rectangle]:
        rectangles: list[_Rectangle] = []
        children: dict[int, list[int]] = {}
        for s, up in enumerate(self.parent.tolist()):
            if up >= 0:
                children.setdefault(up, []).append(s)
        for up, kids in children.items():
            cols = self._paths[up]
            rows = np.concatenate([np.arange(self.start[s], self.start[s] + self.length[s]) for s in kids])
            # Column c is at position c. The first row after the path sees most of it; a row that does not see the last
            # column sees none.
            rows = rows[reach.first(self.positions[rows]) < len(cols)]
            cols = cols[int(reach.first(np.int64(len(cols)))) :]
            if not len(rows) or not len(cols):
                continue
            # All rows have the same columns, so the rectangle can be cut between any two rows.
            num_tiles = -(-len(rows) * len(cols) // _CALL_SCORES)
            rectangles += [(part, cols) for part in np.array_split(rows, num_tiles) if len(part)]
        return rectangles


_Rectangle = tuple[NDArray[np.int64], NDArray[np.int64]]  # row tokens, column tokens


def _batches(rectangles: Sequence[_Rectangle]) -> Iterator[list[_Rectangle]]:
    """Rectangles of similar shape together, within limits of padding and of scores."""
    batch: list[_Rectangle] = []
    rows = cols = area = 0
    for rectangle in sorted(rectangles, key=lambda r: (-len(r[1]), -len(r[0]))):
        num_rows, num_cols = len(rectangle[0]), len(rectangle[1])
        tall, wide = max(rows, num_rows), max(cols, num_cols)
        padded, real = (len(batch) + 1) * tall * wide, area + num_rows * num_cols
        if batch and (padded > _CALL_SCORES or padded > _PAD_RATIO * real + _PAD_FREE):
            yield batch
            batch, rows, cols, area = [], 0, 0, 0
            tall, wide, real = num_rows, num_cols, num_rows * num_cols
        batch.append(rectangle)
        rows, cols, area = tall, wide, real
    if batch:
        yield batch


def _call(
    path: bool,
    batch: Sequence[_Rectangle],
    layout: TreeLayout,
    reach: Reach,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TileBatch:
    shape = len(batch), max(len(rows) for rows, _ in batch), max(len(cols) for _, cols in batch)
    rows, cols = np.full(shape[:2], -1), np.full((shape[0], shape[2]), -1)  # [B, Q], [B, C]; −1 is padding
    for b, (row_tokens, col_tokens) in enumerate(batch):
        rows[b, : len(row_tokens)], cols[b, : len(col_tokens)] = row_tokens, col_tokens
    # Padding (−1) reads the last token's position; `visible` excludes it below.
    positions, blocks = layout.positions, layout.blocks
    row_position, col_position = positions[rows][:, :, None], positions[cols][:, None, :]  # [B, Q, 1], [B, 1, C]
    # Ancestors are always before a row, so one comparison of true positions is right for triangles and paths.
    visible = col_position <= row_position  # [B, Q, C]
    if blocks is not None:
        visible |= (blocks[rows][:, :, None] == blocks[cols][:, None, :]) & (blocks[rows] >= 0)[:, :, None]
    visible &= (rows >= 0)[:, :, None] & (cols >= 0)[:, None, :]
    visible &= col_position >= reach.first(row_position)
    mask = None
    # No mask if every pair is visible, and one for the whole batch if all rectangles have the same.
    if not visible.all():
        if (visible == visible[:1]).all():
            visible = visible[:1]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), -torch.inf)
        mask = mask[:, :, None, :].to(device)

    def heads(tokens: NDArray[np.int64]) -> Tensor:
        """Token indices [B, x] as indices [J·B·x] into [N·J], head by head."""
        # Padding reads token 0, and the mask removes it.
        flat = np.maximum(tokens, 0).reshape(1, -1) * num_kv_heads + np.arange(num_kv_heads)[:, None]
        return torch.from_numpy(flat.reshape(-1)).to(device)

    return TileBatch(path, heads(rows), heads(cols), shape, mask)


TREE = "gspo_tree"


@dataclass(frozen=True)
class _Form:
    """The arguments of the scores besides q and k."""

    calls: list[TileBatch]
    num_kv_heads: int
    scale: float
    softcap: float | None

    def scores(self, call: TileBatch, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gathered q (scaled) [J·B, Q·R, D], gathered k [J·B, C, D], scores [J·B, Q·R, C], soft cap's slope."""
        num, tall, wide = call.shape
        batch = self.num_kv_heads * num
        # index_select copies, so the scale in place does not change q.
        q_rows = q.index_select(0, call.rows).mul_(self.scale).view(batch, -1, k.shape[-1])
        k_cols = k.index_select(0, call.cols).view(batch, wide, -1)
        s = torch.bmm(q_rows, k_cols.transpose(1, 2))  # [J·B, Q·R, C]
        slope = None
        if self.softcap is not None:
            s.div_(self.softcap).tanh_()
            # d tanh(x) = 1 − tanh²(x)
            slope = 1 - s * s
            s.mul_(self.softcap)
        if call.mask is not None:
            # After the soft cap, which would make −inf finite.
            s.view(self.num_kv_heads, num, tall, -1, wide).add_(call.mask)  # [J, B, Q, R, C]
        return q_rows, k_cols, s, slope


class _TreeAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale + visibility)·v, with q [N·J, R·D], k [N·J, D], v [N·J, E] → [N·J, R·E].

    The second result is the log-sum-exp of the scores, [N·J, R].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: _Form) -> tuple[Tensor, Tensor]:
        num_rep = q.shape[1] // k.shape[1]  # R
        out = q.new_zeros(q.shape[0], num_rep, v.shape[1])  # [N·J, R, E]
        lse = q.new_zeros(q.shape[0], num_rep)  # [N·J, R] log-sum-exp of the scores so far
        for call in form.calls:
            _, _, s, _ = form.scores(call, q, k)
            # A fully masked row (padding, or a window that ends before the prefix) has peak −inf. With a finite
            # peak its weights are 0 and not NaN.
            peak = s.amax(-1, keepdim=True).clamp_min_(torch.finfo(s.dtype).min)  # [J·B, Q·R, 1]
            p = s.sub_(peak).exp_()  # [J·B, Q·R, C]
            total = p.sum(-1, keepdim=True)  # [J·B, Q·R, 1]
            v_cols = v.index_select(0, call.cols).view(s.shape[0], call.shape[2], -1)  # [J·B, C, E]
            # [J·B·Q, R, E], and its log-sum-exp [J·B·Q, R]
            part = torch.bmm(p, v_cols).div_(total.clamp_min(torch.finfo(s.dtype).tiny)).view(-1, *out.shape[1:])
            part_lse = (total.log() + peak).view(-1, num_rep)
            if call.path:
                # Merge two partial softmaxes: out += (part − out) · σ(part_lse − lse).
                excess = part_lse - lse.index_select(0, call.rows)  # [J·B·Q, R]
                part.sub_(out.index_select(0, call.rows)).mul_(excess.sigmoid()[:, :, None])
                # log(1 + e^excess); softplus returns excess alone above its threshold of 20
                part_lse = -nn.functional.logsigmoid(-excess)
            else:
                # A padded row: −inf would change the log-sum-exp of token 0, which padding points to.
                part_lse = part_lse.masked_fill_(part_lse == -torch.inf, 0.0)
            # A token is in one tile, so its first addition is to 0. The path call adds a difference. Padded rows add 0.
            out.index_add_(0, call.rows, part)
            lse.index_add_(0, call.rows, part_lse)
        out = out.view(q.shape[0], -1)
        ctx.form = form
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # only attention sinks use the log-sum-exp
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        form: _Form = ctx.form
        grad = grads[0].contiguous()  # [N·J, R·E]
        num_rep = lse.shape[1]
        delta = (grad * out).view(*lse.shape, -1).sum(-1)  # [N·J, R] Σ_e dO·O, for the softmax gradient
        if grads[1] is not None:
            delta = delta - grads[1]  # the gradient of the log-sum-exp is p
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for call in form.calls:
            # `lse` is over all visible keys of a token, so p is its final softmax in tiles and in paths.
            q_rows, k_cols, s, slope = form.scores(call, q, k)
            batch, tall, wide = s.shape  # J·B, Q·R, C
            p = s.sub_(lse.index_select(0, call.rows).view(batch, tall, 1)).exp_()  # [J·B, Q·R, C]
            grad_rows = grad.index_select(0, call.rows).view(batch, tall, -1)  # [J·B, Q·R, E]
            v_cols = v.index_select(0, call.cols).view(batch, wide, -1)  # [J·B, C, E]
            dv.index_add_(0, call.cols, torch.bmm(p.transpose(1, 2), grad_rows).view(batch * wide, -1))
            ds = torch.bmm(grad_rows, v_cols.transpose(1, 2))  # [J·B, Q·R, C]
            # Softmax gradient: p · (dP − Σ_e dO·O).
            ds.sub_(delta.index_select(0, call.rows).view(batch, tall, 1)).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            # q_rows contains the scale, so dk does; dq gets it by alpha.
            dk.index_add_(0, call.cols, torch.bmm(ds.transpose(1, 2), q_rows).view(batch * wide, -1))
            dq.index_add_(0, call.rows, torch.bmm(ds, k_cols).view(batch * tall // num_rep, -1), alpha=form.scale)
        return dq, dk, dv, None


def tree_attention(
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
    """Attention of one packed row: q [H, N, D], k [J, N, D], v [J, N, E] → [N, H, E].

    `softcap`: c·tanh(scores/c). `sinks` [H]: the score of one more key per head, whose value is 0.
    """
    (num_heads, num_tokens, head_dim), num_kv = q.shape, k.shape[0]
    # Inputs and outputs keep half precision; the scores of a whole prefix are summed in float32.
    dtype = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    form = _Form(
        layout.plan(reach, num_kv, dtype, q.device), num_kv, head_dim**-0.5 if scale is None else scale, softcap
    )
    # [N·J, R·D], [N·J, D], [N·J, E]: the R query heads of a key/value head are next to each other
    rows = [x.transpose(0, 1).reshape(num_tokens * num_kv, -1).to(dtype) for x in (q, k, v)]
    out, lse = _TreeAttention.apply(*rows, form)  # pyright: ignore[reportGeneralTypeIssues]
    out = out.view(num_tokens, num_heads, -1)
    return (out if sinks is None else with_sinks(out, lse.view(num_tokens, num_heads), sinks)).to(q.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The attention's output [N, H, E] after one more key of score `sinks` [H] and value 0; lse is [N, H]."""
    # e^lse / (e^lse + e^sink) is the share of the real keys.
    return out * (lse - sinks.to(lse.dtype)).sigmoid()[:, :, None].to(out.dtype)


def tree_call(
    attention: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, J, N, D]
    value: Tensor,  # [1, J, N, E]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sinks (gpt-oss)
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer with `attention`, by transformers' interface. Raises for arguments it cannot apply."""
    # An argument that this attention cannot apply is an error: ignored, it would only show as wrong log-probs.
    tree = current_layout()
    if tree is None:
        raise ValueError(f"attention {TREE!r} needs the layout: use_attention(model, {TREE!r}, layout)")
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError(f"attention {TREE!r} takes one packed row and no mask; got batch {query.shape[0]}")
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; it must be 0: the ratio compares two evaluations")
    unsupported = [name for name in ("position_bias", "cu_seq_lens_q") if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"attention {TREE!r} does not support the argument {', '.join(unsupported)} of this model")
    kind = _layer_type(module)
    if kind not in (None, "full_attention", "sliding_attention", "chunked_attention"):
        raise ValueError(f"attention {TREE!r} does not support the layer type {kind!r}")
    if kind == "sliding_attention" and sliding_window is None:
        raise ValueError("a sliding-window layer passed no sliding_window")
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        query = _true_temperature(module, query, tree)
    # Chunks are a matter of the mask in transformers: no argument has their length.
    config: Any = getattr(module, "config", None)
    reach = Reach(sliding_window, config.attention_chunk_size if kind == "chunked_attention" else None)
    out = attention(query[0], key[0], value[0], tree, scale=scaling, reach=reach, softcap=softcap, sinks=s_aux)
    return out.unsqueeze(0), None  # [1, N, H, E]


def _true_temperature(module: Any, query: Tensor, tree: TreeLayout) -> Tensor:
    """Llama 4 scales the queries of its layers without positions by their index in the row, not by their position."""

    def factor(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.double() + 1) / module.floor_scale)) * module.attn_scale + 1

    ratio = factor(torch.from_numpy(tree.positions)) / factor(torch.arange(len(tree.positions)))  # [N]
    return query * ratio.to(query.device, query.dtype)[:, None]


def _layer_type(module: nn.Module) -> str | None:
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return kinds[index] if kinds and index is not None and index < len(kinds) else None


# No mask function is registered with it, so transformers builds no mask: visibility comes from the layout.
AttentionInterface.register(TREE, partial(tree_call, tree_attention))


# The layout of the pass that runs. Not an argument of the model: some models do not pass arguments on to the attention.
_LAYOUT: ContextVar[TreeLayout | None] = ContextVar("layout of the packed row", default=None)


def current_layout() -> TreeLayout | None:
    """The layout of the pass that runs, so that a checkpointed layer can be recomputed with it."""
    return _LAYOUT.get()


@contextlib.contextmanager
def use_attention(model: nn.Module, name: str, layout: TreeLayout | None = None) -> Iterator[None]:
    """Run `model` with the attention implementation `name` on `layout`, then restore the previous one.

    Trainer and sampler share one model and use different implementations, so neither sets one permanently.
    """
    # By id, because several modules can share one config object.
    configs = list({id(m.config): m.config for m in text_modules(model) if isinstance(m, PreTrainedModel)}.values())
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation = value
