"""Attention over the KV cache of running samples, through transformers' attention interface.

The registered function finds store and plan (`cache.py`) in a context variable, so models need not pass a cache or
keyword arguments on.

Shapes: R row slots, G group slots, K key/value heads, E query heads per key/value head, P prompt tokens,
T own tokens, D head dimension, N rows of this forward, M rows of the largest group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from gspo.errors import RolloutError
from gspo.sampling.local.cache import DecodePlan, ExtendPlan, KVStore, Plan, PrefillPlan

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
