"""The optimizer: what a step does to weights that cannot hold it."""

import pytest
import torch
from pretend_cuda import OnCuda, on_cuda, pretend_cuda, values

from gspo.learner.optim import BLOCK, make_optimizer
from gspo.runs import checkpoint

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


def skewed(shape, seed, dtype=torch.float32, decades=3):
    """Gradients with a mean, of sizes over several decades within a block."""
    draw = torch.Generator().manual_seed(seed)
    size = 10 ** (decades * (torch.rand(shape, generator=torch.Generator().manual_seed(1)) - 1))
    return ((torch.randn(shape, generator=draw) + 0.3) * size).to(dtype)


def two_runs(kind, shape=(100, 96), dtype=torch.float32, updates=20, decades=3, **how):
    """How far weights move with 8-bit and with exact moments, and the two optimizers."""
    found = []
    for each in (kind, "adamw"):
        draw = torch.Generator().manual_seed(0)
        start = torch.randn(shape, generator=draw).mul(0.02).to(dtype)
        weight = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer([weight], kind=each, **(HOW | {"weight_decay": 0.0, "lr": 1e-3} | how))
        for seed in range(updates):
            weight.grad = skewed(shape, seed, dtype, decades)
            optimizer.step()
        found += [weight.detach() - start, optimizer]
    return found[0], found[2], found[1], found[3]


def test_updates_with_8_bit_moments_are_those_of_adamw_within_their_rounding():
    packed, exact, optimizer, _ = two_runs("adamw8bit")
    assert 0 < (packed - exact).norm() < 0.06 * exact.norm()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["exp_avg"].element_size() == state["exp_avg_sq"].element_size() == 1
    assert len(state["exp_avg_scale"]) == -(-9600 // BLOCK)


def test_8_bit_moments_neither_stop_nor_overshoot_in_many_updates():
    """A second moment that is rounded to the nearest stops changing; one that becomes 0 gives steps of any size."""
    for decades, bound in ((1, 0.1), (7, 0.7)):
        packed, exact, *_ = two_runs("adamw8bit", shape=(64, 64), updates=400, decades=decades)
        assert (packed - exact).norm() < bound * exact.norm()
        assert packed.norm() < 1.05 * exact.norm()
        assert packed.abs().max() < 1.2 * exact.abs().max()


def test_small_tensors_have_exact_moments():
    packed, exact, *_ = two_runs("adamw8bit", shape=(63, 65), weight_decay=0.1)
    assert torch.equal(packed, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_8_bit_moments_serve_16_bit_weights_with_an_exact_copy_and_wide_ones(dtype):
    packed, exact, *optimizers = two_runs("adamw8bit", dtype=dtype, lr=1e-6, updates=20)
    assert packed.dtype == dtype
    if dtype == torch.bfloat16:  # compared before they are rounded
        weights = [o.param_groups[0]["params"][0] for o in optimizers]
        held, kept = (o.state[p]["weight"] for o, p in zip(optimizers, weights, strict=True))
        assert torch.equal(weights[0].detach(), held.to(dtype))
        start = torch.randn(100, 96, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype).float()
        packed, exact = held - start, kept - start
    assert 0 < (packed - exact).norm() < 0.06 * exact.norm()


def test_chunks_and_transposed_weights_are_updated_and_zero_gradients_move_nothing(monkeypatch):
    monkeypatch.setattr("gspo.learner.optim._CHUNK", 2 * BLOCK)
    packed, exact, *_ = two_runs("adamw8bit")
    assert (packed - exact).norm() < 0.06 * exact.norm()
    weight = torch.nn.Parameter(torch.zeros(96, 100).T)
    optimizer = make_optimizer([weight], kind="adamw8bit", **(HOW | {"lr": 1e-3, "weight_decay": 0.0}))
    weight.grad = torch.zeros(100, 96)
    weight.grad[50:] = 1.0
    for _ in range(3):
        optimizer.step()
    assert not weight[:50].any()
    torch.testing.assert_close(weight[50:].detach(), torch.full((50, 96), -3e-3), rtol=0.02, atol=0)


def test_a_checkpoint_of_8_bit_moments_goes_on_bit_for_bit(tmp_path):
    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(96, 100)
        return model, make_optimizer(model.parameters(), kind="adamw8bit", **(HOW | {"lr": 1e-3}))

    def update(model, optimizer, seeds):
        for seed in seeds:
            model.weight.grad, model.bias.grad = skewed((100, 96), seed), skewed((100,), seed)
            optimizer.step()

    through, stopped, resumed = made(), made(), made()
    update(*through, range(6))
    update(*stopped, range(3))
    folder = checkpoint.save(tmp_path, 3, *stopped, {}, "digest")
    checkpoint.load_checkpoint(folder, *resumed)
    update(*resumed, range(3, 6))
    assert torch.equal(resumed[0].weight, through[0].weight)
    own, other = (o.state[m.weight] for m, o in (resumed, through))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_state_is_in_the_hosts_memory_and_makes_the_same_updates(dtype, tmp_path):
    start = torch.linspace(0.01, 1.0, 64).to(dtype)
    here, there = torch.nn.Parameter(start.clone()), on_cuda(start.clone()).requires_grad_()
    expected = trained(make_optimizer([here], kind="adamw", **HOW), here, steps=6)

    class Model(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self._parameters["weight"] = weight

    with pretend_cuda():
        optimizer = make_optimizer([there], kind="adamw", offload=True, **HOW)
        draw = torch.Generator().manual_seed(3)
        for update in range(6):
            there.grad = (0.5 + torch.rand(there.shape, generator=draw)).to(dtype).to("cuda")
            optimizer.step()
            if update == 2:  # a checkpoint brings the state back to where it was
                model = Model(there)
                folder = checkpoint.save(tmp_path, 3, model, optimizer, {}, "digest")
                checkpoint.load_checkpoint(folder, model, optimizer)
    assert isinstance(there, OnCuda)
    assert not any(isinstance(value, OnCuda) for value in optimizer.state[there].values())
    assert torch.equal(values(there), expected)
