"""Which (query, key) pairs of a forest of segments are visible, as batches of rectangles for `tree_attention.py`.

Each segment's causal triangle is cut into tiles of rows, so that a long prompt does not compute its masked half. Each
segment that has children gives one rectangle: the rows of all children against the path from the root to that segment.
Keys of a prefix are never copied per child. Rectangles of similar shape are batched.

Shapes: N tokens, S segments, J key/value heads; per call B rectangles of Q rows by C columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    # Sorted by width, then height: neighbours need little padding.
    for rectangle in sorted(rectangles, key=lambda r: (-len(r[1]), -len(r[0]))):
        num_rows, num_cols = len(rectangle[0]), len(rectangle[1])
        tall, wide = max(rows, num_rows), max(cols, num_cols)
        padded, real = (len(batch) + 1) * tall * wide, area + num_rows * num_cols
        # This rectangle does not fit: close the batch and begin a new one with it.
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
