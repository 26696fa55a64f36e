"""The KV cache of running samples, and attention over it through transformers' attention interface.

A prompt's keys and values are stored once for all rows of its group; a row stores only its own tokens, those of its
completion. Every forward is packed as one sequence [1, tokens], and a plan describes its layout.

The registered function finds store and plan in a context variable, so models need not pass a cache or keyword
arguments on.

Shapes: R row slots, G group slots, K key/value heads, E query heads per key/value head, P prompt tokens,
T own tokens, D head dimension, N rows of this forward, M rows of the largest group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from gspo.errors import RolloutError


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

    @staticmethod
    def move(
        stored: dict[int, tuple[Tensor, Tensor]], source: list[int], target: list[int], length: int | None = None
    ) -> None:
        """Copy the first `length` tokens (None: all) of some slots of `prompt` or `own` into others."""
        for tensor in itertools.chain.from_iterable(stored.values()):
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


ATTENTION = "gspo_decode"  # not in transformers' mask registry, so models build no mask

_ACTIVE: ContextVar[tuple[KVStore, Plan] | None] = ContextVar("gspo_decode", default=None)


@contextmanager
def active(store: KVStore, plan: Plan) -> Iterator[None]:
    """The store and plan that attention uses inside this block."""
    token = _ACTIVE.set((store, plan))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_plan() -> tuple[KVStore, Plan] | None:
    """The store and plan of the innermost block; None outside."""
    return _ACTIVE.get()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers calls this in every layer: query [1, K·E, N, D], key and value [1, K, N, D] → [1, N, K·E, D]."""
    found = active_plan()
    if found is None:
        raise RolloutError(
            f"attention {ATTENTION!r} was called outside the sampler; the trainer sets another implementation"
        )
    if attention_mask is not None or position_bias is not None:
        raise RolloutError(f"{type(module).__name__} adds a mask or bias of its own to attention: not supported")
    store, plan = found
    layer: Any = module.layer_idx
    store.windows[layer] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = _Softmax(scale, sliding_window, softcap, s_aux)
    match plan:
        case PrefillPlan():
            return _prefill(store, plan, layer, query, key, value, rule), None
        case ExtendPlan():
            return _extend(store, plan, layer, query, key, value, rule), None
        case DecodePlan():
            return _decode(store, plan, layer, query, key, value, rule), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass(slots=True)
