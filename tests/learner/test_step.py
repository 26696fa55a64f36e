import copy
from collections import Counter
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, make_group, plain_logp, uneven_groups, with_behavior
from made_steps import adamw, assert_same_weights, descend, make_plan, plain_step, run, sgd, weights

from gspo.algorithms import ALGORITHMS
from gspo.diagnosis import PATIENCE, Diagnosis
from gspo.learner import step as step_module
from gspo.learner.policy.module import PolicyModule
from gspo.learner.step import train_step
from gspo.monitor import step_metrics


def assert_same_updates(groups, plan, *, proximal="recompute", lr=1.0, tolerance=1e-10, **assembly):
    model = model_zoo.build("qwen3")
    groups = with_behavior(groups, model, plan.temperature)
    batch = make_batch(groups, plan.num_minibatches, **assembly)
    packed_model, plain_model, before = copy.deepcopy(model), copy.deepcopy(model), weights(model)
    report = run(packed_model, batch, plan, proximal=proximal, lr=lr)
    plain_step(plain_model, batch, plan, proximal=proximal, lr=lr)
    want = weights(plain_model)
    assert max(float((want[n] - before[n]).abs().max()) for n in want) > 1e-3  # something was learnt
    for name, got in packed_model.named_parameters():
        scale = max(1.0, float((want[name] - before[name]).abs().max()))
        assert float((got.detach() - want[name]).abs().max()) <= tolerance * scale, name
    return batch, report


# Gradients: skipping, packing and splitting change nothing


@pytest.mark.parametrize("max_tokens", [1, 20, 8192])
@pytest.mark.parametrize("skip", [True, False])
def test_the_update_equals_the_plain_padded_one_whatever_is_skipped_or_split(skip, max_tokens, exact):
    plan = make_plan(skip_zero_advantage=skip, max_tokens=max_tokens)
    batch, report = assert_same_updates(uneven_groups(), plan)
    entered = np.isfinite(report.log_s)
    assert entered.sum() == (batch.has_gradient if skip else batch.in_denominator & (batch.trained_tokens > 0)).sum()
    assert (batch.in_denominator & ~batch.has_gradient).sum() >= 4  # there was something to skip
    assert not entered[~batch.scored].any()
    assert not batch.scored.all()


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "ppo"])
def test_every_objective_takes_the_plain_update_in_each_of_three_mini_batches(name, exact):
    _, report = assert_same_updates(uneven_groups(), make_plan(name, num_minibatches=3, max_tokens=25), lr=0.05)
    if ALGORITHMS[name].gate == "clip" and ALGORITHMS[name].level == "sequence":
        assert np.nansum(report.clipped_low + report.clipped_high) > 0


@pytest.mark.parametrize("proximal", ["recompute", "sampler", "rollout"])
@pytest.mark.parametrize("num_minibatches", [2, 4])  # 4 does not divide six groups: sequences of a group part
def test_every_source_of_the_proximal_policy_takes_the_plain_update(proximal, num_minibatches, exact):
    plan = make_plan(num_minibatches=num_minibatches, max_tokens=30)
    assert_same_updates(uneven_groups(), plan, proximal=proximal, lr=0.05)


def test_a_correction_and_the_decoupled_loss_take_the_plain_update(exact):
    plan = make_plan(num_minibatches=2, settings={"correction": "tis"})
    assert_same_updates(uneven_groups(), plan, lr=0.05)


def test_dropped_groups_leave_the_denominator_and_counted_ones_stay(exact):
    groups, plan = uneven_groups(), make_plan()
    model = model_zoo.build("qwen3")
    grads = {}
    for how in ("count", "drop"):
        batch, _ = assert_same_updates(groups, plan, zero_variance=how)
        trained = copy.deepcopy(model)
        run(trained, make_batch(with_behavior(groups, model, plan.temperature), zero_variance=how), plan)
        grads[how] = {n: weights(model)[n] - w for n, w in weights(trained).items()}
        counts = int(batch.in_denominator.sum())
        grads[how]["count"] = counts
    # 16 scored sequences; groups 2 (three) and 4 (one scored) teach nothing.
    assert (grads["count"].pop("count"), grads["drop"].pop("count")) == (16, 12)
    for name, grad in grads["count"].items():
        torch.testing.assert_close(grad * 16, grads["drop"][name] * 12, rtol=0, atol=1e-10)


