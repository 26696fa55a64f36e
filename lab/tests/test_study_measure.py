"""Measures of hand-made metrics."""

import pytest

from gspo.stats import has_collapsed
from gspo.studies import coin, crossing, curves, evaluation_points, measures

SHAPE = {"samples_per_group": 8, "groups_per_step": 2}


def row(step, reward, accuracy=None, **more):
    base = {
        "step": step,
        "reward/mean": reward,
        "time/step_s": 2.0,
        "clip/sequences_low": 0.1,
        "clip/sequences_high": 0.2,
    }
    return base | ({} if accuracy is None else {"eval/accuracy": accuracy, "time/eval_s": 1.5}) | more


ROWS = [
    {"step": 0, "eval/accuracy": 0.2},
    row(1, 0.3),
    row(2, 0.5, 0.6),
    row(3, 0.9, **{"reward/refilled_groups": 1}),
    row(4, 1.0, 1.0),
]


def test_samples_are_prompts_times_completions_and_refilled_groups_count():
    assert [samples for samples, _, _ in evaluation_points(ROWS, **SHAPE)] == [0, 32, 72]


def test_seconds_of_training_leave_evaluation_out():
    assert [seconds for _, seconds, _ in evaluation_points(ROWS, **SHAPE)] == pytest.approx([0.0, 2.5, 5.0])


def test_the_figures_of_a_run():
    found = measures(ROWS, **SHAPE, failed=False)
    assert (found["start"], found["final"]) == (0.2, 1.0)
    assert found["gain"] == pytest.approx(0.8)
    # Half way from 32 to 72 samples, where accuracy goes from 0.6 to 1.0.
    assert found["samples_to_80"] == pytest.approx(52.0)
    # (32 · 0.4 + 40 · 0.8) / 72
    assert found["area"] == pytest.approx(44.8 / 72)
    assert found["clip_sequences"] == pytest.approx(0.3)
    assert found["collapsed"] == 0.0
    assert found["flip_rate"] is None


def test_a_run_that_never_gets_there_has_no_number_of_samples():
    assert measures(ROWS[:3], **SHAPE, failed=False)["samples_to_80"] is None
    assert crossing([(0.0, 0.9), (1.0, 0.1)], 0.8) == 0.0


def test_a_run_that_broke_down_or_lost_half_its_reward_has_collapsed():
    assert measures(ROWS, **SHAPE, failed=True)["collapsed"] == 1.0
    assert has_collapsed([0.1, 0.5, 0.9, 0.9, 0.9, 0.9, 0.4, 0.3])
    assert not has_collapsed([0.1, 0.5, 0.9, 0.9, 0.9, 0.9, 0.6, 0.5])
    assert not has_collapsed([])


def test_curves_start_where_training_does():
    assert curves(ROWS, **SHAPE)["accuracy"] == [[0, 0.2], [32, 0.6], [72, 1.0]]
    assert curves(ROWS, **SHAPE)["reward"][0] == [16, 0.3]


def test_a_run_with_graded_rewards_is_measured_by_its_held_out_reward():
    rows = [
        {**row, "eval/reward": row["eval/accuracy"] - 1, "eval/graded": 1.0} for row in ROWS if "eval/accuracy" in row
    ]
    assert [score for _, _, score in evaluation_points(rows, **SHAPE)] == pytest.approx([-0.8, -0.4, 0.0])


def test_the_coin_is_fair_repeatable_and_blind_to_being_right():
    texts = [f"7+8+0=15,3+4+1=08>{i}" for i in range(2000)]
    thrown = [coin(text, answer="85") for text in texts]
    assert thrown == [coin(text, answer="85") for text in texts]
    assert sum(thrown) / len(thrown) == pytest.approx(0.5, abs=0.04)
    right = [coin(f"{i}>{i}", answer=str(i)) for i in range(2000)]
    assert sum(right) / len(right) == pytest.approx(0.5, abs=0.04)
