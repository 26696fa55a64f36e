import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from gspo.models import tree
from gspo.models.tree import EVERYTHING, TREE, Reach, TreeLayout, tree_attention, use_attention


def visibility(layout, reach):
    """[N, N] by walking up the tree, token by token: nothing of the plan's cleverness."""
    num = len(layout.positions)
    seen = torch.zeros(num, num, dtype=torch.bool)
    for s, (begin, length) in enumerate(zip(layout.start.tolist(), layout.length.tolist(), strict=True)):
        for i in range(length):
            row, up = begin + i, s
            seen[row, begin : row + 1] = True
            while (up := int(layout.parent[up])) >= 0:
                seen[row, layout.start[up] : layout.start[up] + layout.length[up]] = True
    positions = torch.from_numpy(layout.positions)
    if reach.window is not None:
        seen &= positions[:, None] - positions[None, :] < reach.window
    if reach.chunk is not None:
        seen &= positions[:, None] // reach.chunk == positions[None, :] // reach.chunk
    return seen


def dense(q, k, v, sinks, layout, scale, reach, softcap):
    rep = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(rep, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visibility(layout, reach), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v.repeat_interleave(rep, 0)).transpose(0, 1)


def assert_equal_to_dense(
    lengths, parents, *, heads=(4, 2), dims=(6, 6), scale=0.3, reach=EVERYTHING, softcap=None, with_sinks=False
):
    start = [sum(lengths[:i]) for i in range(len(lengths))]
    layout = TreeLayout(start, lengths, parents)
    num = sum(lengths)
    shapes = (heads[0], num, dims[0]), (heads[1], num, dims[0]), (heads[1], num, dims[1])
    ours = [(2 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    if with_sinks:
        ours.append((3 * torch.randn(heads[0], dtype=torch.float64)).requires_grad_())
    plain = [x.detach().clone().requires_grad_() for x in ours]
    ours_sinks, plain_sinks = (ours[3], plain[3]) if with_sinks else (None, None)
    upstream = torch.randn(num, heads[0], dims[1], dtype=torch.float64)
    got = tree_attention(*ours[:3], layout, scale=scale, reach=reach, softcap=softcap, sinks=ours_sinks)
    want = dense(*plain[:3], plain_sinks, layout, scale, reach, softcap)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    got.backward(upstream)
    want.backward(upstream)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


TREES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=12).map(
    lambda nodes: ([n for n, _ in nodes], [up % (i + 1) - 1 for i, (_, up) in enumerate(nodes)])
)


@given(
    tree=TREES.filter(lambda t: sum(t[0]) > 0),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    reach=st.builds(Reach, st.none() | st.integers(1, 12), st.none() | st.integers(1, 12)),
    softcap=st.none() | st.just(1.5),
    with_sinks=st.booleans(),
    scale=st.sampled_from([0.3, 5.0]),  # 5: one side of a merge may outweigh the other by e^20 and more
)
def test_any_tree_equals_dense_attention_over_the_visible_tokens(tree, heads, reach, softcap, scale, with_sinks):
    assert_equal_to_dense(*tree, heads=heads, reach=reach, softcap=softcap, scale=scale, with_sinks=with_sinks)


@pytest.mark.parametrize("reach", [Reach(), Reach(40), Reach(chunk=23)])
def test_tiles_and_split_calls_change_nothing(monkeypatch, reach):
    monkeypatch.setattr(tree, "_TILE_ROWS", 8)
    monkeypatch.setattr(tree, "_CALL_SCORES", 200)
    lengths, parents = [50, 9, 17, 30, 5, 21], [-1, 0, 0, -1, 2, 3]
    assert_equal_to_dense(lengths, parents, dims=(6, 10), reach=reach)


def test_a_prefix_that_outweighs_the_own_segment_neither_overflows_nor_vanishes():
    layout = TreeLayout([0, 2], [2, 2], [-1, 0])
    q = torch.tensor([100.0, 100.0, 100.0, 100.0]).view(1, 4, 1)
    k = torch.tensor([30.0, 30.0, -30.0, -30.0]).view(1, 4, 1)  # scores 3000 against −3000
    v = torch.tensor([1.0, 3.0, 7.0, 9.0]).view(1, 4, 1)
    assert tree_attention(q, k, v, layout, scale=1.0).flatten().tolist() == [1.0, 2.0, 2.0, 2.0]
    assert tree_attention(q, -k, v, layout, scale=1.0).flatten().tolist() == [1.0, 2.0, 7.0, 8.0]


@pytest.mark.parametrize("excess", [15.0, 22.0, 35.0, -22.0])
def test_the_lighter_side_of_a_merge_keeps_its_gradient(excess):
    layout = TreeLayout([0, 1], [1, 1], [-1, 0])
    q = torch.ones(1, 2, 1, dtype=torch.float64)
    k = torch.tensor([excess, 0.0], dtype=torch.float64).view(1, 2, 1)
    v = torch.zeros(1, 2, 1, dtype=torch.float64, requires_grad=True)
    tree_attention(q, k, v, layout, scale=1.0)[1].sum().backward()
    prefix, own = torch.softmax(k.flatten(), 0).tolist()
    torch.testing.assert_close(v.grad.flatten(), torch.tensor([prefix, own], dtype=torch.float64), rtol=1e-13, atol=0)


def test_half_precision_in_is_half_precision_out():
    layout = TreeLayout([0, 3], [3, 2], [-1, 0])
    q, k, v = (torch.randn(2, 5, 4) for _ in range(3))
    want = tree_attention(q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float(), layout)
    got = tree_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.bfloat16(), rtol=0, atol=0)


def test_a_child_before_its_parent_is_refused():
    with pytest.raises(ValueError, match="parents must precede"):
        TreeLayout([0, 1], [1, 1], [1, -1])


def tiny_llama(**changes):
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **changes
    )
    return tf.LlamaForCausalLM(config).eval()


def test_the_attention_of_a_model_is_switched_within_a_scope_only():
    model = tiny_llama()
    before = model.config._attn_implementation
    inside = []

    def fail():
        with use_attention(model, TREE):
            inside.append(model.model.config._attn_implementation)
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fail()
    assert inside == [TREE]
    assert model.config._attn_implementation == before != TREE


def test_what_the_tree_cannot_honour_is_refused():
    ids = torch.arange(4)[None]
    layout = TreeLayout([0], [4], [-1])
    with use_attention(model := tiny_llama(), TREE), pytest.raises(ValueError, match="needs the layout"):
        model(input_ids=ids, use_cache=False)
    with use_attention(model, TREE, layout):
        model(input_ids=ids, use_cache=False)
        with pytest.raises(ValueError, match="one packed row"):
            model(input_ids=ids.repeat(2, 1), use_cache=False)
    with (
        use_attention(model := tiny_llama(attention_dropout=0.1).train(), TREE, layout),
        pytest.raises(ValueError, match="dropout"),
    ):
        model(input_ids=ids, use_cache=False)
    with use_attention(model := tiny_llama(), TREE, layout):
        for kind, message in (
            ("hybrid_attention", "hybrid_attention"),
            ("sliding_attention", "no sliding_window"),
        ):
            model.config.layer_types = [kind]
            with pytest.raises(ValueError, match=message):
                model(input_ids=ids, use_cache=False)