def test_the_denominator_counts_skipped_sequences(exact):
    """Adding a group that teaches nothing must shrink the update by the counts alone: 4 of 4 to 4 of 7."""
    model = model_zoo.build("qwen3")
    lively, flat = make_group(0, [1, 0, 0, 1], [3, 4, 2, 5]), make_group(1, [1, 1, 1], [2, 3, 2])
    change = []
    for groups in ([lively], [lively, flat]):
        trained = copy.deepcopy(model)
        run(trained, make_batch(groups), make_plan())
        change.append({n: weights(model)[n] - w for n, w in weights(trained).items()})
    for name, alone in change[0].items():
        torch.testing.assert_close(alone * 4, change[1][name] * 7, rtol=0, atol=1e-10)


# π_old


@pytest.mark.parametrize("proximal", ["recompute", "sampler"])
def test_mini_batch_1_has_ratio_exactly_1_and_later_ones_have_moved(proximal):
    model = model_zoo.build("qwen3", torch.float32)
    batch = make_batch(with_behavior(uneven_groups(), model, 0.8), 3)
    report = run(model, batch, make_plan(num_minibatches=3), proximal=proximal, lr=0.05)
    assert (report.log_s[batch.has_gradient & (batch.minibatch == 0)] == 0).all()
    assert (np.abs(report.log_s[batch.has_gradient & (batch.minibatch > 0)]) > 1e-4).all()
    assert np.isnan(report.log_s[~batch.has_gradient]).all()


def test_the_sampler_may_stand_in_for_the_recomputed_policy_up_to_its_noise():
    reports = {}
    for proximal in ("recompute", "sampler"):
        model = model_zoo.build("qwen3", torch.float32)
        batch = make_batch(with_behavior(uneven_groups(), model, 0.8), 3)
        reports[proximal] = run(model, batch, make_plan(num_minibatches=3), proximal=proximal, lr=0.05)
    noise = np.nanmax(np.abs(reports["recompute"].noise_log_s))
    assert 0 < noise < 1e-5
    np.testing.assert_allclose(reports["sampler"].log_s, reports["recompute"].log_s, atol=1e-4, rtol=0)


@pytest.mark.parametrize("proximal", ["recompute", "sampler"])
def test_noise_is_the_difference_to_the_sampler_at_equal_weights_where_a_forward_shows_it(exact, proximal):
    model = model_zoo.build("qwen3")
    groups = with_behavior(uneven_groups(), model, 0.8)
    shifted = [
        replace(g, samples=tuple(replace(s, behavior_logp=s.behavior_logp - np.float32(0.25)) for s in g.samples))
        for g in groups
    ]
    batch = make_batch(shifted, 2)
    report = run(model, batch, make_plan(num_minibatches=2), lr=0.05, proximal=proximal)
    # Mini-batch 1 always; later ones only where π_old was recomputed, for after an update the weights differ.
    seen = batch.has_gradient & ((batch.minibatch == 0) | (proximal == "recompute"))
    np.testing.assert_allclose(report.noise_log_s[seen], 0.25, atol=1e-6)
    assert np.isnan(report.noise_log_s[~seen]).all()


