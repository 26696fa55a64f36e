"""Means over seeds and paired differences by hand-derived numbers; verdicts against hand-made intervals."""

import numpy as np
import pytest

from gspo.studies import Interval, contrast, interval, verdict


def test_the_interval_of_four_seeds_by_hand():
    # mean 2.5, s = 1.2910, t(3) = 3.1824: half-width 3.1824 · 1.2910 / 2.
    found = interval([1.0, 2.0, 3.0, 4.0])
    assert found is not None
    assert found.high == pytest.approx(2.5 + 2.0543, abs=1e-3)
    assert interval([7.0]) == Interval(7.0, None, None, 1)
    assert interval([]) is None


def test_pairing_removes_what_seeds_have_in_common():
    seeds = range(1, 6)
    shared = {seed: 10.0 * seed for seed in seeds}
    ours = {seed: shared[seed] + 1.0 + 0.01 * seed for seed in seeds}
    paired = contrast(ours, shared)
    assert paired is not None
    assert paired.low is not None
    assert paired.low > 0.9
    apart = interval(list(ours.values()))
    assert apart is not None
    assert apart.low is not None
    assert apart.low < np.mean(list(shared.values()))


def test_seeds_that_only_one_arm_has_do_not_count():
    found = contrast({1: 2.0, 2: 2.0, 3: 99.0}, {1: 1.0, 2: 1.0, 4: -99.0})
    assert found == Interval(1.0, 1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("low", "high", "side", "margin", "said"),
    [
        (0.1, 0.3, "above", 0.0, "shown"),
        (-0.1, 0.3, "above", 0.0, "not shown"),
        (-0.3, -0.1, "above", 0.0, "opposite"),
        (-0.04, 0.3, "above", -0.05, "shown"),
        (0.0, 0.04, "below", 0.05, "shown"),
        (0.06, 0.2, "below", 0.05, "opposite"),
        (0.0, 0.3, "above", 0.0, "not shown"),
    ],
)
def test_an_order_is_claimed_only_where_the_interval_excludes_the_margin(low, high, side, margin, said):
    assert verdict(Interval((low + high) / 2, low, high, 5), side, margin) == said


def test_one_seed_decides_nothing():
    assert verdict(Interval(5.0, None, None, 1), "above", 0.0) == "too few seeds"
    assert verdict(None, "above", 0.0) == "not run"
