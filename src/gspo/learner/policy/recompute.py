"""A gated MLP that keeps two of its four wide tensors for the backward pass and computes the others again.

    y = W_down ( act(g) · u ),   g = W_gate x,   u = W_up x

Autograd keeps g, u, act(g) and the product act(g) · u, each of the intermediate size: in a Llama more than half of all
activations. The last two are elementwise functions of the first two, so the backward pass can compute them again
for about a hundredth of its time. The operations are the same ones, so every bit of the gradients is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Below this intermediate size a call of `checkpoint` costs more than the memory is worth.
MIN_WIDTH = 512
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def recompute_gated_products(model: nn.Module) -> None:
    """Replace the forward pass of every gated MLP of the model that computes exactly the formula above."""
    for module in gated_mlps(model):
        module.forward = MethodType(_forward, module)


def gated_mlps(model: nn.Module) -> Iterator[Any]:
    """The wide MLPs whose forward pass is the formula, by a comparison on random numbers: one of each class."""
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        found: Any = module
        if not all(hasattr(found, name) for name in _PARTS) or getattr(found.gate_proj, "out_features", 0) < MIN_WIDTH:
            continue
        if type(module) not in same:
            same[type(module)] = _computes_the_formula(found)
        if same[type(module)]:
            yield found


@torch.no_grad()
def _computes_the_formula(mlp: Any) -> bool:
    weight = mlp.gate_proj.weight
    x = torch.randn(2, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)
    try:
        expected = type(mlp).forward(mlp, x)
    except Exception:  # more arguments, or another shape: not this formula
        return False
    return x.is_meta or (isinstance(expected, Tensor) and torch.equal(expected, _forward(mlp, x)))


def _forward(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)  # [..., intermediate]

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    if not torch.is_grad_enabled():
        return rest(gate, up)
    # The recomputation stops before the product with W_down: its input is the last tensor that was not kept.
    # Nothing here is random (dropout is off), so the state of the generators need not be kept.
    result = checkpoint(rest, gate, up, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result
