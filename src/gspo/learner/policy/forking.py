"""Padded rows that compute a group's prompt once: its state is copied for the completions, with gradients.

For models that keep state outside the attention (`padded` in `packing.py`). The prompt is a call of its own that
returns transformers' cache; the cache is repeated, and the completions are padded rows that continue from it. Each
group is two calls of its own: padding in front of a shorter prompt would enter its state.

`probe.py` allows this only for a model where log-probs and gradients are those of plain padded rows, on one rank,
without gradient checkpointing (transformers then makes no cache), recorded experts and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gspo.learner.policy.packing import Packed, PackItem, single_sequences

_CACHES = ("past_key_values", "cache_params")  # the names of a cache in transformers' outputs and arguments


def pays(item: PackItem, least: int) -> bool:
    """Whether to compute the prompt of this item once: it saves `least` tokens or more. Padding counts."""
    rows = [c.num_inputs for c in item.completions if c.num_inputs]
    once, plain = len(item.prompt) + len(rows) * max(rows, default=0), item.num_tokens(share_prefix=False)
    num_trained = sum(c.is_trained for c in item.completions)
    return num_trained > 1 and item.shown is None and plain - once >= max(least, plain / 4)


def fork_items(items: Sequence[PackItem], least: int) -> list[PackItem]:
    """The items for `pack(share_prefix=True)`, in their order: those that do not pay have one completion each."""
    found: list[PackItem] = []
    for item in items:
        # Only the prompt is shared, and not the common prefixes of a family.
        alone = replace(item, completions=tuple(replace(c, family=None) for c in item.completions))
        found += [alone] if pays(item, least) else single_sequences([item])
    return found


def fork_batches(items: Sequence[PackItem], max_tokens: int, least: int) -> tuple[list[list[PackItem]], list[PackItem]]:
    """Micro-batches of one forked group each, and the items that are left for plain rows.

    A group with more than `max_tokens` tokens is cut, rows of similar length together, and its prompt is repeated.
    """
    batches: list[list[PackItem]] = []
    rest: list[PackItem] = []
    for item in items:
        if not pays(item, least):
            rest.append(item)
            continue
        # Longest first: the first completion of a piece is the width of its rows.
        pieces = [[]]
        for completion in sorted(item.completions, key=lambda c: -c.num_inputs):
            if pieces[-1] and len(item.prompt) + (len(pieces[-1]) + 1) * pieces[-1][0].num_inputs > max_tokens:
                pieces.append([])
            pieces[-1].append(completion)
        for piece in (replace(item, completions=tuple(made)) for made in pieces):
            if pays(piece, least):
                batches.append([piece])
            else:
                rest.append(piece)
    return batches, rest


def forked_hidden(trunk: nn.Module, packed: Packed) -> Tensor:
    """The last hidden states, [N, hidden]. Root segments without children are plain padded rows of one call."""
    parent = packed.layout.parent  # [S]
    has_rows = np.isin(np.arange(len(parent)), parent)  # [S] whether the segment is a prompt that is forked
    parts, places = [], []

    def run(segments: Any, width: int = 1, **inputs: Any) -> Any:
        ids, at, place = packed.rows(segments, width)  # [B, T], [n], [n]
        out = trunk(input_ids=ids, **inputs)
        parts.append(out.last_hidden_state.flatten(0, 1).index_select(0, at))  # [n, hidden]
        places.append(place)
        return out

    alone = np.flatnonzero((parent < 0) & ~has_rows)
    if len(alone):
        run(alone, use_cache=False)
    for prompt in np.flatnonzero(has_rows):
        rows = np.flatnonzero(parent == prompt)
        cache = fork(run([prompt], use_cache=True), len(rows))
        # Two tokens at least: for one token many models call a kernel for decoding, which writes into the state.
        run(rows, 2, use_cache=True, **cache)
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())


def fork(output: Any, num_rows: int) -> dict[str, Any]:
    """The cache in the output of a call with one row, repeated for `num_rows` rows, as an argument of the next call."""
    name = next(name for name in _CACHES if name in output)
    cache = output[name]
    cache.reorder_cache(torch.zeros(num_rows, dtype=torch.int64, device=output.last_hidden_state.device))
    for layer in cache.layers:
        if hasattr(layer, "update_recurrent_state"):
            # It would copy the new state into the old one, which the backward pass needs. Nothing continues from the
            # new state, so it is not stored.
            layer.update_recurrent_state = lambda states, *args, **kwargs: states
    return {name: cache}
