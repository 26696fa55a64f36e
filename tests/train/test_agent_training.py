"""Training runs whose samples are played by agents through the endpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import SMALL, assert_resumes, digests, metrics, path_of, samples, train

from gspo.config import load
from gspo.envs import Agents, find_agent
from gspo.errors import ConfigError
from gspo.lint import lint
from gspo.train import Trainer

pytestmark = pytest.mark.run

HERE = str(Path(__file__).parents[1] / "helpers")
AGENT = f"env.agent={HERE}/loop_agents.py"
FEW = ("train_dataset.batch_size=4", "total_train_steps=2", "evaluator.size=4")


def test_an_agent_is_trained_and_a_bad_one_costs_its_samples(tmp_path):
    _, run = train(tmp_path, *FEW, f"{AGENT}:troubled", "reward.max_failure_fraction=0.99", "evaluator.at_start=false")
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    first = samples(run, 1)
    failed = [row for row in first if row["failure"]]
    assert failed
    assert all("Refused: model_not_found" in row["failure"] for row in failed)
    assert {int(row["answer"]) % 2 for row in failed} == {1}
    good = [row for row in first if not row["failure"]]
    assert good
    assert all(len(row["turns"]) == 1 for row in good)  # two sequences of one turn each
    assert {row["branch"] for row in good} == {0, 1}
    assert rows[0]["episode/failures_crash"] == len(failed)
    assert rows[0]["agent/refused_model_not_found"] == len(failed)
    assert rows[0]["agent/refused_unknown_parameter"] == len(good) // 2
    assert rows[0]["agent/calls"] == len(good)


@pytest.mark.full
def test_what_an_agent_is_asked_by_makes_no_difference(tmp_path):
    """By the config, in Python, with settings that are replaced; twice the same run, bit for bit."""
    _, first = train(tmp_path / "a", *FEW, f"{AGENT}:both_ways")
    _, again = train(tmp_path / "b", *FEW, f"{AGENT}:both_ways")
    assert digests(again) == digests(first)
    agent = find_agent(f"{HERE}/loop_agents.py:both_ways", {"temperature": 0.1})
    _, python = train(tmp_path / "c", *FEW, env=Agents(agent))
    assert [row["agent/settings_replaced"] for row in metrics(python)] == [
        row["agent/calls"] for row in metrics(python)
    ]
    assert (python / "log.txt").read_text().count("note: the agent sets temperature") == 1
    assert "note: the agent" not in (first / "log.txt").read_text()
    assert [row["completion"] for row in samples(python, 2)] == [row["completion"] for row in samples(first, 2)]


@pytest.mark.full
def test_a_run_with_an_agent_resumes_bit_for_bit(tmp_path):
    whole = ("total_train_steps=3", *FEW[::2], f"{AGENT}:both_ways", "saver.freq_steps=1")
    assert_resumes(tmp_path, *whole, after=2)


@pytest.mark.full
def test_without_a_reward_of_the_agents_the_configured_one_judges(tmp_path):
    _, run = train(tmp_path, *FEW, f"{AGENT}:judged")
    for row in samples(run, 1):
        assert row["failure"] is None
        assert row["reward"] == float(row["completion"].rpartition(">")[2] == row["answer"])


@pytest.mark.full
def test_a_command_is_trained(tmp_path):
    program = (
        "import json, sys; from os import environ as e; sys.path.insert(0, sys.argv[1]); import loop_agents;"
        "print(loop_agents.both_ways(e['OPENAI_BASE_URL'], e['OPENAI_API_KEY'], json.load(sys.stdin)))"
    )
    command = f"env.agent={[sys.executable, '-c', program, HERE]!r}"
    _, run = train(tmp_path / "command", *FEW, command)
    _, function = train(tmp_path / "function", *FEW, f"{AGENT}:both_ways")
    assert [row["completion"] for row in samples(run, 2)] == [row["completion"] for row in samples(function, 2)]


def found(*overrides):
    return [(f.key, f.severity) for f in lint(load(None, ["algorithm=gspo", *overrides]), num_gpus=0)]


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("env.agent", ("env.agent=nowhere/agent.py:solve",)),
        ("env.agent", ("env.agent=[no-such-program, a.js]",)),
        ("env.agent", ("env.path=tools", f"{AGENT}:judged")),
    ],
)
def test_an_agent_that_cannot_be_is_refused_before_any_work(key, overrides):
    assert (key, "error") in found(*overrides)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}/loop_agents.py:nobody", "has no function nobody"),
        ("json:dumps", r"must take \(base_url, api_key, data\)"),
        ("no_such_module:solve", "importing no_such_module failed"),
    ],
)
def test_an_agent_of_another_shape_is_refused_with_the_shape_it_must_have(name, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(load(None, ["algorithm=gspo", f"env.agent={name}"]), env=None)


def test_options_are_the_agents_keyword_arguments():
    assert found(f"{AGENT}:both_ways", "env.options={temperature: 0.5}") == []
    with pytest.raises(ConfigError, match=r"env\.options"):
        Trainer(load(None, ["algorithm=gspo", f"{AGENT}:both_ways", "env.options={warmth: 1}"]))


@pytest.mark.full
@pytest.mark.parametrize("how", [("rollout.backend=local:d1",), ()])
def test_sampled_ahead_and_by_servers_an_agent_gets_the_same_answers(how, tmp_path):
    """As `gspo train` does it; batch 1 is of version 0 in all of them."""
    _, alone = train(tmp_path / "alone", *FEW, f"{AGENT}:both_ways")
    given = [
        *SMALL,
        *FEW,
        f"{AGENT}:both_ways",
        "rollout.max_head_offpolicyness=1",
        f"cluster.fileroot={tmp_path}",
        *how,
    ]
    (config := tmp_path / "run.yaml").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "train", "--config", str(config), *given],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    seen = [[(r["submission"], r["sample"], r["branch"], r["completion"]) for r in samples(run, 1)]
            for run in (path_of(tmp_path), alone)]  # fmt: skip
    assert seen[0] == seen[1]
    assert metrics(path_of(tmp_path))[-1]["agent/calls"] > 0
