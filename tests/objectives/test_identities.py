"""Relations of gspo.md §1, in float64."""

import math

import pytest
import torch
from batches import grad, pack, uneven

from gspo.algorithms import ALGORITHMS
from gspo.objectives import denominator, loss

NAMES = list(ALGORITHMS)
SETTINGS = {"dr_grpo": {"max_new_tokens": 32}}


def call(name, logp, proximal, advantage, mask, **kw):
    return loss(name, logp, proximal, advantage, mask, **{**SETTINGS.get(name, {}), **kw})


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_on_policy_the_sequence_mean_family_has_one_gradient():
    logp, _, advantage, mask = uneven([7, 3, 1, 5])
    grads = []
    for name in ("gspo", "gspo_token", "grpo", "rloo", "sapo", "gmpo"):
        leaf = logp.clone().requires_grad_()
        grads.append(grad(call(name, leaf, logp, advantage, mask).loss, leaf))
    for other in grads[1:]:
        close(other, grads[0])
    expected = -(advantage / mask.sum(-1) / 4).unsqueeze(-1) * mask
    close(grads[0], expected)


def test_off_policy_the_gradients_differ():
    logp, proximal, advantage, mask = uneven([7, 3, 1, 5])
    leaf = logp.clone().requires_grad_()
    gspo = grad(call("gspo", leaf, proximal, advantage, mask, clip_low=0.5, clip_high=0.5).loss, leaf)
    grpo = grad(call("grpo", leaf, proximal, advantage, mask).loss, leaf)
    assert (gspo - grpo).abs().max() > 1e-4


def test_gspo_gradient_is_equation_10():
    logp, proximal, advantage, mask = uneven([6, 2, 4])
    leaf = logp.clone().requires_grad_()
    out = call("gspo", leaf, proximal, advantage, mask, clip_low=0.02, clip_high=0.02)
    s = torch.where(mask, logp - proximal, 0.0).sum(-1).div(mask.sum(-1)).exp()
    weight = torch.where(out.clipped, 0.0, s * advantage / mask.sum(-1) / 3)
    assert out.clipped.any()
    assert not out.clipped.all()
    close(grad(out.loss, leaf), -weight.unsqueeze(-1) * mask)


@pytest.mark.parametrize("scale", [1e-4, 3e-3, 0.5])
def test_gspo_token_equals_gspo_where_the_advantage_is_one_per_sequence(scale):
    logp, proximal, advantage, mask = uneven([6, 2, 4, 1, 9])
    settings = {"clip_low": scale, "clip_high": 1.3 * scale}
    a, b = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    gspo = call("gspo", a, proximal, advantage, mask, **settings)
    token = call("gspo_token", b, proximal, advantage.unsqueeze(-1).expand_as(logp), mask, **settings)
    close(gspo.loss, token.loss)
    close(grad(gspo.loss, a), grad(token.loss, b))
    assert torch.equal(gspo.clipped.unsqueeze(-1) & mask, token.clipped & mask)


def test_gspo_token_weighs_tokens_apart_where_advantages_differ():
    logp, proximal, _, mask = uneven([4])
    leaf = logp.clone().requires_grad_()
    advantage = torch.tensor([[2.0, 0.0, -1.0, 0.5]], dtype=torch.float64)
    out = call("gspo_token", leaf, proximal, advantage, mask, clip_low=0.9, clip_high=0.9)
    s = (logp - proximal).mean().exp()
    close(grad(out.loss, leaf), -s * advantage / 4)


def test_one_token_completions_make_gspo_ppo_clip():
    logp, proximal, advantage, mask = uneven([1] * 12, drift=0.4)
    a, b = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    gspo = call("gspo", a, proximal, advantage, mask, clip_low=0.2, clip_high=0.2)
    ppo = call("ppo", b, proximal, advantage, mask)
    close(gspo.loss, ppo.loss)
    close(grad(gspo.loss, a), grad(ppo.loss, b))
    assert gspo.clipped.any()
    assert torch.equal(gspo.clipped, ppo.clipped[:, 0])


def test_order_of_tokens_does_not_matter_to_the_sequence_ratio():
    logp, proximal, advantage, mask = uneven([8, 8])
    order = torch.randperm(8)
    one = call("gspo", logp, proximal, advantage, mask)
    two = call("gspo", logp[:, order], proximal[:, order], advantage, mask)
    close(one.stats["log_s"], two.stats["log_s"])
    close(one.loss, two.loss)


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_padded_in_value_gradient_and_clipping(name):
    logp, proximal, advantage, mask = uneven([7, 3, 1, 0, 5], drift=0.3)
    settings = {"kl_coef": 0.1, "correction": "icepop"}
    reference, behavior = proximal - 0.1, proximal + 0.2
    a = logp.clone().requires_grad_()
    padded = call(name, a, proximal, advantage, mask, reference_logp=reference, behavior_logp=behavior, **settings)
    cu, lp, pr, rf, bh = pack(mask, logp, proximal, reference, behavior)
    b = lp.clone().requires_grad_()
    packed = call(name, b, pr, advantage, None, reference_logp=rf, behavior_logp=bh, cu_seqlens=cu, **settings)
    close(padded.loss, packed.loss)
    close(padded.per_sequence, packed.per_sequence)
    close(grad(padded.loss, a)[mask], grad(packed.loss, b))
    for key in padded.stats:
        close(padded.stats[key], packed.stats[key])
    if padded.clipped.ndim == 2:
        assert torch.equal(padded.clipped[mask], packed.clipped)
    else:
        assert torch.equal(padded.clipped, packed.clipped)


