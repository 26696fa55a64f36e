import json
from dataclasses import asdict

import numpy as np
import pytest

from gspo.learner.proximal import NOISE_MARGIN, AutoClip, choose_proximal_source, clip_range, next_eps
from gspo.runs import State


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


@pytest.mark.parametrize("target", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("start", [None, 1e-4, 0.1])
def test_the_clip_range_converges_to_the_target_share_at_a_fixed_ratio(target, start):
    how, state, shares = AutoClip(target_fraction=target), start, []
    for log_s, advantages in stream(120):
        low, high = clip_range(state, None, how)
        shares.append(clip_share(log_s, advantages, low, high))
        state = next_eps(state, log_s, advantages, how)
        assert high / low == pytest.approx(how.high_over_low)
    assert shares[0] == 0 if start is None or start == 0.1 else shares[0] > 0.4
    assert np.mean(shares[60:]) == pytest.approx(target, abs=0.02)


def test_sequences_that_stop_where_they_are_clipped_do_not_keep_the_range_narrow():
    # A sequence that passes ε has no gradient any more and ends just above it. A quantile of such moves stays near ε;
    # the clipped share does not.
    how, state = AutoClip(), 1e-4
    for log_s, advantages in stream(60):
        free = np.where(advantages > 0, log_s / how.high_over_low, -log_s)
        ended = np.minimum(free, 1.05 * state)
        log_s = np.where(advantages > 0, ended * how.high_over_low, -ended)
        assert np.quantile(ended, 1 - how.target_fraction) <= 1.05 * state
        state = next_eps(state, log_s, advantages, how)
    reached = np.mean([clip_share(*pair, *clip_range(state, None, how)) for pair in stream(20, seed=1)])
    assert reached == pytest.approx(how.target_fraction, abs=0.02)


def test_the_first_value_is_the_quantile_and_later_ones_follow_the_clipped_share():
    how = AutoClip(target_fraction=0.25, high_over_low=2.0, gain=4.0)
    log_s, advantages = np.array([0.8, 0.2, -0.3, -0.1, 5.0]), np.array([1.0, 1.0, -1.0, -1.0, 0.0])
    # On one scale: 0.4, 0.1, 0.3, 0.1; the 75 % quantile is 0.325.
    assert next_eps(None, log_s, advantages, how) == pytest.approx(0.325)
    # Two of four are above 0.2: e^(4 · (0.5 − 0.25)). None is above 0.5: e^(4 · (0 − 0.25)).
    assert next_eps(0.2, log_s, advantages, how) == pytest.approx(0.2 * np.e)
    assert next_eps(0.5, log_s, advantages, how) == pytest.approx(0.5 / np.e)


def test_a_first_step_that_moves_nothing_decides_nothing():
    assert next_eps(None, np.zeros(2), np.array([1.0, -1.0]), AutoClip()) is None


def test_a_first_step_whose_sequences_all_move_against_their_advantage_gives_a_range_of_their_size():
    # A signed quantile would be negative here, and the range so narrow that it clips almost everything for many steps.
    log_s, advantages = np.array([-0.004, -0.002, 0.003]), np.array([1.0, 1.0, -1.0])
    assert 0.002 < next_eps(None, log_s, advantages, AutoClip()) < 0.004


@pytest.mark.parametrize("log_s", [[np.nan, np.nan], [0.1, -0.1]])
def test_nothing_seen_changes_nothing(log_s):
    advantages = np.array([1.0, -1.0]) if np.isnan(log_s[0]) else np.zeros(2)
    assert next_eps(0.02, np.array(log_s), advantages, AutoClip()) == 0.02
    assert next_eps(None, np.array(log_s), advantages, AutoClip()) is None


def test_the_range_is_never_below_the_noise_nor_above_its_bound():
    how = AutoClip(eps_max=0.05)
    for state in (-1.0, 0.0, 1e-9, 1e-3, 0.04, 0.3):
        for noise in (None, 0.0, 2e-3, 1.0):
            low, high = clip_range(state, noise, how)
            assert low >= min(noise or 0.0, how.eps_max / how.high_over_low)
            assert 0 < low < high <= how.eps_max + 1e-12
            assert high / low == pytest.approx(how.high_over_low)  # also at the bound
    assert clip_range(1e-3, 2e-3, how) == pytest.approx((2e-3, 2e-3 * how.high_over_low))
    assert clip_range(None, 1.0, how)[1] == how.eps_max  # before anything was seen: nothing is clipped


def test_the_state_round_trips_through_json_to_the_last_bit():
    state, how = None, AutoClip()
    for log_s, advantages in stream(5):
        state = next_eps(state, log_s, advantages, how)
    kept = State(**json.loads(json.dumps(asdict(State(step=5, auto_eps=state, noise=1.25e-7)))))
    assert kept == State(step=5, auto_eps=state, noise=1.25e-7)
    for log_s, advantages in stream(3, seed=1):
        assert next_eps(kept.auto_eps, log_s, advantages, how) == next_eps(state, log_s, advantages, how)


def test_the_sampler_serves_as_the_proximal_policy_only_while_its_noise_is_far_below_the_range():
    eps = 1e-3
    assert choose_proximal_source(eps / NOISE_MARGIN * 0.9, eps, "recompute") == "sampler"
    assert choose_proximal_source(eps / NOISE_MARGIN * 1.1, eps, "sampler") == "recompute"
    assert choose_proximal_source(None, eps, "sampler") == "sampler"  # nothing was measured: nothing changes
    assert choose_proximal_source(0.01, None, "recompute") == "sampler"  # a gate without a clip range
