"""What a run directory tells, whole, torn or half deleted."""

import pytest
from made_runs import eval_row, graded_row, make_run, step_row

from gspo.errors import ConfigError
from gspo.report.read import best_step, choose_step, open_run, read_checkpoints, read_metrics, score_interval
from gspo.report.summary import _rate, summarise, summary_rows


def test_a_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path, [step_row(1), step_row(2)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward/me')
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    assert read_metrics(tmp_path / "nothing") == []


def test_the_best_step_is_the_one_that_the_trainer_recorded(tmp_path):
    rows = [{"step": 0, **eval_row(0.9), "eval/best_step": 0}, step_row(1, **eval_row(0.1), **{"eval/best_step": 1})]
    assert best_step(make_run(tmp_path, rows)) == 1


def test_the_best_step_of_an_older_run_is_the_first_of_the_highest_accuracy(tmp_path):
    rows = [{"step": 0, **eval_row(0.3)}, step_row(1, **eval_row(0.9)), step_row(2), step_row(3, **eval_row(0.9))]
    run = make_run(tmp_path, rows, steps=(1, 3))
    assert best_step(run) == 1
    assert [(c.step, c.bytes, c.best) for c in read_checkpoints(run)] == [(1, 1000, True), (3, 1000, False)]
    assert [choose_step(run, which) for which in ("best", "last", "3", "0")] == [1, 3, 3, 0]


def test_a_run_that_got_worse_has_its_best_before_training(tmp_path):
    run = make_run(tmp_path, [{"step": 0, **eval_row(0.5)}, step_row(1, **eval_row(0.2))], steps=(1,))
    assert choose_step(run, "best") == 0


def test_a_run_without_evaluations_takes_its_last_checkpoint(tmp_path):
    assert choose_step(make_run(tmp_path, [step_row(1), step_row(2)], steps=(1, 2)), "best") == 2


@pytest.mark.parametrize("which", ["7", "-1", "beste", "1.5", ""])
def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(which, tmp_path):
    run = make_run(tmp_path, [step_row(1)], steps=(4, 5))
    with pytest.raises(ConfigError, match="available: 4, 5"):
        choose_step(run, which)
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        choose_step(make_run(tmp_path / "new", []), "last")


def test_a_folder_above_the_run_names_it(tmp_path):
    run = make_run(tmp_path / "exp" / "trial", [])
    assert open_run(run) == run
    for folder in (tmp_path, tmp_path / "exp"):
        with pytest.raises(ConfigError, match="trial"):
            open_run(folder)
    with pytest.raises(ConfigError, match="does not exist"):
        open_run(tmp_path / "nowhere")


def test_intervals_of_shares_are_wilsons_and_of_several_samples_the_rows_own():
    # Newcombe 1998, table I, 81 of 263: 0.2553 to 0.3662
    assert score_interval(eval_row(81 / 263, 263), False) == pytest.approx((0.3080, 0.2553, 0.3662), abs=5e-5)
    assert score_interval(eval_row(0.99, 100, k=4), False) == pytest.approx((0.99, 0.97, 1.0))


def test_the_summary_says_start_and_end(tmp_path):
    rows = [{"step": 0, **eval_row(0.25)}, *(step_row(s) for s in range(1, 10)), step_row(10, **eval_row(0.75))]
    found = summarise(make_run(tmp_path, rows))
    assert (found.steps, found.seconds, found.best_step) == (10, 20.0, 10)
    assert found.reward == pytest.approx(0.3)  # steps 1…5
    assert found.reward_end == pytest.approx(0.8)  # steps 6…10
    assert found.rollout_tokens_s == pytest.approx(5500)
    text = dict(summary_rows(found))
    assert text["held-out accuracy"].startswith("25.0% (21.4–28.9) → 75.0% (71.1–78.6)")
    assert text["clipped"] == "10.0% low + 5.0% high, 150 of 1,000 sequences  at ε 0.002 / 0.0025"
    assert text["steps"] == "10 in 20.0 s"


def test_the_summary_of_graded_rewards_has_the_reward_and_each_source(tmp_path):
    sourced = {"eval/a/reward": 0.1, "eval/a/reward_ci": 0.1, "eval/a/problems": 4, "eval/a/accuracy": 0.0}
    first = graded_row(-0.5, 0.25) | sourced
    rows = [{"step": 0, **first}, step_row(1, **(graded_row(0.5, 0.25) | sourced | {"eval/a/reward": 0.3}))]
    text = dict(summary_rows(summarise(make_run(tmp_path, rows))))
    assert text["held-out reward"] == "-0.500 (-0.750 … -0.250) → 0.500 (0.250 … 0.750)  on 512 problems"
    assert text["  a"] == "0.100 (0.000 … 0.200) → 0.300 (0.200 … 0.400)"
    assert "held-out accuracy" not in text


def test_one_evaluation_and_an_unchanged_score_are_not_shown_as_a_change(tmp_path):
    once = [{"step": 0, **eval_row(0.25)}, step_row(1)]
    text = dict(summary_rows(summarise(make_run(tmp_path / "once", once))))
    assert text["held-out accuracy"] == "25.0% (21.4–28.9)  on 512 problems (measured once, before training)"
    assert "→" not in text["reward"]  # nor is one step
    same = [{"step": 0, **eval_row(0.25)}, step_row(1, **eval_row(0.25))]
    text = dict(summary_rows(summarise(make_run(tmp_path / "same", same))))
    assert text["held-out accuracy"] == "25.0% (21.4–28.9), unchanged  on 512 problems"


def test_tokens_per_second_of_servers_that_sample_beside_the_trainer_are_over_whole_steps():
    rows = [
        {"step": 1, "throughput/rollout_tokens": 600, "throughput/rollout_tokens_s": 300.0, "time/rollout_s": 0.1},
        {"step": 2, "throughput/rollout_tokens": 600, "throughput/rollout_tokens_s": 100.0, "time/rollout_s": 5.0},
        {"step": 3, "throughput/rollout_tokens": 0, "throughput/rollout_tokens_s": 0.0, "time/rollout_s": 2.0},
    ]
    assert _rate(rows, "rollout") == pytest.approx(1200 / 10)
    rows[2]["time/step_s"] = 7.0  # servers sampled during the whole step and finished nothing
    assert _rate(rows, "rollout") == pytest.approx(1200 / 15)
    inline = [{**row, "time/rollout_s": row["throughput/rollout_tokens"] / 100, "time/step_s": 60.0} for row in rows]
    for row in inline:
        row["throughput/rollout_tokens_s"] = 100.0 if row["throughput/rollout_tokens"] else 0.0
    assert _rate(inline, "rollout") == pytest.approx(100)


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0, **eval_row(0.5)}], [step_row(1, **{"clip/sequences_low": None, "policy/entropy": None})]]
)
def test_a_summary_of_little_says_little(rows, tmp_path):
    names = [name for name, _ in summary_rows(summarise(make_run(tmp_path, rows)))]
    assert "clipped" not in names
    assert "entropy" not in names
