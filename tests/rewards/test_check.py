"""A broken reward is named before training: known answers are scored, and the scores are compared."""

import json
import re
from contextlib import closing

import pytest

from gspo.cli import main as cli
from gspo.data import load_dataset, make_dataset
from gspo.models import embedded
from gspo.rewards.check import ANSWERS, check_reward, diagnose
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.train import answer_markers
from gspo.types import Failure, Prompt, Score

ROWS = [
    Prompt((1,), f"{i}+{i}=?", {"answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"}, "rows", i, (), str(2 * i))
    for i in range(1, 9)
]


class Direct:
    """Rewards by a function of (completion, prompt), called at once."""

    def __init__(self, function):
        self._function, self._done, self._rows = function, [], {row.text: row for row in ROWS}

    def submit(self, key, item):
        outcomes = []
        for text in item.completions:
            try:
                outcomes.append(Score(float(self._function(text, self._rows[item.prompt]))))
            except Exception as error:
                outcomes.append(Failure("crash", f"{type(error).__name__}: {error}"))
        self._done.append((key, tuple(outcomes)))

    def completed(self, deadline_s=None):
        while self._done:
            yield self._done.pop(0)

    def close(self): ...


def final(text):
    return text.rpartition("####")[2].strip()


def problems(function):
    return diagnose(check_reward(ROWS, Direct(function)), 10.0)


def test_a_right_reward_has_no_problem_and_every_answer_is_scored():
    lines = check_reward(ROWS, Direct(lambda text, row: final(text) == row.reference))
    assert [line.answer for line in lines] == list(ANSWERS)
    assert [line.mean for line in lines] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert diagnose(lines, 10.0) == []


@pytest.mark.parametrize(
    ("function", "words", "is_fatal"),
    [
        (lambda text, row: 1.0, "every answer earns 1: the reward is constant", True),
        (lambda text, row: 0.0, "no form of it earns more than 0", False),
        (lambda text, row: f"<answer>{row.reference}</answer>" in text, "the reference could not be checked", False),
        (lambda text, row: final(text).isdigit(), "another row's answer earns 1 .* does not compare", True),
        (lambda text, row: 1.0 if not text or final(text) == row.reference else 0.0, "an empty answer earns 1", True),
        (lambda text, row: text[0] and final(text) == row.reference, r"failed on 8 of 40 .*empty.*: crash", False),
        (lambda text, row: "####" in text, "the format alone is rewarded", False),
        (lambda text, row: -1.0 - abs(20 - len(text)), "right if every reward is negative", False),
        (
            lambda text, row: final(text) == row.reference and int(row.reference) < 10,
            "the reference answer earns 0 on 50% of rows: .*10' is not parsed",
            False,
        ),
    ],
)  # fmt: skip
def test_each_kind_of_broken_reward_is_named(function, words, is_fatal):
    found = [problem for problem in problems(function) if re.search(words, problem.text)]
    assert found, problems(function)
    assert found[0].is_fatal == is_fatal


def test_the_check_ends_at_the_first_kind_of_answer_that_fails():
    def broken(text, row):
        raise ValueError("no")

    lines = check_reward(ROWS, Direct(broken), until_failure=True)
    assert [line.answer for line in lines] == ["reference"]
    assert diagnose(lines, 10.0)[0].is_fatal


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "final", "marker": ">"},
        {"name": "final"},
        {"name": "final", "marker": "The answer is"},
        {"name": "finals", "marker": "="},
        {"name": "numeric"},
    ],
)
def test_a_bare_answer_is_scored_in_the_form_that_the_reward_reads(settings):
    answers = ["7 10", "3 4", "12 5", "9 8"] if settings["name"] == "finals" else ["559", "17", "8", "1204"]
    rows = [{"prompt": f"{i}", "answer": answer} for i, answer in enumerate(answers)]
    data = make_dataset(rows, tokenizer=embedded.embedded_tokenizer())
    spec = {"": reward_spec(settings)}
    with closing(RewardPool(spec[""], key="reward", workers=1, timeout_s=5.0, log_path=None)) as pool:
        prompts = [data.prompt(row) for row in range(4)]
        lines = check_reward(prompts, pool, markers=answer_markers(spec))
    assert [line.mean for line in lines[:3]] == [1.0, 0.0, 0.0]
    assert not [problem for problem in diagnose(lines, 5.0) if problem.is_fatal or problem.is_open]


@pytest.mark.parametrize(("path", "reward"), [("embedded:arithmetic:2-3", {"name": "final", "marker": ">"})])
def test_the_tasks_own_reward_is_right(path, reward):
    data = load_dataset(path, tokenizer=embedded.embedded_tokenizer(), size=8)
    pool = RewardPool(reward_spec(reward), key="reward", workers=1, timeout_s=5.0, log_path=None)
    try:
        assert diagnose(check_reward([data.prompt(row) for row in range(8)], pool), 5.0) == []
    finally:
        pool.close()


def test_rows_without_an_answer_are_checked_for_failures_only():
    data = make_dataset([{"prompt": f"{i}"} for i in range(4)], tokenizer=embedded.embedded_tokenizer())
    rows = [data.prompt(row) for row in range(4)]
    direct = Direct(lambda text, row: 0.0)
    direct._rows = {row.text: row for row in rows}
    lines = check_reward(rows, direct)
    assert [line.answer for line in lines] == ["empty"]
    assert diagnose(lines, 10.0) == []


def test_the_verb_prints_the_table_and_its_exit_code_says_whether_training_makes_sense(capsys):
    assert cli.main(["doctor", "--reward", "examples/quickstart.yaml", "train_dataset.size=8"]) == 0
    assert "the reference earns most" in capsys.readouterr().out
    bad = ["reward.functions=[{name: length, least: 1}]", "train_dataset.size=8"]
    assert cli.main(["doctor", "--reward", "examples/quickstart.yaml", *bad]) == 1
    assert "✗ another row's answer earns 1" in capsys.readouterr().out
    assert cli.main(["doctor", "--model", "examples/quickstart.yaml"]) == 2


@pytest.mark.run
def test_a_reference_that_was_not_scored_is_not_ticked(tmp_path, capsys):
    rows = [{"question": f"day {i}", "iso": f"2026-01-{i:02d}"} for i in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def score(text, iso, **columns):\n    return float(text == iso)\n")
    words = [f"train_dataset.path={tmp_path}/train.jsonl", f"reward.functions=['{tmp_path}/reward.py:score']"]
    words = ["doctor", "--reward", "examples/quickstart.yaml", *words, "train_dataset.chat_template=none"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "✓" not in said
    assert "? no answer column found (columns: question, iso): the reference was not scored" in " ".join(said.split())
    assert "train_dataset.columns.answer" in said
    assert cli.main([*words, "train_dataset.columns={answer: iso}"]) == 0
    assert "✓ the reference earns most" in capsys.readouterr().out
    # A reward that reads no form which was tried may still be right.
    (tmp_path / "reward.py").write_text("def score(text, iso, **_):\n    return float(f'<date>{iso}</date>' in text)\n")
    assert cli.main([*words, "train_dataset.columns={answer: iso}"]) == 0
    said = capsys.readouterr().out
    assert "? the reference could not be checked: no form of it earns more than 0, such as" in " ".join(said.split())
    assert "✓" not in said
