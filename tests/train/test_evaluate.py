import math

import pytest
from made_batches import FAILED, make_group

from gspo.train.evaluate import is_correct, summarise
from gspo.types import Score

pytestmark = pytest.mark.run


def test_avg_and_pass_at_k_are_shares_over_problems():
    groups = [make_group(0, [1, 0, 0, 0]), make_group(1, [1, 1, 1, 1]), make_group(2, [0, 0, 0, 0])]
    result = summarise(groups, 4)
    assert (result.problems, result.k, result.failures) == (3, 4, 0)
    assert result.accuracy == pytest.approx((0.25 + 1 + 0) / 3)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.length == 2


def test_the_interval_is_over_problems_not_over_samples():
    """Shares 1/4, 3/4 and 1/2, 30 problems of each: variance 0.0421; the half-width is 1.96 · √(variance / 90)."""
    groups = [make_group(i, rewards) for i in range(30) for rewards in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1])]
    result = summarise(groups, 4)
    assert result.accuracy == pytest.approx(0.5)
    assert result.accuracy_ci == pytest.approx(1.96 * math.sqrt(0.0421348315 / 90))


def test_one_sample_per_problem_has_wilsons_interval_also_where_all_are_right():
    half, full = (summarise([make_group(i, [float(i < n)]) for i in range(100)], 1) for n in (50, 100))
    # Wilson's interval of 50 of 100 is 0.5 ± 0.0962, of 100 of 100 it is 0.9630 … 1: the longer arm is given.
    assert (half.accuracy, full.accuracy) == (0.5, 1.0)
    assert half.accuracy_ci == pytest.approx(0.0962, abs=5e-4)
    assert full.accuracy_ci == pytest.approx(0.0370, abs=5e-4)


def test_a_reward_that_did_not_answer_is_no_wrong_answer():
    result = summarise([make_group(0, [1, FAILED]), make_group(1, [FAILED, FAILED]), make_group(2, [0, 1])], 2)
    assert result.failures == 3
    assert result.problems == 3
    assert result.accuracy == pytest.approx((1 + 0.5) / 2)
    assert result.pass_at_k == 1


def test_nothing_answered_is_no_accuracy():
    result = summarise([make_group(0, [FAILED])], 1)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.accuracy_ci)
    assert result.failures == 1


def test_correct_means_full_marks_of_the_first_part_whatever_the_weights():
    assert is_correct(Score(0.7, {"math": 1.0, "format": 0.0})) is True
    assert is_correct(Score(1.3, {"math": 0.5, "format": 1.0})) is False
    assert is_correct(Score(1.0)) is True
    assert is_correct(FAILED) is None


def test_the_metrics_have_their_documented_names():
    names = summarise([make_group(0, [1])], 1).metrics()
    assert set(names) == {f"eval/{n}" for n in ("accuracy", "accuracy_ci", "pass_at_k", "k", "problems", "length")} | {
        "eval/reward_failures"
    }
