"""reasoning-gym by name: its settings, its slow tasks, and what it does not have."""

import os
import re

import pytest

from gspo.data import reasoning_gym as gym
from gspo.errors import DataError
from gspo.rewards import RewardItem, RewardPool, reward_spec

pytest.importorskip("reasoning_gym", reason="needs gspo[tasks]")


def rows(task="chain_sum", num_rows=30, **options):
    return gym.task_rows(task, "train", size=num_rows, seed=1, options=options, key="train_dataset")


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """Every task counts as slow; one process has to do."""
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    monkeypatch.setattr(gym, "_SLOW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    return tmp_path / "tasks"


def test_settings_reach_the_task():
    for row in rows(min_terms=2, max_terms=2, min_digits=1, max_digits=1):
        assert re.search(r"\d [-+] \d\b", row["question"])
    terms = {len(re.findall(r"\d+", row["question"])) for row in rows(min_terms=5, max_terms=5)}
    assert min(terms) >= 5


@pytest.mark.run
def test_a_slow_task_gives_the_same_rows_tuples_and_all_and_is_kept(slow, capsys, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    kept = rows()
    assert "reasoning_gym:chain_sum is slow" in capsys.readouterr().err
    (file,) = slow.iterdir()
    assert rows() == kept
    assert capsys.readouterr().err == "", "the second time it is read"
    monkeypatch.setattr(gym, "_SLOW_S", 1e9)
    file.unlink()
    assert rows() == kept
    assert any(isinstance(v, tuple) for row in kept for v in row["entry"]["metadata"]["difficulty"].values())


def test_the_kept_rows_are_what_is_read_and_a_damaged_file_is_made_again(slow):
    before = rows(num_rows=8)
    (file,) = slow.iterdir()
    text = file.read_text()
    file.write_text(text.replace(f'"answer": "{before[0]["answer"]}"', '"answer": "kept"'))
    assert "kept" in [row["answer"] for row in rows(num_rows=8)]
    file.write_text("torn")
    assert rows(num_rows=8) == before
    assert file.read_text() == text


@pytest.mark.run
def test_a_kept_task_scores_its_own_answers(slow):
    kept = rows("futoshiki", num_rows=2, min_board_size=4, max_board_size=4)
    with RewardPool(reward_spec("reasoning_gym"), workers=1, log_path="/dev/null") as pool:
        outcomes = pool.score([RewardItem("", (str(row["answer"]), "no"), data=row) for row in kept])
    assert [right.value for right, _ in outcomes] == [1.0, 1.0]
    assert all(wrong.value < 1.0 for _, wrong in outcomes)


def test_what_json_cannot_hold_is_refused_and_not_changed():
    with pytest.raises(TypeError, match="set"):
        gym._packed({"a": [{1, 2}]})


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("chain_som", {}, "reasoning_gym has no task 'chain_som'; similar names: chain_sum"),
        (
            "chain_sum",
            {"min_term": 2},
            "train_dataset.options.min_term: chain_sum has no such setting; did you mean min_terms?",
        ),
        ("chain_sum", {"size": 2}, "train_dataset.options.size: set train_dataset.size instead"),
        ("chain_sum", {"seed": 2}, "train_dataset.options.seed: set seed instead"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "train_dataset.options: reasoning_gym's chain_sum rejects"),
        ("composite", {}, "reasoning_gym's composite rejects"),
    ],
)
def test_what_a_task_does_not_have_is_named(task, options, says):
    with pytest.raises(DataError, match=re.escape(says)):
        rows(task, **options)
