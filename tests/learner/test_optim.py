"""The optimizer: what a step does to weights that cannot hold it."""

import pytest
import torch

from gspo.learner.optim import make_optimizer

HOW = {"lr": 1e-6, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def trained(optimizer, weight, steps=200):
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        weight.grad = (0.5 + torch.rand(weight.shape, generator=draw)).to(weight.dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_on_16_bit_weights_are_those_of_float32_rounded_at_the_end(dtype):
    start = torch.linspace(0.01, 1.0, 64, dtype=torch.float32).to(dtype)
    half, single = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    moved = trained(make_optimizer([half], kind="adamw", **HOW), half)
    wide = make_optimizer([single], kind="adamw", **HOW)
    draw = torch.Generator().manual_seed(3)
    for _ in range(200):
        single.grad = (0.5 + torch.rand(start.shape, generator=draw)).to(dtype).float()
        wide.step()
    assert torch.equal(moved, single.detach().to(dtype))
    assert not torch.equal(moved, start)
    # Without the copy nothing moves where weights are large beside the step.
    alone = torch.nn.Parameter(start.clone())
    stuck = trained(torch.optim.AdamW([alone], fused=True, **HOW), alone)
    assert (stuck == start).sum() > (moved == start).sum()
    assert torch.equal(stuck[32:], start[32:])
