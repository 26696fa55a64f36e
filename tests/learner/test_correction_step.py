"""Three policies kept apart in a step: the sampler's (older) μ, the trainer's π_old, and the one being trained."""

import copy
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, plain_logp, uneven_groups, with_behavior
from made_steps import make_plan, plain_step, run, weights

from gspo.learner.proximal import loglinear_weight
from gspo.monitor import measured_noise, step_metrics

NOW = 5
K = 3


def older(model, by):
    """The policy some versions ago: the same weights, a little away."""
    past = copy.deepcopy(model)
    with torch.no_grad():
        for number, p in enumerate(past.parameters()):
            torch.manual_seed(number)
            p += by * torch.randn_like(p)
    return past


def stale_batch(model, versions=(3, 4, 5), by=0.02):
    """Sampled by an older policy, tokens tagged with versions in turn."""
    groups = with_behavior(uneven_groups(), older(model, by), 0.8)
    tagged = [
        replace(g, samples=tuple(replace(s, versions=np.resize(np.int32(versions), len(s.tokens))) for s in g.samples))
        for g in groups
    ]
    return make_batch(tagged, K)


def test_the_share_of_the_current_policy_follows_the_version_of_each_token():
    batch = stale_batch(model_zoo.build("qwen3"))
    first = int(np.flatnonzero(batch.trained_tokens >= 3)[0])
    assert batch.samples[first].mask.all()
    shares = loglinear_weight([batch.samples[first]], NOW, 0.25)[:3]
    # v − b over v + k/K − b, for tokens 2, 1 and 0 versions behind, one of four updates on
    np.testing.assert_allclose(shares, [2 / 2.25, 1 / 1.25, 0.0])


def test_loglinear_is_the_samplers_policy_for_fresh_tokens():
    model = model_zoo.build("qwen3")
    batch, plan = stale_batch(model, versions=(NOW,)), make_plan(num_minibatches=K)
    trained = {}
    for proximal in ("loglinear", "sampler"):
        trained[proximal] = copy.deepcopy(model)
        run(trained[proximal], batch, plan, proximal=proximal, version=NOW, lr=0.05)
    for name, p in trained["loglinear"].named_parameters():
        assert torch.equal(p, trained["sampler"].get_parameter(name))


def test_loglinear_of_old_tokens_is_nearer_to_recomputation_than_the_samplers_values():
    model = model_zoo.build("qwen3")
    batch, plan = stale_batch(model, versions=(2,)), make_plan(num_minibatches=K)
    reports = {
        proximal: run(copy.deepcopy(model), batch, plan, proximal=proximal, version=NOW, lr=1e-3)
        for proximal in ("recompute", "loglinear", "sampler", "rollout")
    }
    first, later = batch.has_gradient & (batch.minibatch == 0), batch.has_gradient & (batch.minibatch > 0)
    off = {
        name: float(np.abs(report.log_s[later] - reports["recompute"].log_s[later]).mean())
        for name, report in reports.items()
    }
    assert off["loglinear"] < 0.5 * off["sampler"]
    assert (reports["loglinear"].log_s[first] == 0).all()
    assert (np.abs(reports["rollout"].log_s[first]) > 1e-4).all()  # age alone moves it


def test_the_decoupled_loss_weighs_stale_samples_as_the_plain_computation_does(exact):
    model = model_zoo.build("qwen3")
    correction = {"level": "sequence", "action": "clamp", "upper": None}
    plan = make_plan(num_minibatches=K, settings={"correction": correction})
    batch = stale_batch(model)
    packed, plain, before = copy.deepcopy(model), copy.deepcopy(model), weights(model)
    run(packed, batch, plan, version=NOW, lr=0.05)
    plain_step(plain, batch, plan, lr=0.05)
    uncorrected = copy.deepcopy(model)
    run(uncorrected, batch, make_plan(num_minibatches=K), version=NOW, lr=0.05)
    want = weights(plain)
    assert max(float((want[n] - before[n]).abs().max()) for n in want) > 1e-3
    for name, p in packed.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=0, atol=1e-9)
    assert max(float((want[n] - w).abs().max()) for n, w in weights(uncorrected).items()) > 1e-5  # it weighs


def test_the_weight_is_the_mean_over_tokens_and_is_reported_before_it_is_truncated(exact):
    model = model_zoo.build("qwen3")
    batch = stale_batch(model, by=0.05)
    with torch.no_grad():
        logp, _ = plain_logp(model, batch, np.ones(batch.num_sequences, bool), 0.8)
    means = []
    for i, sample in enumerate(batch.samples):
        gap = logp[i, : len(sample.tokens)].numpy() - sample.behavior_logp
        means.append(np.exp(gap[sample.mask].mean()) if sample.mask.any() else np.nan)
    want, cap = np.array(means), 1.0
    plan = make_plan(num_minibatches=1, settings={"correction": {"level": "sequence", "action": "clamp", "upper": cap}})
    report = run(copy.deepcopy(model), replace(batch, minibatch=np.zeros_like(batch.minibatch)), plan, version=NOW)
    live = batch.has_gradient
    np.testing.assert_allclose(report.correction_raw[live], want[live], rtol=1e-6)
    np.testing.assert_allclose(report.correction[live], np.minimum(want, cap)[live], rtol=1e-6)
    beyond = live & (want > cap)
    assert 0 < beyond.sum() < live.sum()
    assert report.correction_outside[live].sum() == batch.trained_tokens[beyond].sum()
    metrics = step_metrics(batch, report, NOW)
    assert metrics["correction/raw_mean"] == pytest.approx(want[live].mean(), rel=1e-6)
    assert metrics["correction/raw_max"] > cap >= metrics["correction/weight_mean"]
    assert metrics["correction/outside"] == batch.trained_tokens[beyond].sum() / batch.trained_tokens[live].sum()
    assert "correction/raw_mean" not in step_metrics(batch, run(model, batch, make_plan(num_minibatches=K)), NOW)


def test_only_samples_of_the_current_version_measure_noise_and_ages_are_counted_by_token():
    model = model_zoo.build("qwen3")
    plan = make_plan(num_minibatches=K)
    mixed, fresh = stale_batch(model, versions=(3, 5)), stale_batch(model, versions=(NOW,), by=0.0)
    stale = run(copy.deepcopy(model), mixed, plan, version=NOW)
    single = mixed.trained_tokens == 1
    assert measured_noise(stale.noise_log_s, mixed, NOW) is None or single.any()
    exactly = run(copy.deepcopy(model), fresh, plan, version=NOW)
    noise = measured_noise(exactly.noise_log_s, fresh, NOW)
    assert noise is not None
    assert noise.p95 < 1e-6
    metrics = step_metrics(mixed, stale, NOW)
    assert metrics["staleness/max"] == 2
    assert 0 < metrics["staleness/token_mean"] < metrics["staleness/mean"] <= 2
    assert 0 < metrics["staleness/mixed"] < 1
