"""The KV cache of running samples, and the plans of the forwards that write and read it (`attention.py`).

A prompt's keys and values are stored once for all rows of its group; a row stores only its own tokens, those of its
completion. Every forward is packed as one sequence [1, tokens], and a plan describes its layout.

Shapes: R row slots, G group slots, K key/value heads, E query heads per key/value head, P prompt tokens,
T own tokens, D head dimension, N rows of this forward, M rows of the largest group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class PrefillPlan:
    """A forward over prompts, or what is new of them, sorted by length: equal lengths run as one batch."""

    runs: list[tuple[int, int, int]]  # (first token, number of prompts, length)
    slots: list[int]  # group slot of each prompt, in order
    begins: NDArray[np.int64] | None = None  # [prompts] tokens that the slot holds already; None: none
    blocks: NDArray[np.int64] | None = None  # [N] number of the span that sees itself both ways; −1: causal

    def blocks_of(self, start: int, count: int, length: int, device: torch.device) -> Tensor | None:
        """The blocks of one run, [count, length]; None if all of it is causal."""
        if self.blocks is None:
            return None
        own = self.blocks[start : start + count * length].reshape(count, length)
        return torch.from_numpy(own).to(device) if (own >= 0).any() else None


@dataclass(slots=True)
class ExtendPlan:
    """A forward over own tokens of rows whose prompt is stored already: interrupted samples that continue."""

    segments: list[tuple[int, int, int, int, int]]  # (first token, length, row slot, group slot, prompt length)


@dataclass(slots=True)
class Grid:
    """The cell of each row in the [G, M] table of groups; rebuilt only when rows join, leave or move."""

    group_n: NDArray[np.int64]  # [N]
    rank_n: NDArray[np.int64]  # [N] number of a row inside its group
    row_of_cell: NDArray[np.int64]  # [G·M]; empty cells hold row 0, and their result is not read
    num_groups: int
    num_ranks: int
    index: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def heads(self, num_kv: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Flat row index of each (group, head, rank) [G·K·M], and flat cell index of each (row, head) [N·K]."""
        if num_kv not in self.index:
            kv = np.arange(num_kv)  # [K]
            cells_g_1_m = self.row_of_cell.reshape(self.num_groups, 1, self.num_ranks)  # [G, 1, M]
            gather = (cells_g_1_m * num_kv + kv[:, None]).reshape(-1)  # [G, K, M] flattened
            # [N, K] flattened
            scatter = ((self.group_n[:, None] * num_kv + kv) * self.num_ranks + self.rank_n[:, None]).reshape(-1)
            self.index[num_kv] = (torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device))
        return self.index[num_kv]


def make_grid(group_n: NDArray[np.int64], alive_n: NDArray[np.bool_]) -> Grid:
    """Place the running rows in the table of groups. Free slots have no cell; they read the cell of another row."""
    rank_n = np.zeros_like(group_n)  # [N]
    living = np.flatnonzero(alive_n)
    # The rows of one group become adjacent; a stable sort keeps them in the order of their slots.
    order = living[np.argsort(group_n[living], kind="stable")]
    starts = np.flatnonzero(np.diff(group_n[order], prepend=-1))  # where each group begins in `order`
    # The rank is the position in `order` minus the position of the group's first row.
    rank_n[order] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    # A free slot may still hold the number of a removed group: it gets the group of a running row instead.
    group_n = np.where(alive_n, group_n, group_n[living[0]])
    num_groups, num_ranks = int(group_n.max()) + 1, int(rank_n.max()) + 1
    row_of_cell = np.zeros(num_groups * num_ranks, dtype=np.int64)
    row_of_cell[group_n[living] * num_ranks + rank_n[living]] = living
    return Grid(group_n, rank_n, row_of_cell, num_groups, num_ranks)


