import math
from dataclasses import replace

import pytest
from made_batches import FAILED, make_group

from gspo.config import load
from gspo.data import make_dataset, make_mixture
from gspo.errors import ConfigError
from gspo.train.build.data import _best_metric, _evaluation_steps, make_data
from gspo.train.evaluate import answer_rows, is_correct, problem_of, summarise_groups
from gspo.types import Score

pytestmark = pytest.mark.run


def test_avg_and_pass_at_k_are_shares_over_problems():
    groups = [make_group(0, [1, 0, 0, 0]), make_group(1, [1, 1, 1, 1]), make_group(2, [0, 0, 0, 0])]
    result = summarise_groups(groups, 4)
    assert (result.problems, result.k, result.failures) == (3, 4, 0)
    assert result.accuracy == pytest.approx((0.25 + 1 + 0) / 3)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.length == 2


def test_the_interval_is_over_problems_not_over_samples():
    """Shares 1/4, 3/4 and 1/2, 30 problems of each: variance 0.0421; the half-width is 1.96 · √(variance / 90)."""
    groups = [make_group(i, rewards) for i in range(30) for rewards in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1])]
    result = summarise_groups(groups, 4)
    assert result.accuracy == pytest.approx(0.5)
    assert result.accuracy_ci == pytest.approx(1.96 * math.sqrt(0.0421348315 / 90))


def test_one_sample_per_problem_has_wilsons_interval_also_where_all_are_right():
    half, full = (summarise_groups([make_group(i, [float(i < n)]) for i in range(100)], 1) for n in (50, 100))
    # Wilson's interval of 50 of 100 is 0.5 ± 0.0962, of 100 of 100 it is 0.9630 … 1: the longer arm is given.
    assert (half.accuracy, full.accuracy) == (0.5, 1.0)
    assert half.accuracy_ci == pytest.approx(0.0962, abs=5e-4)
    assert full.accuracy_ci == pytest.approx(0.0370, abs=5e-4)


def test_a_reward_that_did_not_answer_is_no_wrong_answer():
    result = summarise_groups([make_group(0, [1, FAILED]), make_group(1, [FAILED, FAILED]), make_group(2, [0, 1])], 2)
    assert result.failures == 3
    assert result.problems == 3
    assert result.accuracy == pytest.approx((1 + 0.5) / 2)
    assert result.pass_at_k == 1


def test_nothing_answered_is_no_accuracy():
    result = summarise_groups([make_group(0, [FAILED])], 1)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.accuracy_ci)
    assert result.failures == 1


def test_correct_means_full_marks_of_the_first_part_whatever_the_weights():
    assert is_correct(Score(0.7, {"math": 1.0, "format": 0.0})) is True
    assert is_correct(Score(1.3, {"math": 0.5, "format": 1.0})) is False
    assert is_correct(Score(1.0)) is True
    assert is_correct(FAILED) is None


def test_the_metrics_have_their_documented_names():
    names = summarise_groups([make_group(0, [1])], 1).metrics()
    plain = {"accuracy", "accuracy_ci", "reward", "reward_ci", "graded", "pass_at_k", "k", "problems", "length"}
    assert set(names) == {f"eval/{name}" for name in {*plain, "reward_failures"}}


def test_graded_rewards_have_a_mean_over_problems_with_students_interval():
    """Problems score −1, 0.5 and 2: mean 0.5, s = 1.5, t(2) = 4.3027."""
    result = summarise_groups([make_group(i, [r, r]) for i, r in enumerate((-1.0, 0.5, 2.0))], 2)
    assert (result.reward, result.graded) == (pytest.approx(0.5), 1.0)
    assert result.reward_ci == pytest.approx(4.3027 * 1.5 / math.sqrt(3), rel=1e-4)
    plain = summarise_groups([make_group(0, [1, 0]), make_group(1, [1, 1])], 2)
    assert (plain.reward, plain.graded) == (plain.accuracy, 0.0)


def test_a_format_term_does_not_make_the_rewards_of_a_right_or_wrong_task_graded():
    group = make_group(0, [1, 0])
    scores = (Score(1.1, {"math": 1.0, "format": 0.5}), Score(0.1, {"math": 0.0, "format": 0.5}))
    result = summarise_groups([replace(group, outcomes=scores)], 2)
    assert (result.graded, result.accuracy, result.reward) == (0.0, 0.5, pytest.approx(0.6))


def test_the_sources_of_a_mixture_have_their_own_scores():
    groups = [make_group(i, [float(i < 2)]) for i in range(4)]
    groups = [replace(g, prompt=replace(g.prompt, source="ab"[i % 2])) for i, g in enumerate(groups)]
    names = summarise_groups(groups, 1).metrics()
    assert (names["eval/a/accuracy"], names["eval/b/reward"], names["eval/a/problems"]) == (0.5, 0.5, 2)
    assert names["eval/accuracy"] == 0.5


def test_every_answer_is_kept_with_its_reward():
    group = make_group(3, [0.25, FAILED])
    right, failed = answer_rows(replace(group, texts=("x", "y")), decode=str)
    assert (right["completion"], right["reward"], right["correct"], right["length"]) == ("x", 0.25, False, 2)
    assert (failed["reward"], failed["correct"]) == (None, None)
    assert failed["failure"].startswith("timeout") or ":" in failed["failure"]
    chat = replace(group.prompt, text="<user>2+2<assistant>", messages=({"role": "user", "content": "2+2"},))
    assert problem_of(replace(group, prompt=chat))["question"] == "2+2"
    assert "question" not in problem_of(group)


@pytest.mark.parametrize(
    ("total", "settings", "steps"),
    [
        (500, [], [50, 100, 150, 200, 250, 300, 350, 400, 450, 500]),
        (60, [], [10, 20, 30, 40, 50, 60]),
        (6, [], []),  # the start and the last step, which are evaluated anyway
        (60, ["evaluator.freq_steps=25"], [25, 50]),
        (60, ["evaluator.freq_steps=epoch"], [30, 60]),
        (90, ["evaluator.freq_steps=2 epochs"], [60]),
    ],
)
def test_a_run_has_a_held_out_curve_of_about_ten_points_unless_a_frequency_is_set(total, settings, steps):
    every = _evaluation_steps(load(None, settings).config, total, steps_per_epoch=30)
    assert [step for step in range(1, total + 1) if every.is_due(step, 0.0)] == steps


def test_the_metric_of_the_best_checkpoint_names_a_source_that_exists():
    data = make_dataset([{"question": "2+2=", "answer": "4"}], tokenizer=None)
    mixed = make_mixture([data, data], names=["a", "b"])
    assert _best_metric("eval/a/reward", mixed) == "eval/a/reward"
    assert _best_metric("eval/reward", data) == "eval/reward"
    with pytest.raises(ConfigError, match=r"no source 'c': its sources are a, b"):
        _best_metric("eval/c/reward", mixed)
    with pytest.raises(ConfigError, match="not a mixture"):
        _best_metric("eval/a/reward", data)


def test_a_given_data_set_is_named_by_the_part_it_plays():
    data = make_dataset([{"question": "2+2=", "answer": "4"}], tokenizer=None)
    train, valid = make_data(load(None, []).config, data, data, None)
    assert [found.describe().partition(":")[0] for found in (train, valid)] == ["train_dataset", "valid_dataset"]
