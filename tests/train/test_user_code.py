"""Rewards, environments, filters and agents of a user: their errors show their lines, and their changes are noticed."""

import json

import pytest
from training_runs import path_of, train

from gspo.errors import ConfigError, GspoError
from gspo.system import described, source_file, user_lines

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

QUICK = ("evaluator.at_start=false", "evaluator.size=4", "total_train_steps=1", "train_dataset.batch_size=2",
         "actor.ppo_n_minibatches=1")  # fmt: skip
CODE = """
def inner(columns):
    return columns["gold"]  # line 3


def reward(text, **columns):
    return float(inner(columns))


async def environment(client, data):
    await client.chat(client.messages)
    return float(inner(data))


def accept(group):
    return bool(inner(group["data"]))


def agent(base_url, api_key, data):
    return inner(data)


def some(text, answer, **columns):
    return float(inner(columns)) if int(answer) % 2 else 1.0
"""


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward.functions", "reward"),
        ("env.path", "environment"),
        ("rollout.dynamic_filter_fn", "accept"),
        ("env.agent", "agent"),
    ],
)
def test_an_error_shows_the_lines_of_the_users_code_in_the_message_and_in_log_txt(tmp_path, code, key, name):
    value = f"[{code}:{name}]" if key == "reward.functions" else f"{code}:{name}"
    with pytest.raises(GspoError, match="KeyError: 'gold'") as caught:
        train(tmp_path, *QUICK, f"{key}={value}")
    log = (path_of(tmp_path) / "log.txt").read_text()
    for said in (str(caught.value), log):
        assert f'File "{code}", line 3, in inner' in said
        assert 'return columns["gold"]  # line 3' in said
        assert f"in {name}\n" in said
        assert "gspo/src" not in said
        assert "asyncio" not in said
    assert "error: " in log


def test_failures_that_do_not_end_the_run_are_shown_once_with_their_lines(tmp_path, code):
    train(
        tmp_path, *QUICK, "total_train_steps=2", "train_dataset.batch_size=8", "reward.max_failure_fraction=0.95",
        f"reward.functions=[{code}:some]",
    )  # fmt: skip
    log = (path_of(tmp_path) / "log.txt").read_text()
    assert log.count("warning: a reward failed in step") == 1
    assert f'File "{code}", line 3, in inner' in log


def test_an_unexpected_error_is_in_log_txt_with_its_traceback(tmp_path):
    def workflow(requests, sampler):
        raise ZeroDivisionError("made to fail")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, *QUICK, workflow=workflow)
    log = (path_of(tmp_path) / "log.txt").read_text()
    assert "ZeroDivisionError: made to fail" in log
    assert "in workflow" in log


@pytest.mark.full
def test_a_resume_after_a_change_of_the_users_code_says_so_by_name(tmp_path, code):
    names = (f"reward.functions=[{code}:some]", f"rollout.dynamic_filter_fn={code}:accept")
    code.write_text(CODE.replace('columns["gold"]', "1"))
    train(tmp_path, *QUICK, *names, "actor.max_refills=50")
    recorded = json.loads((path_of(tmp_path) / "code.json").read_text())
    assert list(recorded) == [f"reward {code}:some", f"filter {code}:accept"]
    log = path_of(tmp_path) / "log.txt"
    train(tmp_path, *QUICK, *names, "actor.max_refills=50", "total_train_steps=2")
    assert "has changed" not in log.read_text()
    code.write_text(CODE.replace('columns["gold"]', "2"))
    train(tmp_path, *QUICK, *names, "actor.max_refills=50", "total_train_steps=3")
    assert f"warning: reward {code}:some has changed since this run was last started ({code})" in log.read_text()
    assert f"warning: filter {code}:accept has changed" in log.read_text()
    log.unlink()
    train(tmp_path, *QUICK, *names, "actor.max_refills=50", "total_train_steps=4")
    assert "has changed" not in log.read_text()


ROWS = [{"task": f"{a}+{a}=", "level": str(a)} for a in range(10, 60)]


def test_a_missing_function_is_found_before_a_model_is_loaded(tmp_path, code):
    with pytest.raises(ConfigError, match=r"mine.py has no function nothing"):
        train(tmp_path, "actor.path=/no/such/model", f"reward.functions=[{code}:nothing]")


def test_rows_without_an_answer_and_without_a_reward_are_refused_before_sampling(tmp_path):
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = (f"train_dataset.path={file}", "train_dataset.columns.prompt=task")
    with pytest.raises(
        ConfigError, match=r"no reward is configured.*no answer column .*task, level.*reward\.functions"
    ):
        train(tmp_path, *QUICK, *path)
    with pytest.raises(ConfigError, match=r"`numeric` needs the right answer.*train_dataset\.columns\.answer"):
        train(tmp_path, *QUICK, *path, "reward.functions=[numeric]")
    assert not (path_of(tmp_path) / "metrics.jsonl").exists()
    log = path_of(tmp_path) / "log.txt"
    train(tmp_path, *QUICK, *path, "train_dataset.columns.answer=level")
    assert f"no reward is configured; using `math` for {file}" in log.read_text()


def test_an_environment_that_gives_rewards_needs_no_other_reward(tmp_path, code):
    code.write_text(CODE.replace('columns["gold"]', "1"))
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = (f"train_dataset.path={file}", "train_dataset.columns.prompt=task")
    train(tmp_path, *QUICK, *path, f"env.path={code}:environment")
    assert "no reward is configured" not in (path_of(tmp_path) / "log.txt").read_text()


class EvilError(Exception):
    def __str__(self):
        raise SystemExit("evil")


def test_an_error_whose_message_fails_is_described_all_the_same():
    try:
        raise EvilError
    except EvilError as error:
        said = described(error)
    assert said.startswith("EvilError: (its message cannot be shown)\n  File ")
    assert user_lines(KeyError("never raised")) == ""


def test_the_file_of_a_function_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "kit" / "rewards.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_file("kit.rewards:f") == tmp_path / "kit" / "rewards.py"
    assert source_file("kit:f") == tmp_path / "kit" / "__init__.py"
    assert source_file("kit.absent:f") is None
    assert source_file("math") is None
    assert source_file("sys:exit") is None
    assert source_file(described).name == "imports.py"
    assert source_file(None) is None