@dataclass(slots=True)
class DecodePlan:
    """A forward over one token for each of N rows."""

    grid: Grid
    prompt_len_n: NDArray[np.int64]  # [N]
    own_len_n: NDArray[np.int64]  # [N] own tokens stored before this one
    prompt_max: int = 0
    own_max: int = 0  # with this token
    even: bool = False  # all rows have equally many own tokens: their new keys are one slice
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    targets: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_max, self.own_max = int(self.prompt_len_n.max()), int(self.own_len_n.max()) + 1
        self.even = bool((self.own_len_n == self.own_max - 1).all())

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[N, 1, P + T]: 0 where a row attends to a key, −inf elsewhere; None if every row attends to every key."""
        # A window that covers every key hides nothing: such layers share the mask of full attention.
        if window is not None and window >= self.prompt_max + self.own_max:
            window = None
        if window not in self.masks:
            prompt_n_1, own_n_1 = self.prompt_len_n[:, None], self.own_len_n[:, None]  # [N, 1] each
            prompt_p, own_t = np.arange(self.prompt_max), np.arange(self.own_max)  # [P], [T]
            # [N, P], [N, T]; own_n_1 is the position of the new token itself
            seen_p, seen_t = prompt_p < prompt_n_1, own_t <= own_n_1
            if window is not None:
                # The query's position minus the window: the last hidden position.
                first_n_1 = prompt_n_1 + own_n_1 - window
                seen_p, seen_t = seen_p & (prompt_p > first_n_1), seen_t & (prompt_n_1 + own_t > first_n_1)
            seen = np.concatenate([seen_p, seen_t], axis=1)  # [N, P + T]
            mask = None
            if not seen.all():
                hidden = torch.from_numpy(~seen).to(device)
                mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
            self.masks[window] = mask
        return self.masks[window]

    def target(self, num_kv: int, capacity: int, device: torch.device) -> Tensor:
        """Flat index into [R·K·T] of each row's new key, per head: [N·K]."""
        if num_kv not in self.targets:
            rows_n_1 = np.arange(len(self.own_len_n))[:, None] * num_kv  # [N, 1]
            flat = (rows_n_1 + np.arange(num_kv)) * capacity + self.own_len_n[:, None]  # [N, K]
            self.targets[num_kv] = torch.from_numpy(flat.reshape(-1)).to(device)
        return self.targets[num_kv]


Plan = PrefillPlan | ExtendPlan | DecodePlan


class KVStore:
    """Per layer: prompt keys and values [G, K, P, D], own ones [R, K, T, D]. Capacities grow geometrically."""

    def __init__(self) -> None:
        self.num_groups = self.prompt_len = self.num_rows = self.own_len = 0
        self.prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.windows: dict[int, int | None] = {}  # the sliding window that each layer asked for

    def reserve(self, *, groups: int = 0, prompt_len: int = 0, rows: int = 0, own_len: int = 0) -> None:
        """Grow to at least these numbers of slots and lengths; stored keys and values stay."""
        prompt = (_grown(self.num_groups, groups), _grown(self.prompt_len, prompt_len))
        if prompt != (self.num_groups, self.prompt_len):
            self.num_groups, self.prompt_len = prompt
            self.prompt = {i: (_resized(k, *prompt), _resized(v, *prompt)) for i, (k, v) in self.prompt.items()}
        own = (_grown(self.num_rows, rows), _grown(self.own_len, own_len))
        if own != (self.num_rows, self.own_len):
            self.num_rows, self.own_len = own
            self.own = {i: (_resized(k, *own), _resized(v, *own)) for i, (k, v) in self.own.items()}

    def move_rows(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first `length` own tokens of some row slots into others."""
        for tensors in self.own.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def move_groups(self, source: list[int], target: list[int], length: int | None = None) -> None:
        """Copy the first `length` tokens (None: all) of some group slots into others."""
        for tensors in self.prompt.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def append_own(self, rows: NDArray, groups: NDArray, prompt_lens: NDArray, own_lens: NDArray) -> None:
        """Copy the own tokens of each row behind the prompt in its group slot. All arrays are [kept rows]."""
        if not own_lens.any():
            return
        own = np.concatenate([np.arange(n) for n in own_lens])  # [tokens]
        row, group = np.repeat(rows, own_lens), np.repeat(groups, own_lens)
        at = np.repeat(prompt_lens, own_lens) + own
        for layer, tensors in self.own.items():
            for source, target in zip(tensors, self.prompt[layer], strict=True):
                row_t, own_t, group_t, at_t = (torch.from_numpy(x).to(source.device) for x in (row, own, group, at))
                target[group_t, :, at_t] = source[row_t, :, own_t]  # [tokens, K, D]

    def num_bytes(self) -> int:
        return sum(t.nbytes for pair in (*self.prompt.values(), *self.own.values()) for t in pair)

    def prompt_of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Allocated at a layer's first forward: only then are its number of heads, head dimension and dtype known.
        if layer not in self.prompt:
            self.prompt[layer] = _allocated(self.num_groups, self.prompt_len, key, value)
        return self.prompt[layer]

    def own_of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # As in `prompt_of`: the form of a layer is known at its first forward.
        if layer not in self.own:
            self.own[layer] = _allocated(self.num_rows, self.own_len, key, value)
        return self.own[layer]


def _grown(have: int, need: int) -> int:
    # Growth by half or more: the number of copies stays logarithmic in the final size.
    return have if need <= have else max(need, have + have // 2)


def _resized(tensor: Tensor, slots: int, length: int) -> Tensor:
    # Zeros, not uninitialised memory: a masked key is multiplied by 0, and 0 · NaN is NaN.
    new = tensor.new_zeros(slots, tensor.shape[1], length, tensor.shape[3])
    new[: tensor.shape[0], :, : tensor.shape[2]] = tensor
    return new


def _allocated(slots: int, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    heads = key.shape[1]
    return key.new_zeros(slots, heads, length, key.shape[-1]), value.new_zeros(slots, heads, length, value.shape[-1])
