import pytest
import torch

from gspo.objectives.surrogate import value_loss

CLIP = 0.2


def one(value, start, target):
    v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss, clipped = value_loss(v, torch.tensor([start]).double(), torch.tensor([target]).double(), CLIP)
    loss.sum().backward()
    return loss.item(), v.grad.item(), bool(clipped)


@pytest.mark.parametrize(("value", "start", "target", "want"), [
    (0.1, 0.0, 1.0, (0.405, -0.9, False)),  # inside the band: ½ (0.1 − 1)², slope V − R
    (0.5, 0.0, 1.0, (0.32, 0.0, True)),  # moved 0.5 towards R: counts as 0.2, ½ · 0.8², no slope left
    (-0.5, 0.0, 1.0, (1.125, -1.5, False)),  # moved away: ½ · 1.5² is the larger, and pulls back
    (1.1, 0.0, 1.0, (0.32, 0.0, True)),  # overshot a little, still nearer than the band's edge
    (2.5, 0.0, 1.0, (1.125, 1.5, False)),  # overshot further than the band's edge is away
])  # fmt: skip
def test_the_larger_of_the_plain_and_the_clipped_error_counts(value, start, target, want):
    assert one(value, start, target) == pytest.approx(want, abs=1e-12)


def test_at_the_start_of_the_batch_it_is_the_plain_squared_error():
    values = torch.randn(50, dtype=torch.float64, requires_grad=True)
    returns = torch.randn(50, dtype=torch.float64)
    loss, clipped = value_loss(values, values, returns, CLIP)
    torch.testing.assert_close(loss, (values - returns).square() / 2, rtol=0, atol=1e-15)
    (grad,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(grad, (values - returns).detach(), rtol=0, atol=1e-15)
    assert not clipped.any()


def test_neither_returns_nor_start_values_get_a_gradient_and_nan_is_not_hidden():
    start, returns = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss, _ = value_loss(torch.full((1,), 0.1, requires_grad=True), start, returns, CLIP)
    loss.sum().backward()
    assert start.grad is None
    assert returns.grad is None
    assert value_loss(torch.tensor([torch.nan]), start, returns, CLIP)[0].isnan().all()