def test_detaching_in_every_mini_batch_is_seen_as_a_ratio_stuck_at_1(monkeypatch):
    """The bug that shipped elsewhere: π_old is the policy being trained, so nothing is ever clipped."""
    monkeypatch.setattr(step_module._ProximalOf, "at", lambda self, out, samples, index: out.logp.detach())
    model = model_zoo.build("qwen3", torch.float32)
    batch = make_batch(uneven_groups(), 3)
    report = run(model, batch, make_plan(num_minibatches=3), lr=0.05)
    assert report.grad_norms[0] > 0
    assert (report.log_s[batch.has_gradient] == 0).all()
    diagnosis = Diagnosis(groups=2, num_updates=3, by_sequence=True)
    rows = ({"step": step, **step_metrics(batch, report, 0)} for step in range(1, PATIENCE + 1))
    assert any("every ratio was exactly 1" in found.text for row in rows for found in diagnosis.see(row))


# Several passes over a batch


def test_two_passes_are_two_updates_on_the_same_batch_with_the_same_proximal_policy(exact):
    model, wide = model_zoo.build("qwen3"), {"clip_low": 0.9, "clip_high": 9.0}
    batch = make_batch(with_behavior(uneven_groups(), model, 0.8), 1)
    twice, by_hand, once = (copy.deepcopy(model) for _ in range(3))
    report = run(twice, batch, make_plan(num_minibatches=1, num_epochs=2, settings=wide), lr=0.05)
    assert len(report.applied) == 2
    # By hand: π_old is the sampler's policy, whose log-probs the batch holds (float32).
    run(by_hand, batch, make_plan(num_minibatches=1, settings=wide), lr=0.05)
    run(once, batch, make_plan(num_minibatches=1, settings=wide), lr=0.05)
    run(by_hand, batch, make_plan(num_minibatches=1, settings=wide), lr=0.05, proximal="rollout")
    want = weights(by_hand)
    for name, got in weights(twice).items():
        assert float((got - want[name]).abs().max()) <= 1e-6, name
    assert max(float((got - weights(once)[name]).abs().max()) for name, got in want.items()) > 1e-4


def test_with_two_passes_ratios_are_those_of_the_last_pass_and_the_first_update_has_ratio_1(exact):
    model, wide = model_zoo.build("qwen3"), {"clip_low": 0.9, "clip_high": 9.0}
    batch = make_batch(with_behavior(uneven_groups(), model, 0.8), 2)
    report = run(model, batch, make_plan(num_minibatches=2, num_epochs=2, settings=wide), lr=0.05)
    metrics = step_metrics(batch, report, 0)
    assert metrics["ratio/first_minibatch_max_abs"] == 0.0
    found = Diagnosis(groups=2, num_updates=4, by_sequence=True).see({"step": 2, **metrics})
    assert "first mini-batch" not in {finding.name for finding in found}
    moved = np.abs(report.log_s[np.isfinite(report.log_s)])
    assert metrics["ratio/log_s_max_abs"] == moved.max() > 1e-4
    assert (report.log_s[batch.minibatch == 0] != 0).any()  # a finding would name these


def test_later_passes_take_the_mini_batches_in_an_order_keyed_by_seed_and_version():
    plan = make_plan(num_minibatches=6, num_epochs=3)
    order = plan.order(version=4)
    assert order[:6] == [0, 1, 2, 3, 4, 5]
    assert sorted(order[6:12]) == sorted(order[12:]) == order[:6]
    assert order == plan.order(version=4)
    assert order != plan.order(version=5)
    assert make_plan(num_minibatches=6).order(version=4) == order[:6]


# Updates


def count_steps(optimizer):
    seen = Counter()
    optimizer.register_step_post_hook(lambda *_: seen.update(["steps"]))
    return seen


