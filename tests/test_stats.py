"""Intervals against their definitions and published tables."""

import math

import numpy as np
import pytest

from gspo.stats import share_interval, t_half, t_quantile, welch_half, wilson


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30, 31, 60, 200])
def test_the_quantile_leaves_two_and_a_half_percent_of_students_density_above(freedom):
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    x = np.linspace(0.0, t_quantile(freedom), 200_001)
    half = constant * np.trapezoid((1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
    assert half == pytest.approx(0.475, abs=2e-5)


def test_t_quantiles_are_those_of_printed_tables():
    assert [round(t_quantile(df), 3) for df in (1, 2, 30)] == [12.706, 4.303, 2.042]
    assert t_quantile(40) == pytest.approx(2.0211, abs=1e-4)
    assert t_quantile(120) == pytest.approx(1.9799, abs=1e-4)
    assert t_quantile(2.9) == t_quantile(2)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (1, 10), (81, 263), (148, 263), (500, 500)])
def test_wilsons_ends_solve_the_score_equation(right, n):
    """An end q of Wilson's interval is one at which |p − q| = z √(q(1−q)/n); 0 and 1 are the exceptions."""
    share = right / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 1e-12 < end < 1 - 1e-12:
            assert abs(share - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / n))


def test_wilsons_interval_has_published_values():
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_scores_between_zero_and_one_have_the_normal_interval():
    mean, low, high = share_interval([0.25, 0.5, 0.75])  # s = 0.25
    assert (low, mean, high) == pytest.approx((0.5 - 1.96 * 0.25 / math.sqrt(3), 0.5, 0.5 + 1.96 * 0.25 / math.sqrt(3)))
    assert all(math.isnan(x) for x in share_interval([]))


def test_intervals_over_the_first_axis_and_of_equal_arms():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [4.0, 5.0]])
    assert t_half(values) == pytest.approx([3.1824 * 1.29099 / 2, 0.0], abs=1e-4)
    assert t_half([7.0]) == 0
    assert welch_half(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == 0


def test_welch_of_equal_sizes_and_variances_is_the_two_sample_t_interval():
    a, b = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([3.0, 4.0, 5.0, 6.0, 7.0])
    # s² = 2.5 each: standard error √(2 · 2.5 / 5) = 1, and 8 degrees of freedom.
    assert welch_half(a, b) == pytest.approx(2.306, abs=1e-3)
