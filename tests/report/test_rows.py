"""Samples of a run as rows for supervised fine-tuning."""

import json

import pytest

from gspo.cli import main as cli
from gspo.errors import ConfigError
from gspo.report.samples import parse_filter, training_rows

SAMPLES = {
    1: [
        {"prompt": "a", "completion": "1", "reward": 0.0, "finish": "stop", "submission": 0, "sample": 0},
        {"prompt": "a", "completion": "2", "reward": 1.0, "finish": "stop", "submission": 0, "sample": 1},
        {"prompt": "a", "completion": "2", "reward": 1.0, "finish": "stop", "submission": 0, "sample": 2},
        {"prompt": "b", "completion": "no", "reward": 0.0, "finish": "stop", "submission": 1, "sample": 0},
    ],
    2: [
        {"prompt": "a", "completion": "2!", "reward": 1.5, "finish": "stop", "submission": 9, "sample": 0},
        {"prompt": "<u>c", "question": "c", "completion": "3", "reward": 1.0, "finish": "stop", "submission": 8},
        {"prompt": "d", "completion": "4", "reward": 1.0, "finish": "length", "submission": 7},
        {"prompt": "e", "completion": "5", "reward": 1.0, "finish": "stop", "turns": [], "submission": 6},
    ],
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: gspo\n")
    (tmp_path / "samples").mkdir()
    for step, rows in SAMPLES.items():
        text = "".join(json.dumps({"step": step, **row}) + "\n" for row in rows)
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").write_text(text + '{"torn')
    return tmp_path


def test_a_filter_keeps_each_distinct_whole_completion_with_its_origin(run):
    rows = list(training_rows(run, [parse_filter("reward>=1")], best=False))
    assert [(row["prompt"], row["completion"]) for row in rows] == [("a", "2"), ("a", "2!"), ("c", "3")]
    assert rows[0]["origin"] == {
        "run": str(run), "step": 1, "submission": 0, "sample": 1, "version": None, "reward": 1.0,
    }  # fmt: skip


def test_the_best_of_every_prompt_is_kept_if_it_earned_anything(run):
    rows = list(training_rows(run, [], best=True))
    assert [(row["prompt"], row["completion"]) for row in rows] == [("a", "2!"), ("c", "3")]


@pytest.mark.parametrize("text", ["reward", "rewards>1", "reward>", "import os"])
def test_a_filter_that_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match="reward>=1 or finish=stop"):
        parse_filter(text)


def test_the_verb_writes_rows_only_and_the_advice_goes_to_stderr(run, capsys):
    assert cli.main(["report", str(run), "--samples", "--filter", "reward>=1", "--filter", "step<2"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["completion"] for line in out.splitlines()] == ["2"]
    assert "1 rows" in err
    assert cli.main(["report", str(run), "--samples", "--filter", "reward>7"]) == 2
