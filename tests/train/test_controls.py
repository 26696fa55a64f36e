"""Controls of learning in runs: entropy, a curriculum, rewards normalised apart, the product correction."""

import json

import pytest
from training_runs import RANKED, assert_resumes, metrics, path_of, samples, train

pytestmark = pytest.mark.full

SHORT = ("train_dataset.batch_size=4", "gconfig.max_new_tokens=24", "evaluator.freq_steps=0")


def steps(root):
    return [row for row in metrics(path_of(root)) if row["step"]]


def test_an_entropy_term_keeps_the_policy_more_random(tmp_path, tiny):
    how = (*SHORT, "total_train_steps=8", "actor.optimizer.lr=1e-3")
    train(tmp_path / "with", *how, "actor.entropy_coef=0.5")
    train(tmp_path / "without", *how)
    with_term, without = steps(tmp_path / "with"), steps(tmp_path / "without")
    # A step whose groups all have equal rewards trains nothing without the term.
    last = [[r["policy/entropy"] for r in rows if r["policy/entropy"] is not None][-1] for rows in (with_term, without)]
    assert last[0] > with_term[0]["policy/entropy"] + 0.1
    assert last[0] > last[1] + 0.1
    assert "policy/entropy_coef" not in without[-1]


def test_the_coefficient_follows_its_target_and_a_resumed_run_is_the_same(tmp_path, tiny):
    how = (*SHORT, RANKED, "total_train_steps=5", "actor.entropy_coef=0.01", "actor.entropy_target=5.0")
    assert_resumes(tmp_path, *how, after=3)
    coefficients = [row["policy/entropy_coef"] for row in steps(tmp_path / "straight")]
    assert coefficients[0] == 0.01
    assert coefficients == sorted(coefficients)  # the entropy is below 5 nats
    assert coefficients[-1] > 0.012


@pytest.mark.parametrize("more", [(), ("rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true")])
def test_a_resumed_run_draws_the_prompts_of_the_uninterrupted_one(tmp_path, tiny, more):
    how = (*SHORT, "total_train_steps=6", "train_dataset.shuffle=pass_rate", "train_dataset.size=40", *more)
    _, path = assert_resumes(tmp_path, *how, after=3)
    rows = [json.loads(line) for line in (path / "pass_rates.jsonl").read_text().splitlines()]
    assert steps(tmp_path / "straight")[-1]["curriculum/rows_seen"] == len(rows) > 4
    assert len({row["prompt"] for step in range(1, 7) for row in samples(path, step)}) > 4


def test_a_curriculum_has_fewer_groups_without_a_gradient(tmp_path, tiny):
    how = (
        *SHORT, "total_train_steps=25", "train_dataset.size=48", "train_dataset.path=embedded:arithmetic:1-5",
        "actor.optimizer.lr=1e-6", "train_dataset.batch_size=8", "gconfig.n_samples=8", "gconfig.max_new_tokens=48",
    )  # fmt: skip
    train(tmp_path / "drawn", *how, "train_dataset.shuffle=pass_rate")
    train(tmp_path / "plain", *how)
    late = [
        sum(r["reward/zero_variance_groups"] for r in steps(tmp_path / name)[8:]) / 17 for name in ("drawn", "plain")
    ]
    assert late[0] < late[1]


def test_the_product_correction_is_bounded_and_moves_away_from_1_with_staleness(tmp_path, tiny):
    """Against other corrections: `gspo study run lag`."""
    train(tmp_path, *SHORT, RANKED, "total_train_steps=5", "actor.use_decoupled_loss=true",
          "actor.rejection_sampling.preset=seq_tis", "rollout.max_head_offpolicyness=2")  # fmt: skip
    rows = steps(tmp_path)
    assert rows[0]["correction/raw_mean"] == pytest.approx(1.0, abs=1e-4)
    assert abs(rows[-1]["correction/raw_mean"] - 1) > 1e-3
    assert all(row["correction/weight_mean"] <= 2 for row in rows)
