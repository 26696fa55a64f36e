"""Properties that hold for any batch: finite, invariant, differentiable."""

import pytest
import torch
from batches import grad, pack, uneven
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.gradcheck import GradcheckError

from gspo.algorithms import ALGORITHMS
from gspo.objectives import denominator, loss

NAMES = st.sampled_from(list(ALGORITHMS))
LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.sampled_from([100, 1000, 4096])), min_size=1, max_size=5)
KW = {"max_new_tokens": 16}


def packed(lengths, seed, scale, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    proximal = -torch.rand(n, generator=g, dtype=dtype)
    logp = proximal + scale * (2 * torch.rand(n, generator=g, dtype=dtype) - 1)
    advantage = torch.randn(len(lengths), generator=g, dtype=dtype)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return logp, proximal, advantage, cu


@given(NAMES, LENGTHS, st.integers(0, 1000), st.sampled_from([0.0, 1e-4, 1e-2, 1.0, 40.0, 1e4]))
def test_finite_inputs_give_a_finite_loss_and_gradient(name, lengths, seed, scale):
    if sum(lengths) == len(lengths) and set(lengths) != {1}:
        lengths = [*lengths, 2]  # a packed [B] that could be read per token is refused; another test says so
    for dtype in (torch.float32, torch.float64):
        logp, proximal, advantage, cu = packed(lengths, seed, scale, dtype)
        logp.requires_grad_()
        out = loss(name, logp, proximal, advantage, None, cu_seqlens=cu, **KW)
        assert out.loss.isfinite()
        assert grad(out.loss, logp).isfinite().all()
        assert out.loss.dtype == dtype


@given(NAMES, LENGTHS, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_permuting_sequences_permutes_their_shares_and_keeps_the_loss(name, lengths, seed, random):
    mask = torch.arange(max([*lengths, 1])) < torch.tensor(lengths).unsqueeze(-1)
    logp, proximal, advantage, _ = uneven(lengths, seed, drift=0.2)
    order = list(range(len(lengths)))
    random.shuffle(order)
    one = loss(name, logp, proximal, advantage, mask, **KW)
    two = loss(name, logp[order], proximal[order], advantage[order], mask[order], **KW)
    torch.testing.assert_close(one.per_sequence[order], two.per_sequence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-12, atol=1e-12)


@given(NAMES, st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(0, 1000), st.data())
def test_any_split_into_micro_batches_and_ranks_sums_to_the_whole(name, lengths, seed, data):
    logp, proximal, advantage, mask = uneven(lengths, seed, drift=0.2)
    piece = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    total = denominator(name, num_sequences=len(lengths), num_tokens=max(sum(lengths), 1), max_new_tokens=16)
    a, b = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    whole = loss(name, a, proximal, advantage, mask, denominator=total, **KW).loss
    parts = sum(
        loss(
            name, b[piece == p], proximal[piece == p], advantage[piece == p], mask[piece == p], denominator=total, **KW
        ).loss
        for p in range(4)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad(parts, b), grad(whole, a), rtol=1e-12, atol=1e-12)


@given(NAMES, st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 100))
def test_more_padding_changes_nothing(name, lengths, extra, seed):
    logp, proximal, advantage, mask = uneven(lengths, seed, drift=0.2)
    wide = [torch.nn.functional.pad(t, (0, extra), value=torch.nan) for t in (logp, proximal)]
    one = loss(name, logp, proximal, advantage, mask, **KW)
    two = loss(name, *wide, advantage, torch.nn.functional.pad(mask, (0, extra)), **KW)
    torch.testing.assert_close(one.per_sequence, two.per_sequence, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_finite_differences(name, form):
    """gradcheck in float64, away from the clip boundary, with KL and correction on."""
    logp, proximal, advantage, mask = uneven([4, 2, 3], drift=0.03)
    reference, behavior = proximal - 0.2, proximal + 0.1
    settings = {"kl_coef": 0.3, "correction": "tis", **KW}
    if ALGORITHMS[name].gate == "clip":
        settings |= {"clip_low": 0.004, "clip_high": 0.004}
    cu = None
    if form == "packed":
        cu, logp, proximal, reference, behavior = pack(mask, logp, proximal, reference, behavior)
        mask = None

    def value(x):
        others = {"reference_logp": reference, "behavior_logp": behavior}
        return loss(name, x, proximal, advantage, mask, cu_seqlens=cu, **others, **settings).loss

    leaf = logp.clone().requires_grad_()
    if name == "cispo":
        # Its weight is a constant by definition: the value does not move as the gradient says.
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(value, (leaf,))
    else:
        assert torch.autograd.gradcheck(value, (leaf,))


def test_gradients_flow_into_logp_only():
    logp, proximal, advantage, mask = uneven([4, 2])
    others = [t.clone().requires_grad_() for t in (proximal, advantage, proximal - 0.1, proximal - 0.2)]
    leaf = logp.clone().requires_grad_()
    out = loss(
        "grpo", leaf, others[0], others[1], mask, behavior_logp=others[2], reference_logp=others[3],
        correction="tis", kl_coef=0.1,
    )  # fmt: skip
    grads = torch.autograd.grad(out.loss, [leaf, *others], allow_unused=True)
    assert grads[0] is not None
    assert all(g is None for g in grads[1:])
    assert not any(t.requires_grad for t in out.stats.values())


def test_an_advantage_that_could_be_read_two_ways_is_refused():
    logp, proximal, cu = torch.zeros(2), torch.zeros(2), torch.tensor([0, 0, 2])
    with pytest.raises(ValueError, match="per sequence or per token"):
        loss("gspo", logp, proximal, torch.ones(2), None, cu_seqlens=cu)


@pytest.mark.parametrize("cu", [[0, 3], [1, 4], [0, 3, 2, 4], [[0, 4]]])
def test_bad_cu_seqlens_are_refused(cu):
    with pytest.raises(ValueError, match="cu_seqlens"):
        loss("gspo", torch.zeros(4), torch.zeros(4), torch.ones(1), None, cu_seqlens=torch.tensor(cu))


def test_nothing_at_all_is_a_loss_of_zero():
    empty = torch.zeros(0)
    out = loss("gspo", empty, empty, torch.zeros(0), None, cu_seqlens=torch.tensor([0]))
    assert out.loss == 0
    out = loss("grpo", torch.zeros(2, 0), torch.zeros(2, 0), torch.ones(2), torch.zeros(2, 0))
    assert out.loss == 0