@pytest.mark.parametrize("name", NAMES)
def test_masked_spans_inside_a_packed_sequence_are_as_if_absent(name):
    logp, proximal, advantage, mask = uneven([6, 4, 5], drift=0.3)
    cu, lp, pr = pack(mask, logp, proximal)
    keep = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    a = lp.clone().requires_grad_()
    masked = call(name, a, pr, advantage, keep, cu_seqlens=cu)
    lengths = torch.tensor([4, 3, 4])
    b = lp[keep].clone().requires_grad_()
    absent = call(name, b, pr[keep], advantage, None, cu_seqlens=torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))
    close(masked.loss, absent.loss)
    close(grad(masked.loss, a)[keep], grad(absent.loss, b))
    assert (grad(call(name, a, pr, advantage, keep, cu_seqlens=cu).loss, a)[~keep] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_micro_batch_and_rank_splits_change_nothing(name):
    logp, proximal, advantage, mask = uneven([7, 3, 1, 5, 2, 8], drift=0.3)
    total = denominator(name, num_sequences=6, num_tokens=int(mask.sum()), max_new_tokens=32)
    a = logp.clone().requires_grad_()
    whole = call(name, a, proximal, advantage, mask, denominator=total)
    b = logp.clone().requires_grad_()
    parts = [
        call(name, b[rows], proximal[rows], advantage[rows], mask[rows], denominator=total).loss
        for rows in (slice(0, 1), slice(1, 4), slice(4, 4), slice(4, 6))
    ]
    close(sum(parts), whole.loss)
    close(grad(sum(parts), b), grad(whole.loss, a))
    close(whole.per_sequence.sum() / total, whole.loss)


def test_the_default_denominator_is_this_batchs_own():
    logp, proximal, advantage, mask = uneven([7, 3, 1, 5])
    for name in NAMES:
        total = denominator(name, num_sequences=4, num_tokens=16, max_new_tokens=32)
        one = call(name, logp, proximal, advantage, mask)
        close(one.loss, call(name, logp, proximal, advantage, mask, denominator=total).loss)


def test_expected_log_s_is_minus_kl_per_token_for_one_fixed_length():
    """Enumerate every completion of length 3 over 3 tokens: E_{π_old}[log s] = −KL(π_old ‖ π_θ)/|y|."""
    torch.manual_seed(3)
    length, vocabulary = 3, 3
    logits_old = torch.randn(length, vocabulary, vocabulary**2, dtype=torch.float64)
    logits_new = logits_old + 0.3 * torch.randn_like(logits_old)
    old, new = logits_old.log_softmax(1), logits_new.log_softmax(1)
    paths = torch.cartesian_prod(*[torch.arange(vocabulary)] * length)
    # The context of token t is the pair of tokens before it: the policy is not i.i.d.
    contexts = torch.stack([torch.zeros(27).long(), paths[:, 0], paths[:, 0] * vocabulary + paths[:, 1]], -1)
    step = torch.arange(length)
    lp_old, lp_new = old[step, paths, contexts], new[step, paths, contexts]
    out = call("gspo", lp_new, lp_old, torch.ones(27), torch.ones(27, length))
    probability = lp_old.sum(-1).exp()
    assert math.isclose(float(probability.sum()), 1.0, rel_tol=1e-12)
    kl = (probability * (lp_old - lp_new).sum(-1)).sum()
    close((probability * out.stats["log_s"]).sum(), -kl / length)


def test_luspo_is_gspo_times_length_in_value_and_gradient():
    logp, proximal, advantage, mask = uneven([6, 2, 4])
    settings = {"clip_low": 0.02, "clip_high": 0.02}
    a = call("gspo", logp, proximal, advantage, mask, **settings).per_sequence * mask.sum(-1)
    close(call("luspo", logp, proximal, advantage, mask, **settings).per_sequence, a)


def test_the_advantage_of_a_sequence_is_the_mean_of_its_tokens():
    logp, proximal, _, mask = uneven([4, 2])
    per_token = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, -2.0, 99.0, 99.0]], dtype=torch.float64)
    one = call("gspo", logp, proximal, per_token, mask)
    two = call("gspo", logp, proximal, torch.tensor([3.0, 1.0], dtype=torch.float64), mask)
    close(one.loss, two.loss)
