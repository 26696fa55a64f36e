"""Flex attention sees what the tree sees. Forward only: torch has no CPU backward for it; CUDA is probed at load."""

import pytest
import torch
import transformers as tf

from gspo.models.flex import FLEX, flex_tree_attention
from gspo.models.tree import TREE, Reach, TreeLayout, tree_attention, use_attention

# Lengths and parents: two groups, a chain, a branching turn, a lone segment; more than one block of 128.
FORESTS = {
    "groups": ([5, 4, 3, 8, 2, 150], [-1, 0, 0, -1, 3, 3]),
    "turns": ([9, 4, 6, 3, 7, 5], [-1, 0, 1, 1, 0, 4]),
    "late child": ([3, 4, 2, 5], [-1, -1, 0, 1]),
    "alone": ([7], [-1]),
}

pytestmark = [pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"), pytest.mark.run]


def layout_of(lengths, parents):
    return TreeLayout([sum(lengths[:i]) for i in range(len(lengths))], lengths, parents)


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize(
    ("reach", "softcap", "heads"),
    [(Reach(), None, (4, 2)), (Reach(6), None, (3, 3)), (Reach(), 1.5, (4, 1)), (Reach(chunk=4), None, (4, 2))],
)
def test_flex_attention_sees_what_the_tree_sees(forest, reach, softcap, heads):
    layout = layout_of(*FORESTS[forest])
    num = len(layout.positions)
    q, k, v = (2 * torch.randn(h, num, 16, dtype=torch.float64) for h in (heads[0], heads[1], heads[1]))
    sinks = torch.randn(heads[0], dtype=torch.float64) if reach.chunk else None
    how = {"scale": 0.3, "reach": reach, "softcap": softcap, "sinks": sinks}
    with torch.no_grad():
        got = flex_tree_attention(q, k, v, layout, **how)
    torch.testing.assert_close(got, tree_attention(q, k, v, layout, **how), rtol=0, atol=1e-12)


def test_a_model_runs_with_it_through_the_attention_interface():
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**shape, num_attention_heads=2, initializer_range=0.4)).double().eval()
    layout = layout_of(*FORESTS["turns"])
    num = len(layout.positions)
    given = {
        "input_ids": torch.randint(32, (1, num)),
        "position_ids": torch.from_numpy(layout.positions)[None],
        "use_cache": False,
    }
    logits = []
    for name in (TREE, FLEX):
        with use_attention(model, name, layout), torch.no_grad():
            logits.append(model(**given).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-10)
