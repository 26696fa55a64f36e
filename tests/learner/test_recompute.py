"""A gated MLP with recomputed products: the same gradients to the last bit, from two wide tensors instead of four."""

import model_zoo
import pytest
import torch
from torch import nn

from gspo.learner.policy import module
from gspo.learner.policy.module import gated_mlps, recompute_gated_products


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(module, "MIN_WIDTH", 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "granite", "cohere"])
def test_gradients_are_equal_bit_for_bit(name):
    model = model_zoo.build(name, torch.float32)
    plain = model_zoo.gradients(model)
    assert len(list(gated_mlps(model))) == model.config.num_hidden_layers
    recompute_gated_products(model)
    again = model_zoo.gradients(model)
    assert len(again) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_two_wide_tensors_are_kept_instead_of_four_and_no_product_is_computed_twice():
    model = model_zoo.build("llama", torch.float32)
    mlp, x = model.model.layers[0].mlp, torch.randn(5, model.config.hidden_size, requires_grad=True)
    calls = []
    mlp.down_proj.register_forward_hook(lambda *_: calls.append("down"))

    def num_wide() -> int:
        kept: dict[int, torch.Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
            y = mlp(x)
        y.sum().backward()
        return sum(t.shape == (5, model.config.intermediate_size) for t in kept.values())

    assert num_wide() == 4
    recompute_gated_products(model)
    calls.clear()
    assert num_wide() == 2
    assert calls == ["down"]  # the recomputation stopped before the product with W_down


class Scaled(nn.Module):
    """The same parts, another formula."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(2 * self.gate_proj(x)) * self.up_proj(x))


class TwoInputs(Scaled):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize("kind", [Scaled, TwoInputs])
def test_another_formula_keeps_its_own_forward_pass(kind):
    model = nn.ModuleList([kind()])
    recompute_gated_products(model)
    assert "forward" not in vars(model[0])


def test_narrow_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(module, "MIN_WIDTH", 512)
    assert not list(gated_mlps(model_zoo.build("llama")))