def test_mini_batches_are_optimizer_updates_and_micro_batches_are_not():
    model = model_zoo.build("qwen3", torch.float32)
    policy = PolicyModule(model)
    optimizer, forwards = sgd(policy, 0.01), Counter()
    steps = count_steps(optimizer)
    policy.register_forward_hook(lambda *_: forwards.update(["forward"]))
    plan = make_plan(num_minibatches=3, max_tokens=12)
    batch = make_batch(uneven_groups(), 3)
    report = train_step(policy, optimizer, batch, plan, proximal="sampler", learning_rates=[0.1, 0.2, 0.3])
    assert steps["steps"] == 3 == len(report.applied) == len(report.grad_norms) == len(report.losses)
    assert forwards["forward"] > 2 * 3
    assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_optimizer_steps_though_everything_is_skipped(num_minibatches):
    model = model_zoo.build("qwen3", torch.float32)
    policy = PolicyModule(model)
    optimizer, forwards = adamw(policy, weight_decay=0.5), Counter()
    steps, before = count_steps(optimizer), weights(model)
    policy.register_forward_hook(lambda *_: forwards.update(["forward"]))
    batch = make_batch([make_group(0, [1, 1, 1]), make_group(1, [0, 0])], num_minibatches)
    plan = make_plan(num_minibatches=num_minibatches)
    report = train_step(policy, optimizer, batch, plan, proximal="recompute", learning_rates=[1e-2] * num_minibatches)
    assert not forwards
    assert report.num_input_tokens == 0
    assert steps["steps"] == num_minibatches
    assert report.applied == [True] * num_minibatches
    assert report.grad_norms == [0.0] * num_minibatches
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 1e-2 * 0.5) ** num_minibatches)
        assert float(optimizer.state[p]["step"]) == num_minibatches


def test_moments_decay_through_a_step_that_skips_everything():
    model = model_zoo.build("qwen3", torch.float32)
    policy = PolicyModule(model)
    optimizer = adamw(policy)
    plan = make_plan()
    train_step(policy, optimizer, make_batch(uneven_groups()), plan, proximal="recompute", learning_rates=[1e-3])
    moments = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
    before = weights(model)
    flat = make_batch([make_group(0, [1, 1])])
    train_step(policy, optimizer, flat, plan, proximal="recompute", learning_rates=[1e-3])
    for name, p in model.named_parameters():
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], moments[name] * 0.9)
        assert not torch.equal(p.detach(), before[name])


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported():
    model = model_zoo.build("qwen3")
    batch = make_batch(uneven_groups())
    change = {}
    for max_norm in (0.0, 0.125):
        trained = copy.deepcopy(model)
        report = run(trained, batch, make_plan(max_norm=max_norm))
        flat = torch.cat([(weights(model)[n] - w).flatten() for n, w in weights(trained).items()])
        change[max_norm] = float(flat.norm())
        assert report.grad_norms[0] == pytest.approx(change[0.0], rel=1e-6)
    assert change[0.0] > 0.125
    assert change[0.125] == pytest.approx(0.125, rel=1e-4)


def test_kept_sequences_have_the_log_probs_and_entropies_of_their_trained_tokens(exact):
    model = model_zoo.build("qwen3")
    batch = make_batch(uneven_groups())
    with torch.no_grad():
        logp, mask = plain_logp(model, batch, np.ones(batch.num_sequences, bool), 0.8)
    report = run(model, batch, make_plan(), keep_tokens_of=frozenset({2, 3, 15}))
    assert set(report.logp) == set(report.token_entropy) == {2, 3, 15}
    for i, got in report.logp.items():
        np.testing.assert_allclose(got, logp[i][mask[i]].numpy(), atol=1e-10)
        assert len(report.token_entropy[i]) == batch.trained_tokens[i]
        assert report.entropy[i] == pytest.approx(report.token_entropy[i].mean())


# The guard


