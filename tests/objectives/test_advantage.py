import pytest
import torch
from batches import pack
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives.advantage import batch, gae, group_mean, group_std, leave_one_out, normalize
from gspo.objectives.aggregate import token_layout

F64 = torch.float64


def t(*x):
    return torch.tensor(x, dtype=F64)


def test_by_hand():
    r, g = t(3, 1, 2, 10), torch.tensor([0, 0, 0, 1])
    # mean 2, unbiased std 1.
    torch.testing.assert_close(group_std(r, g), t(1, -1, 0, 0))
    torch.testing.assert_close(group_mean(r, g), t(1, -1, 0, 0))
    # 3 − (1 + 2)/2, 1 − (3 + 2)/2, 2 − (3 + 1)/2, and nobody to compare with.
    torch.testing.assert_close(leave_one_out(r, g), t(1.5, -1.5, 0, 0))
    # Rewards 3 and 0 of 1 and 2 tokens are 3, 0, 0: mean 1, squared deviations 4 + 1 + 1, unbiased variance 3.
    torch.testing.assert_close(batch(t(3, 0), torch.tensor([1, 2])), t(2, -1) / 3**0.5)


def test_a_weight_is_that_many_equal_values():
    x, weight = torch.randn(5, dtype=F64), torch.tensor([3, 1, 4, 1, 5])
    g = torch.tensor([0, 0, 1, 1, 1])
    for levels in ({"mean_level": "batch", "std_level": "group"}, {"mean_level": "group", "std_level": "batch"}):
        repeated = normalize(x.repeat_interleave(weight), g.repeat_interleave(weight), **levels)
        torch.testing.assert_close(normalize(x, g, weight=weight, **levels).repeat_interleave(weight), repeated)


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(1, 6), st.floats(-50, 50), st.floats(0.1, 9)
)
def test_group_std_ignores_shift_and_scale_and_sums_to_zero(values, num_groups, shift, scale):
    r = torch.tensor(values, dtype=F64)
    g = torch.arange(len(values)) % num_groups
    a = group_std(r, g)
    moved = group_std(scale * r + shift, g)
    # Near the "all equal" threshold a shift may decide it; elsewhere nothing may change.
    clear = torch.stack([(r[g == i].max() - r[g == i].min()) > 1e-2 for i in g])
    torch.testing.assert_close(a[clear], moved[clear], rtol=1e-6, atol=1e-6)
    for i in g.unique():
        assert a[g == i].sum().abs() < 1e-8


def test_interleaved_groups_equal_contiguous_ones():
    r = torch.randn(12, dtype=F64)
    g = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 1, 2])
    order = g.argsort(stable=True)
    torch.testing.assert_close(group_std(r, g)[order], group_std(r[order], g[order]))


def test_a_degenerate_std_set_gives_zero_not_infinity():
    r, g = t(1, 1, 0, 2), torch.tensor([0, 0, 1, 1])
    a = normalize(r, g, mean_level="batch", std_level="group")
    assert (a[:2] == 0).all()
    assert a.isfinite().all()


def test_float32_rewards_are_normalised_in_float64():
    r = torch.tensor([1e6, 1e6 + 2, 1e6 + 4], dtype=torch.float32)
    a = group_std(r, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(a, torch.tensor([-1.0, 0.0, 1.0]))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="groups are"):
        group_std(torch.ones(4, 1), torch.zeros(4))


def test_gae_by_hand():
    # γ = 1/2, λ = 1/2, r = (0, 0, 8), V = (4, 2, 4): δ = (0+1−4, 0+2−2, 8−4) = (−3, 0, 4).
    # A_3 = 4, A_2 = 0 + 1/4·4 = 1, A_1 = −3 + 1/4·1 = −2.75.
    a, returns = gae(t(0, 0, 8)[None], t(4, 2, 4)[None], token_layout(torch.zeros(1, 3), None), 0.5, 0.5)
    torch.testing.assert_close(a, t(-2.75, 1, 4)[None])
    torch.testing.assert_close(returns, t(1.25, 3, 8)[None])


def test_gae_with_lambda_one_is_return_minus_value_and_lambda_zero_the_td_error():
    r, v = torch.randn(3, 6, dtype=F64), torch.randn(3, 6, dtype=F64)
    layout = token_layout(r, None)
    a, _ = gae(r, v, layout, 1.0, 1.0)
    torch.testing.assert_close(a, r.flip(-1).cumsum(-1).flip(-1) - v)
    a, _ = gae(r, v, layout, 0.9, 0.0)
    torch.testing.assert_close(a, r + 0.9 * torch.nn.functional.pad(v[:, 1:], (0, 1)) - v)


def test_gae_steps_over_masked_spans_in_both_forms():
    r, v = torch.randn(2, 5, dtype=F64), torch.randn(2, 5, dtype=F64)
    keep = torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    padded = gae(r, v, token_layout(r, keep), 0.9, 0.8)
    dense = gae(r[0][keep[0]][None], v[0][keep[0]][None], token_layout(torch.zeros(1, 3), None), 0.9, 0.8)
    torch.testing.assert_close(padded[0][0][keep[0]], dense[0][0])
    assert (padded[0][~keep] == 0).all()
    inside = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    cu, pr, pv, pk = pack(inside, r, v, keep)
    flat = gae(pr, pv, token_layout(pr, pk, cu), 0.9, 0.8)
    for one, two in zip(padded, flat, strict=True):
        torch.testing.assert_close(one[inside], two)
