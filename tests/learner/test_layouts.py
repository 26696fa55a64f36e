"""Each family of transformers gets a layout whose gradients are those of plain padded rows, in float64."""

import pytest
import torch
from test_policy import UNEVEN, exact, policy_gradients, reference_gradients  # noqa: F401

from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import probe
from gspo.models.tiny import tiny_model

# One or two of each form of attention, state and head.
SHARED = ("llama", "gpt_oss", "llama4_text", "deepseek_v3", "stablelm", "minicpm3", "opt", "bert")
PADDED = ("qwen3_next", "qwen3_5_text", "falcon_h1", "mamba2", "lfm2", "bloom")
NAMED = {**dict.fromkeys(SHARED, "shared"), **dict.fromkeys(PADDED, "padded"), "gptj": "packed"}


def gap(got, want):
    """Largest ‖a − b‖ / ‖b‖ of a parameter; parameters without a gradient must be the same."""
    assert got.keys() == want.keys()
    assert any(float(grad.abs().max()) > 0 for grad in want.values())
    size = max(float(grad.norm()) for grad in want.values())
    return max(float((got[name] - want[name]).norm() / max(float(want[name].norm()), 1e-6 * size)) for name in want)


def measured(family):
    """(layout, gap) of a family; the layout is that of the float32 model."""
    layout = probe(PolicyModule(tiny_model(family))).layout
    model = tiny_model(family, torch.float64)
    _, want = reference_gradients(model, UNEVEN)
    policy = PolicyModule(model)
    assert probe(policy).layout == layout
    _, _, grads = policy_gradients(policy, [UNEVEN])
    return layout, gap(grads, want)


@pytest.mark.parametrize("family", NAMED)
def test_a_family_has_its_layout_and_the_gradients_of_padded_rows(family, exact):  # noqa: F811
    layout, difference = measured(family)
    assert layout == NAMED[family]
    assert difference <= 1e-8