def untouched(policy, optimizer):
    kept = {p: (p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in policy.parameters()}

    def check():
        return all(
            torch.equal(p, w) and all(torch.equal(optimizer.state[p][k], v) for k, v in state.items())
            for p, (w, state) in kept.items()
        )

    return check


def one_step(policy, optimizer, batch, plan=None):
    return train_step(policy, optimizer, batch, plan or make_plan(), proximal="recompute", learning_rates=[1e-2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_gradient_touches_neither_weights_nor_moments(value):
    policy = PolicyModule(model_zoo.build("qwen3", torch.float32))
    optimizer, batch = adamw(policy, weight_decay=0.1), make_batch(uneven_groups())
    one_step(policy, optimizer, batch)
    same = untouched(policy, optimizer)
    broken = list(policy.parameters())[5].register_hook(lambda g: torch.full_like(g, value))
    report = one_step(policy, optimizer, batch)
    assert report.applied == [False]
    assert not np.isfinite(report.grad_norms[0])
    assert same()
    assert step_metrics(batch, report, 0)["grad/skipped_updates"] == 1
    broken.remove()
    assert one_step(policy, optimizer, batch).applied == [True]
    assert not same()


def test_a_loss_that_is_not_a_number_touches_nothing_though_its_gradient_is_finite():
    """A clamp has gradient 0 at NaN: the norm alone would let the update through."""
    policy = PolicyModule(model_zoo.build("qwen3", torch.float32))
    optimizer = adamw(policy, weight_decay=0.1)
    groups = with_behavior([make_group(0, [1, 0, 0.5], [3, 4, 2])], policy.model, 0.8)
    one_step(policy, optimizer, make_batch(groups))
    same = untouched(policy, optimizer)
    groups[0].samples[1].behavior_logp[2] = np.nan
    report = train_step(policy, optimizer, make_batch(groups), make_plan(), proximal="rollout", learning_rates=[1e-2])
    assert np.isnan(report.losses[0])
    assert report.applied == [False]
    assert same()


def test_an_infinite_advantage_touches_nothing_and_later_mini_batches_go_on():
    policy = PolicyModule(model_zoo.build("qwen3", torch.float32))
    optimizer, plan = adamw(policy), make_plan(num_minibatches=3)
    batch = make_batch(uneven_groups(), 3)
    advantages = batch.advantages.copy()
    advantages[0] = np.inf
    before = weights(policy)
    report = train_step(
        policy,
        optimizer,
        replace(batch, advantages=advantages, minibatch=np.zeros_like(batch.minibatch)),
        plan,
        proximal="recompute",
        learning_rates=[0.0, 0.0, 0.0],
    )
    assert report.applied == [False, True, True]  # the other two are empty: zero gradients are applied
    assert all(torch.equal(w, before[n]) for n, w in policy.named_parameters())
    report = train_step(
        policy, optimizer, replace(batch, advantages=advantages), plan, proximal="recompute", learning_rates=[1e-2] * 3
    )
    assert report.applied == [False, True, True]
    assert not all(torch.equal(w, before[n]) for n, w in policy.named_parameters())


def test_the_entropy_term_takes_the_plain_update_in_sequences_without_an_advantage_too(exact):
    groups = [make_group(0, [1, 1], [3, 5]), make_group(1, [0, 0, 0], [2, 1, 4], holes={2: slice(1, 2)})]
    batch = make_batch(groups)
    assert not batch.advantages.any()
    model, other = model_zoo.build("llama"), model_zoo.build("llama")
    settings = {"entropy_coef": 0.3}
    report = run(model, batch, make_plan(skip_zero_advantage=False, settings=settings), lr=0.1)
    # The same by hand: the mean over sequences of the mean entropy of their trained tokens.
    total = 0.0
    for i, sample in enumerate(batch.samples):
        prompt = batch.prompt(i)
        ids = torch.tensor([[*prompt, *sample.tokens.tolist()]])
        logits = other(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.8
        logp = logits[torch.from_numpy(sample.mask)].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        assert report.entropy[i] == pytest.approx(float(entropy.detach()), abs=1e-9)
        total = total + entropy / batch.num_sequences
    (-0.3 * total).backward()
    descend(other, 0.1)
    assert_same_weights(model, other)
    assert report.losses[0] == pytest.approx(-0.3 * float(total.detach()), abs=1e-9)
