"""The studies that measure without training, on the real policy."""

from itertools import count

import numpy as np
import pytest
import torch

from gspo.studies import plan
from lab.studies.direct import gradients, identity, precision, signal, variance

pytestmark = pytest.mark.run


def opened(tmp_path, name, **overrides):
    study = plan.find_study(name)
    return plan.configured(study, {"cluster.fileroot": str(tmp_path), **overrides}, 1)


def test_identity_finds_one_gradient_on_policy_and_two_off_policy(tmp_path):
    found = identity.measure(opened(tmp_path, "identity", **{"train_dataset.batch_size": 4}), {"updates": 4}, 1)
    assert set(found) == set(plan.find_study("identity").arms)
    assert found["grpo, on-policy"]["difference"] < 1e-12
    assert found["gspo_token, after 4 updates"]["difference"] < 1e-12
    # The comparison can tell gradients apart.
    assert found["dapo, on-policy"]["difference"] > 1e-3
    assert found["grpo, after 4 updates"]["difference"] > 1e-6


@pytest.mark.full
def test_a_sampler_without_error_changes_no_gradient_and_a_noisy_one_does(tmp_path):
    loaded = opened(tmp_path, "precision", **{"train_dataset.batch_size": 4})
    found = precision.measure(loaded, {"samplers": ["exact", "noise 0.1", "int8"]}, 1)
    assert found["exact, fixed ε"]["cosine"] > 0.9999
    assert found["exact, fixed ε"]["decisions_changed"] == 0.0
    assert found["noise 0.1, paper's ε"]["decisions_changed"] > 0.05
    assert found["int8, fixed ε"]["noise_p95"] > 100 * found["exact, fixed ε"]["noise_p95"]
    wanted = {c.arm for c in plan.find_study("precision").checks if c.arm.startswith("int8")}
    assert wanted <= set(found)


@pytest.mark.full
def test_variance_measures_every_length_on_a_policy_that_moved(tmp_path):
    loaded = opened(tmp_path, "variance", **{"train_dataset.batch_size": 4})
    found = variance.measure(loaded, {"lengths": [16, 64, 256], "prompts": 4, "samples": 4, "steps": 1}, 1)
    assert set(found) == {"16", "64", "256", "slope"}
    for length in (16, 64, 256):
        one = found[str(length)]
        assert one["sd_log_w"] > 0
        # Σ is |y| times the mean, so their spreads are, too.
        assert one["sd_sum_log_w"] == pytest.approx(length * one["sd_log_s"])
    assert np.isfinite(list(found["slope"].values())).all()


@pytest.mark.full
def test_signal_is_the_same_for_both_algorithms_on_policy_and_its_measurement_leaves_no_trace(tmp_path):
    algorithms = {"gspo": ["gspo", 0.002, 0.0025], "free": ["grpo", 1.0, 1e6], "grpo": ["grpo", 0.2, 0.25]}
    settings = {"trained": [0], "drifts": [0, 1], "groups": 8, "algorithms": algorithms}
    loaded = opened(tmp_path, "variance", **{"train_dataset.batch_size": 4})
    found = signal.measure(loaded, settings, 1)
    assert set(found) == {f"{name}, drift {drift}, step 0" for name in algorithms for drift in (0, 1)}
    # Where the policy has not moved all ratios are 1, and one gradient is the other's.
    for name in ("free", "grpo"):
        assert found[f"{name}, drift 0, step 0"]["snr"] == pytest.approx(
            found["gspo, drift 0, step 0"]["snr"], rel=1e-3
        )
    assert found["gspo, drift 1, step 0"]["log_s_std"] > 0
    assert found["gspo, drift 1, step 0"]["clip_sequences"] > found["free, drift 1, step 0"]["clip_sequences"] == 0
    with gradients.opened(loaded) as loop:
        held = {key: value.clone() for key, value in loop.parts.learner.policy.state_dict().items()}
        signal.at_this_point(loop, loaded, settings, count())
        after = loop.parts.learner.policy.state_dict()
    assert all(torch.equal(after[key], held[key]) for key in held)
