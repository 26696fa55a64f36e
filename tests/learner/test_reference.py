import copy
from collections import Counter
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, plain_logp, uneven_groups, with_behavior
from made_steps import assert_same_weights, descend, sgd

from gspo.learner.credit import Credit, with_token_advantages
from gspo.learner.policy.module import PolicyModule
from gspo.learner.reference import Reference, reference_logp
from gspo.learner.step import Plan, train_step
from gspo.objectives import kl

TEMPERATURE = 0.8


def moved(model, size=0.02):
    """Another policy, not far away."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in other.parameters():
            p += size * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return other


def with_reference(batch, model):
    return replace(batch, reference_logp=reference_logp(Reference(PolicyModule(model), TEMPERATURE, 8192), batch))


def make_plan(coefficient, estimator="k3", **changes):
    settings = {"level": "sequence", "aggregation": "sequence_mean", "kl_coef": coefficient, "kl_estimator": estimator}
    plan = Plan("gspo", settings, 1, TEMPERATURE, 8192, 0.0, 11, skip_zero_advantage=not coefficient)
    return replace(plan, **changes)


@pytest.mark.parametrize("max_tokens", [1, 25, 8192])
def test_reference_log_probs_are_the_plain_ones_of_every_sequence_a_loss_can_reach(max_tokens, exact):
    model = model_zoo.build("qwen3")
    batch = make_batch(uneven_groups())
    got = reference_logp(Reference(PolicyModule(model), TEMPERATURE, max_tokens), batch)
    with torch.no_grad():
        want, mask = plain_logp(model, batch, np.ones(batch.num_sequences, bool), TEMPERATURE)
    assert got.keys() == set(np.flatnonzero(batch.trainable))
    assert set(np.flatnonzero(batch.trainable & ~batch.has_gradient)) <= got.keys()  # a KL needs no advantage
    for i, logp in got.items():
        np.testing.assert_allclose(logp, want[i][mask[i]].numpy(), atol=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_with_kl_in_the_loss_is_the_plain_one(estimator, exact):
    """(1/B) Σ_i ( −s_i A_i + β (1/|y_i|) Σ_t k_it ) with k written out, on padded rows, zero advantages included."""
    start = model_zoo.build("qwen3")
    reference = moved(start)
    batch = make_batch(with_behavior(uneven_groups(), start, TEMPERATURE))
    packed, plain = copy.deepcopy(start), copy.deepcopy(start)
    policy = PolicyModule(packed)
    plan = make_plan(0.7, estimator, max_tokens=30)
    report = train_step(
        policy, sgd(policy), with_reference(batch, reference), plan, proximal="recompute", learning_rates=[1.0]
    )
    logp, mask = plain_logp(plain, batch, batch.in_denominator, TEMPERATURE)
    with torch.no_grad():
        their, _ = plain_logp(reference, batch, batch.in_denominator, TEMPERATURE)
    d = torch.where(mask, logp - their, 0.0)
    k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
    length = mask.sum(-1).clamp(min=1)
    s = torch.exp(torch.where(mask, logp - logp.detach(), 0.0).sum(-1) / length)
    advantage = torch.from_numpy(batch.advantages[batch.in_denominator]) * mask.any(-1)
    loss = (-s * advantage + 0.7 * k.sum(-1) / length).sum() / batch.in_denominator.sum()
    loss.backward()
    assert report.losses[0] == pytest.approx(float(loss.detach()), abs=1e-10)
    assert np.isfinite(report.log_s).sum() == batch.trainable.sum() > batch.has_gradient.sum()
    assert report.num_skipped == (batch.in_denominator & ~batch.trainable).sum()
    descend(plain)
    assert_same_weights(packed, plain)
    k3 = torch.where(mask, kl(logp.detach(), their, "k3"), 0.0).sum(-1) / length
    entered = np.isfinite(report.kl_reference[batch.in_denominator])
    np.testing.assert_allclose(report.kl_reference[batch.in_denominator][entered], k3.numpy()[entered], atol=1e-10)


@pytest.mark.parametrize("level", ["sequence_token", "sequence", "token"])
def test_the_gradient_with_kl_in_the_reward_is_the_plain_one(level, exact):
    """−(1/B) Σ_i (1/|y_i|) Σ_t A_it ∇ log π at ratio 1, A_it = A_i − β Σ_u≥t k_iu; `sequence` takes their mean."""
    start = model_zoo.build("qwen3")
    reference = moved(start)
    plain_batch = make_batch(with_behavior(uneven_groups(), start, TEMPERATURE))
    batch = with_token_advantages(with_reference(plain_batch, reference), Credit(kl_coef=0.3))
    packed, plain = copy.deepcopy(start), copy.deepcopy(start)
    policy = PolicyModule(packed)
    plan = make_plan(0.0, max_tokens=30)
    plan = replace(plan, settings={**plan.settings, "level": level})
    train_step(policy, sgd(policy), batch, plan, proximal="recompute", learning_rates=[1.0])
    logp, mask = plain_logp(plain, batch, batch.in_denominator, TEMPERATURE)
    with torch.no_grad():
        their, _ = plain_logp(reference, batch, batch.in_denominator, TEMPERATURE)
    behavior = torch.zeros_like(logp)
    for b, i in enumerate(np.flatnonzero(batch.in_denominator)):
        behavior[b, : len(batch.samples[i].tokens)] = torch.from_numpy(batch.samples[i].behavior_logp)
    k = torch.where(mask, behavior - their, 0.0)
    to_come = k.flip(-1).cumsum(-1).flip(-1)
    advantage = torch.from_numpy(plain_batch.advantages[batch.in_denominator])[:, None] - 0.3 * to_come
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    if level == "sequence":
        advantage = (torch.where(mask, advantage, 0.0).sum(-1, keepdim=True) / length).expand(mask.shape)
    (-(torch.where(mask, logp, 0.0) * advantage / length).sum() / batch.in_denominator.sum()).backward()
    descend(plain)
    assert_same_weights(packed, plain)


def test_a_group_without_an_advantage_is_pulled_to_the_reference_by_kl_and_left_alone_without(exact):
    start = model_zoo.build("llama")
    batch = make_batch(with_behavior(uneven_groups(), start, TEMPERATURE))
    flat = replace(batch, advantages=np.zeros(batch.num_sequences))
    reference = moved(start)
    gaps = {}
    for coefficient in (0.0, 1.0):
        model = copy.deepcopy(start)
        policy = PolicyModule(model)
        given = with_reference(flat, reference)
        train_step(
            policy, sgd(policy), given, make_plan(coefficient, "k2"), proximal="recompute", learning_rates=[1e-3]
        )
        again = with_reference(flat, model).reference_logp
        gaps[coefficient] = np.mean([np.mean((again[i] - given.reference_logp[i]) ** 2) for i in again])
        assert (coefficient == 0) == all(
            torch.equal(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True)
        )
    assert gaps[1.0] < 0.9 * gaps[0.0]


def test_the_reference_is_asked_in_one_pass_without_gradients_and_does_not_change():
    model = model_zoo.build("qwen3")
    policy = PolicyModule(model)
    batch = make_batch(uneven_groups())
    seen = Counter()
    policy.register_forward_hook(lambda module, given, out: seen.update([out.logp.requires_grad]))
    before = copy.deepcopy(model.state_dict())
    reference_logp(Reference(policy, TEMPERATURE, 8192), batch)
    assert seen == {False: 1}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
