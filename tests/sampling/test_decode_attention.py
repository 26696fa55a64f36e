"""Shared-prompt decode attention against a dense softmax, in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from gspo.errors import RolloutError
from gspo.sampling.local.attention import ATTENTION, DecodePlan, ExtendPlan, KVStore, PrefillPlan, active, make_grid

KV, PER_KV, DIM, DIM_V = 2, 3, 8, 5


def dense(q, k, v, scale, window=None, softcap=None, sinks=None):
    """Attention of the last query over all keys of one sequence: q [H, D], k [S, K, D], v [S, K, V]."""
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // PER_KV] @ q[head] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[: max(0, len(scores) - window)] = -torch.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks[head][None]])
        out.append(torch.softmax(scores, -1)[: len(k)] @ v[:, head // PER_KV])
    return torch.stack(out)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 4},
        {"window": 9},
        {"softcap": 0.7},
        {"window": 6, "softcap": 2.0},
        {"sinks": torch.linspace(-1.0, 1.5, 6, dtype=torch.float64)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("prompts", [(5, 5, 5), (3, 11, 7)])
def test_prefill_extend_and_decode_equal_dense_attention(options, prompts):
    generator = torch.Generator().manual_seed(0)

    def qkv(num):
        return tuple(
            torch.randn(num, h, d, dtype=torch.float64, generator=generator)
            for h, d in ((KV * PER_KV, DIM), (KV, DIM), (KV, DIM_V))
        )

    kwargs = {"scaling": 0.3, "sliding_window": options.get("window"), "softcap": options.get("softcap")}
    kwargs["s_aux"] = options.get("sinks")
    module, store, attend = SimpleNamespace(layer_idx=0), KVStore(), AttentionInterface()[ATTENTION]

    def call(plan, q, k, v):
        with active(store, plan):
            out, _ = attend(module, *(x.transpose(0, 1)[None] for x in (q, k, v)), None, **kwargs)
        return out[0]

    prompts = sorted(prompts)
    rows, groups, owns = 4, [2, 0, 2, 1], [4, 1, 2, 3]  # own tokens stored before the one decoded here
    slots = [1, 2, 0]  # where each prompt is stored
    store.reserve(groups=3, prompt_len=max(prompts), rows=rows, own_len=2)
    q, k, v = qkv(sum(prompts))
    lengths, starts = np.array(prompts), np.cumsum([0, *prompts[:-1]])
    runs = [(int(starts[lengths == n][0]), int((lengths == n).sum()), int(n)) for n in np.unique(lengths)]
    out = call(PrefillPlan(runs, slots), q, k, v)
    prompt = {}
    for start, length, slot in zip(starts, prompts, slots, strict=True):
        prompt[slot] = (k[start : start + length], v[start : start + length])
        for i in range(length):
            part = slice(start, start + i + 1)
            torch.testing.assert_close(
                out[start + i], dense(q[start + i], k[part], v[part], 0.3, **options), rtol=0, atol=1e-12
            )

    store.reserve(own_len=5)  # growing must keep what is stored
    q, k, v = qkv(sum(owns))
    starts = np.cumsum([0, *owns[:-1]])
    segments = [
        (int(s), n, r, groups[r], len(prompt[groups[r]][0])) for r, (s, n) in enumerate(zip(starts, owns, strict=True))
    ]
    out = call(ExtendPlan(segments), q, k, v)
    own = []
    for start, length, _, group, _ in segments:
        own.append((k[start : start + length], v[start : start + length]))
        for i in range(length):
            keys = torch.cat([prompt[group][0], k[start : start + i + 1]])
            values = torch.cat([prompt[group][1], v[start : start + i + 1]])
            torch.testing.assert_close(
                out[start + i], dense(q[start + i], keys, values, 0.3, **options), rtol=0, atol=1e-12
            )

    q, k, v = qkv(rows)
    grid = make_grid(np.array(groups), np.ones(rows, dtype=bool))
    plan = DecodePlan(grid, np.array([len(prompt[g][0]) for g in groups]), np.array(owns))
    out = call(plan, q, k, v)
    for row, group in enumerate(groups):
        keys = torch.cat([prompt[group][0], own[row][0], k[row : row + 1]])
        values = torch.cat([prompt[group][1], own[row][1], v[row : row + 1]])
        torch.testing.assert_close(out[row], dense(q[row], keys, values, 0.3, **options), rtol=0, atol=1e-12)


def test_the_grid_seats_every_living_row_once_and_no_dead_one():
    group, alive = np.array([2, 0, 2, 1, 0, 2]), np.array([True, True, False, True, True, True])
    grid = make_grid(group, alive)
    assert (grid.num_groups, grid.num_ranks) == (3, 2)
    cells = {(int(grid.group_n[i]), int(grid.rank_n[i])): i for i in np.flatnonzero(alive)}
    assert len(cells) == 5
    for (g, r), row in cells.items():
        assert grid.row_of_cell[g * grid.num_ranks + r] == row


def test_the_attention_refuses_to_run_outside_the_sampler():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RolloutError, match="outside the sampler"):
        AttentionInterface()[ATTENTION](SimpleNamespace(layer_idx=0), x, x, x, None)
