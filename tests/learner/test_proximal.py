"""The rule that lets the sampler's log-probs be π_old, and re-centring."""

import copy
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, uneven_groups, with_behavior
from made_steps import make_plan, run, weights
from training_runs import make_trainer, metrics, path_of, train

from gspo.config import load
from gspo.errors import TrainingError
from gspo.learner.proximal import FINE, Noise, judge_noise, noise_message, noise_of
from gspo.learner.step import train_step
from gspo.train import make_plan as make_plan_of
from gspo.train import narrowest_clip
from lab.studies.direct.gradients import opened, sampled

pytestmark = pytest.mark.run

ROLLOUT = ("actor.prox_logp_method=rollout",)


def measured(log_s, lengths) -> Noise:
    noise = noise_of(log_s, lengths)
    assert noise is not None
    return noise


def test_the_verdict_depends_on_the_ratio_of_noise_to_clip_range_alone():
    for scale in (1e-6, 1e-3, 0.2):
        assert judge_noise(0.99 * scale / FINE, scale) == "fine"
        assert judge_noise(1.01 * scale / FINE, scale) == judge_noise(scale, scale) == "near"
        assert judge_noise(1.01 * scale, scale) == "above"
    assert judge_noise(1e9, None) == "fine"  # no clip range, nothing to use up


def test_the_words_name_every_remedy():
    noise = measured(np.random.default_rng(1).normal(0.01, 1e-4, 100), np.full(100, 7))
    for remedy in ("actor.eps_clip above", "actor.eps_clip=auto", "actor.prox_logp_method=recompute"):
        assert remedy in noise_message(noise, 5e-3)
    assert noise_of(np.array([np.nan]), np.array([3])) is None


def test_a_refusal_before_the_first_update_leaves_every_weight_as_it_was():
    model, plan = model_zoo.build("qwen3"), make_plan(num_minibatches=2)
    batch, trained, seen = (
        make_batch(with_behavior(uneven_groups(), model, plan.temperature), 2),
        copy.deepcopy(model),
        [],
    )

    def refuse(noise):
        seen.append(noise)
        raise TrainingError("too noisy")

    with pytest.raises(TrainingError, match="too noisy"):
        run(trained, batch, plan, proximal="rollout", before_update=refuse)
    (noise,) = seen
    assert np.isfinite(noise[batch.has_gradient & (batch.minibatch == 0)]).all()
    assert np.isnan(noise[batch.minibatch > 0]).all()
    for name, weight in weights(trained).items():
        assert torch.equal(weight, weights(model)[name])


def test_a_sampler_noisier_than_the_clip_range_ends_the_run_before_its_first_step(tmp_path):
    noisy = (*ROLLOUT, "rollout.sampler_precision=int8", "actor.eps_clip=1e-5")
    with pytest.raises(TrainingError) as refusal:
        train(tmp_path, *noisy, "total_train_steps=1")
    for part in ("π_old", "clip range", "actor.eps_clip=auto", "prox_logp_method=recompute", "prox_logp_force"):
        assert part in str(refusal.value)
    assert not list((path_of(tmp_path) / "checkpoints").glob("step_*"))
    assert [row["step"] for row in metrics(path_of(tmp_path))] == [0]
    _, path = train(tmp_path, *noisy, "total_train_steps=1", "actor.prox_logp_force=true")
    assert metrics(path)[-1]["step"] == 1
    assert "warning: the sampler's log-probs are used as π_old" in (path / "log.txt").read_text()


def test_near_the_clip_range_it_warns_above_it_refuses_and_elsewhere_it_is_silent(tmp_path):
    how = (*ROLLOUT, "rollout.sampler_precision=int8")
    with opened(make_trainer(tmp_path, *how).loaded) as loop:
        parts, learner = loop.parts, loop.parts.learner
        batch = sampled(loop)
        log_s = noise_log_s(learner, batch)
        p95, log = measured(log_s, batch.trained_tokens).p95, loop.parts.path / "log.txt"

        def spoken(eps):
            before = len(log.read_text()) if log.exists() else 0
            plan = replace(learner.plan, settings={**learner.plan.settings, "clip_low": eps, "clip_high": 1.3 * eps})
            check = parts.updater.check_sampler_noise(batch, plan, parts.state)
            assert check is not None
            check(log_s)
            return "the sampler's log-probs are used as π_old" in log.read_text()[before:] if log.exists() else False

        assert p95 > 1e-6
        assert not spoken(3.1 * p95)
        assert spoken(2.9 * p95)
        assert spoken(1.01 * p95)
        with pytest.raises(TrainingError, match="prox_logp_force"):
            spoken(0.99 * p95)
        parts.state.noise = p95  # what was measured once, and was in a checkpoint, is not checked again
        assert parts.updater.check_sampler_noise(batch, learner.plan, parts.state) is None


def noise_log_s(learner, batch):
    """Mini-batch 1's, as a step measures it before it changes anything."""
    seen = []

    def look(noise):
        seen.append(noise)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train_step(
            learner.policy, learner.optimizer, batch, learner.plan, proximal="rollout", learning_rates=[0.0] * 2,
            before_update=look,
        )  # fmt: skip
    return seen[0]


def test_an_automatic_clip_range_is_judged_by_how_far_it_may_widen():
    for extra, eps in (((), 3e-4), (("actor.eps_clip=auto",), 0.2 * 3 / 4), (("algorithm=cispo",), None)):
        loaded = load(None, ["algorithm=gspo", *extra])
        found = narrowest_clip(loaded.config, make_plan_of(loaded).settings)
        assert found == (eps if eps is None else pytest.approx(eps))