class _Softmax:
    """How one layer turns scores into weights."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [K·E] a logit per head that takes probability mass but has no value


def _weights(scores: Tensor, rule: _Softmax, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension of scores [rows, K·E, keys], in float32 or more; `mask` broadcasts."""
    # The cap comes before the mask: tanh would turn the mask's −inf into a finite score.
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    num_keys = scores.shape[-1]
    if rule.sinks is not None:
        # A sink takes part in the softmax as one more key. Its column is dropped afterwards, as it has no value.
        sinks = rule.sinks.to(scores.dtype).view(-1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=dtype)[..., :num_keys]


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: _Softmax,
    begin_b: Tensor | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Causal attention of L positions over S: query [B, K·E, L, D], key and value [B, K, S, ·].

    `begin_b` [B]: the position of each row's first query; None: the queries are the last L positions. Tokens with the
    same number ≥ 0 in `blocks` [B, L], which needs S = L, see each other both ways.
    Returns [B, L, K·E, D].
    """
    (batch, heads, length, _), (num_kv, num_keys) = query.shape, key.shape[1:3]
    offset = num_keys - length  # keys before the first query
    windowed = rule.window is not None and rule.window < num_keys
    plain = rule.softcap is None and rule.sinks is None
    # `is_causal` aligns queries with the first keys, so it is correct only if no key precedes the queries.
    if plain and offset == 0 and not windowed and begin_b is None and blocks is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scale, enable_gqa=heads != num_kv
        )
        return out.transpose(1, 2)
    if begin_b is None:
        query_1 = torch.arange(offset, num_keys, device=query.device)[:, None]  # [L, 1] positions of the queries
    else:
        query_1 = (begin_b[:, None] + torch.arange(length, device=query.device))[..., None]  # [B, L, 1]
    key_s = torch.arange(num_keys, device=query.device)  # [S] positions of the keys
    seen = key_s <= query_1  # [L, S] or [B, L, S]
    if blocks is not None:
        # [B, L, L]
        seen = seen | ((blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None])
    if windowed and rule.window is not None:
        seen &= key_s > query_1 - rule.window
    if plain:
        mask = seen if seen.dim() == 2 else seen[:, None]  # all heads
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=rule.scale, enable_gqa=heads != num_kv
        )
        return out.transpose(1, 2)
    # PyTorch's attention supports neither soft-capping nor sinks: compute the scores here.
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
    grouped = (query * rule.scale).reshape(batch, num_kv, -1, query.shape[-1])  # [B, K, E·L, D]
    scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, length, num_keys)  # [B, K·E, L, S]
    # [B, L, K·E, S]: heads next to keys, so that one sink per head can be appended.
    weights = _weights(scores.transpose(1, 2), rule, mask[..., None, :]).transpose(1, 2).to(value.dtype)
    out = weights.reshape(batch, num_kv, -1, num_keys) @ value  # [B, K, E·L, D]
    return out.view(batch, heads, length, -1).transpose(1, 2)


def _prefill(
    store: KVStore, plan: PrefillPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: _Softmax
) -> Tensor:
    keys, values = store.prompt_of(layer, key, value)  # [G, K, P, D] each
    outputs, done = [], 0
    for start, count, length in plan.runs:
        q, k, v = (
            x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )  # [count, heads, length, D]
        slots = torch.tensor(plan.slots[done : done + count], device=query.device)  # [count]
        begin = None
        if plan.begins is None:
            keys[slots, :, :length], values[slots, :, :length] = k, v
        else:
            begins = plan.begins[done : done + count]
            begin = torch.from_numpy(begins).to(query.device)  # [count]
            at = begin[:, None] + torch.arange(length, device=query.device)  # [count, length]
            keys[slots[:, None], :, at], values[slots[:, None], :, at] = k.transpose(1, 2), v.transpose(1, 2)
            total = int(begins.max()) + length
            k, v = keys[slots, :, :total], values[slots, :, :total]  # [count, K, total, D]
        blocks = plan.blocks_of(start, count, length, query.device)
        outputs.append(segment_attention(q, k, v, rule, begin, blocks).reshape(count * length, query.shape[1], -1))
        done += count
    return torch.cat(outputs)[None]  # [1, N, K·E, D]


def _extend(
    store: KVStore, plan: ExtendPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: _Softmax
) -> Tensor:
    prompt_k, prompt_v = store.prompt_of(layer, key, value)  # [G, K, P, D] each
    own_k, own_v = store.own_of(layer, key, value)  # [R, K, T, D] each
    outputs = []
    for start, length, row, group, prompt_len in plan.segments:
        q, k, v = (x[:, :, start : start + length] for x in (query, key, value))  # [1, heads, length, D]
        own_k[row, :, :length], own_v[row, :, :length] = k[0], v[0]
        k = torch.cat([prompt_k[None, group, :, :prompt_len], k], dim=2)  # [1, K, prompt_len + length, D]
        v = torch.cat([prompt_v[None, group, :, :prompt_len], v], dim=2)
        outputs.append(segment_attention(q, k, v, rule)[0])
    return torch.cat(outputs)[None]  # [1, N, K·E, D]


def _decode(
    store: KVStore, plan: DecodePlan, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: _Softmax
) -> Tensor:
    """One softmax over two parts: the rows of a group against its stored prompt, each row against its own tokens."""
    own_k, own_v = store.own_of(layer, key, value)
    _, num_kv, num_rows, dim = key.shape
    dim_v, heads, capacity = value.shape[-1], query.shape[1], own_k.shape[2]
    per_kv = heads // num_kv
    # Store the keys and values of the new tokens; row i of the forward is row slot i.
    if plan.even:
        own_k[:num_rows, :, plan.own_max - 1] = key[0].transpose(0, 1)
        own_v[:num_rows, :, plan.own_max - 1] = value[0].transpose(0, 1)
    else:
        target = plan.target(num_kv, capacity, key.device)
        own_k.view(-1, dim).index_copy_(0, target, key[0].transpose(0, 1).reshape(-1, dim))
        own_v.view(-1, dim_v).index_copy_(0, target, value[0].transpose(0, 1).reshape(-1, dim_v))
    # The used part of the store, with slots and heads in one batch dimension. These are views, not copies.
    own_k = own_k.view(-1, capacity, dim)[: num_rows * num_kv, : plan.own_max]  # [N·K, T, D]
    own_v = own_v.view(-1, capacity, dim_v)[: num_rows * num_kv, : plan.own_max]  # [N·K, T, D]
    prompt_k, prompt_v = store.prompt_of(layer, key, value)
    grid, length = plan.grid, plan.prompt_max
    prompt_k = prompt_k.view(-1, store.prompt_len, dim)[: grid.num_groups * num_kv, :length]  # [G·K, P, D]
    prompt_v = prompt_v.view(-1, store.prompt_len, dim_v)[: grid.num_groups * num_kv, :length]  # [G·K, P, D]
    to_grid, to_rows = grid.heads(num_kv, query.device)
    # [G·K, M·E]: all rows of a group as queries of one product
    stacked = (grid.num_groups * num_kv, grid.num_ranks * per_kv)

    q = (query[0].transpose(0, 1) * rule.scale).reshape(num_rows * num_kv, per_kv, dim)  # [N·K, E, D]
    q_grid = q.index_select(0, to_grid).view(*stacked, dim)  # [G·K, M·E, D]
    # [N·K, E, P]
    on_prompt = torch.bmm(q_grid, prompt_k.transpose(1, 2)).view(-1, per_kv, length).index_select(0, to_rows)
    scores = torch.cat([on_prompt, torch.bmm(q, own_k.transpose(1, 2))], dim=-1)  # [N·K, E, P + T]
    mask = plan.mask(rule.window, scores.dtype, scores.device)  # [N, 1, P + T]
    weights = _weights(scores.view(num_rows, heads, -1), rule, mask).to(value.dtype)  # [N, K·E, P + T]
    weights = weights.reshape(num_rows * num_kv, per_kv, -1)  # [N·K, E, P + T]
    weights_grid = weights[..., :length].index_select(0, to_grid).view(*stacked, length)  # [G·K, M·E, P]
    # [N·K, E, D]
    from_prompt = torch.bmm(weights_grid, prompt_v).view(-1, per_kv, dim_v).index_select(0, to_rows)
    # Add the part from the rows' own tokens: [N·K, E, D] → [1, N, K·E, D].
    return torch.baddbmm(from_prompt, weights[..., length:], own_v).view(1, num_rows, heads, dim_v)
