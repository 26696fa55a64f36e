import json
from dataclasses import asdict

import numpy as np
import pytest

from gspo.learner.proximal import NOISE_MARGIN, AutoClip, choose_proximal_source, clip_range, next_quantile
from gspo.runs.state import State


def stream(steps, seed=0, n=400, scale=0.01):
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        advantages = draw.choice([-1.0, 1.0, 0.0], n, p=[0.45, 0.45, 0.1])
        # Training moves log s the way the advantage points.
        yield draw.normal(0.002 * np.sign(advantages), scale), advantages


def clip_share(log_s, advantages, low, high):
    seen = advantages != 0
    clipped = np.where(advantages > 0, log_s > high, log_s < -low)
    return clipped[seen].mean()


@pytest.mark.parametrize("target", [0.1, 0.15, 0.4])
def test_the_clip_range_converges_to_the_target_share_at_a_fixed_ratio(target):
    how, state, shares = AutoClip(target_fraction=target), None, []
    for log_s, advantages in stream(60):
        low, high = clip_range(state, None, (3e-4, 4e-4), how)
        shares.append(clip_share(log_s, advantages, low, high))
        state = next_quantile(state, log_s, advantages, how)
        if shares[1:]:
            assert high / low == pytest.approx(how.high_over_low)
    assert shares[0] > 0.4 or target == 0.4
    assert np.mean(shares[20:]) == pytest.approx(target, abs=0.02)


def test_the_first_value_is_the_quantile_and_later_ones_are_averaged():
    how = AutoClip(target_fraction=0.25, high_over_low=2.0, decay=0.75)
    log_s, advantages = np.array([0.8, 0.2, -0.3, -0.1, 5.0]), np.array([1.0, 1.0, -1.0, -1.0, 0.0])
    # On one scale: 0.4, 0.1, 0.3, 0.1; the 75 % quantile is 0.325.
    assert next_quantile(None, log_s, advantages, how) == pytest.approx(0.325)
    assert next_quantile(0.1, log_s, advantages, how) == pytest.approx(0.75 * 0.1 + 0.25 * 0.325)


@pytest.mark.parametrize("log_s", [[np.nan, np.nan], [0.1, -0.1]])
def test_nothing_seen_changes_nothing(log_s):
    advantages = np.array([1.0, -1.0]) if np.isnan(log_s[0]) else np.zeros(2)
    assert next_quantile(0.02, np.array(log_s), advantages, AutoClip()) == 0.02
    assert next_quantile(None, np.array(log_s), advantages, AutoClip()) is None


def test_the_range_is_never_below_the_noise_nor_above_its_bound():
    how = AutoClip(eps_max=0.05)
    for state in (-1.0, 0.0, 1e-9, 1e-3, 0.04, 0.3):
        for noise in (None, 0.0, 2e-3, 1.0):
            low, high = clip_range(state, noise, (3e-4, 4e-4), how)
            assert low >= min(noise or 0.0, how.eps_max / how.high_over_low)
            assert 0 < low < high <= how.eps_max + 1e-12
            assert high / low == pytest.approx(how.high_over_low)  # also at the bound
    assert clip_range(1e-3, 2e-3, (3e-4, 4e-4), how) == pytest.approx((2e-3, 2e-3 * how.high_over_low))
    assert clip_range(None, 1.0, (3e-4, 4e-4), how) == (3e-4, 4e-4)  # before anything was seen: the preset's


def test_the_state_round_trips_through_json_to_the_last_bit():
    state, how = None, AutoClip()
    for log_s, advantages in stream(5):
        state = next_quantile(state, log_s, advantages, how)
    kept = State(**json.loads(json.dumps(asdict(State(step=5, auto_eps=state, noise=1.25e-7, alarm_counts={"x": 3})))))
    assert kept == State(step=5, auto_eps=state, noise=1.25e-7, alarm_counts={"x": 3})
    for log_s, advantages in stream(3, seed=1):
        assert next_quantile(kept.auto_eps, log_s, advantages, how) == next_quantile(state, log_s, advantages, how)


def test_the_sampler_serves_as_the_proximal_policy_only_while_its_noise_is_far_below_the_range():
    eps = 1e-3
    assert choose_proximal_source(eps / NOISE_MARGIN * 0.9, eps, "recompute") == "sampler"
    assert choose_proximal_source(eps / NOISE_MARGIN * 1.1, eps, "sampler") == "recompute"
    assert choose_proximal_source(None, eps, "sampler") == "sampler"  # nothing was measured: nothing changes
    assert choose_proximal_source(0.01, None, "recompute") == "sampler"  # a gate without a clip range
