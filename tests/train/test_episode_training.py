"""Whole runs of the loop on episodes: rewards of environments, resuming, sampling ahead, failures."""

import json
import re
from pathlib import Path

import episode_envs
import pytest
from training_runs import assert_resumes, make_trainer, metrics, samples, train

from gspo.config import load
from gspo.errors import ConfigError, RewardError
from gspo.runs import load_pending_groups
from gspo.train import Trainer
from gspo.train.commands import evaluate_run

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]
ROOT = Path(__file__).parents[2]
FEW = ("train_dataset.batch_size=4", "evaluator.size=8", "total_train_steps=2")


def test_a_run_on_episodes_that_was_stopped_and_resumed_is_the_uninterrupted_one(tmp_path):
    """With turn rewards, several sequences per trajectory, credit by turn, and groups sampled ahead in a checkpoint."""
    how = (*FEW, "actor.sequence_unit=turn", "env.turn_discount=0.9", "rollout.max_head_offpolicyness=1",
           "gconfig.temperature=2.0")  # fmt: skip
    _, path = assert_resumes(tmp_path, *how, after=1, env=episode_envs.forgetful)
    first = metrics(path)[1]
    assert (first["episode/sequences_mean"], first["episode/turns_mean"]) == (3, 3)
    assert first["grad/norm"] > 0
    rows = samples(path, 1)
    assert [row["turns"][0]["turn"] for row in rows[:4]] == [0, 1, 2, 0]
    assert rows[1]["turns"][0]["reward"] is not None


@pytest.mark.full
def test_a_stopped_run_whose_turns_continue_kept_rows_is_the_uninterrupted_one(tmp_path):
    """The process of the second half has kept nothing and evaluates nothing that the first one did."""
    how = (*FEW, "evaluator.freq_steps=1", "gconfig.temperature=2.0")
    _, path = assert_resumes(tmp_path, *how, after=1, env=episode_envs.ask_again)
    assert metrics(path)[1]["episode/sequences_mean"] == 1  # the second turn continues the first


def test_episodes_wait_in_a_checkpoint_with_their_sequences_and_rewards(tmp_path):
    how = (*FEW, "rollout.max_head_offpolicyness=1", "total_train_steps=3", "saver.freq_steps=1", "saver.keep=9")
    _, path = train(tmp_path, *how, env=episode_envs.forgetful)
    arrays, rows = load_pending_groups(path / "checkpoints/step_000001")
    assert len(rows) == 4
    assert all(len(sample["rest"]) == 2 and sample["outcome"] for row in rows for sample in row["samples"])
    assert len(arrays["tokens"]) == sum(
        part["length"] for row in rows for sample in row["samples"] for part in (sample, *sample["rest"])
    )


def test_environments_named_in_a_config_give_the_reward_and_their_parts_are_logged(tmp_path):
    named = f"env.path={episode_envs.__file__}:ask_again"
    trainer, path = train(tmp_path, *FEW, "total_train_steps=1", named)
    row = metrics(path)[1]
    assert row["reward/part_long"] == 1.0
    assert row["reward/mean"] == row["reward/part_reward"]
    assert row["episode/environment_tokens_mean"] == 2
    assert row["episode/turns_mean"] == 2
    documented = re.findall(r"^\| `(episode/[^`]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    written = {re.sub("failures_.*", "failures_<kind>", name) for name in row if name.startswith("episode/")}
    assert written == set(documented)
    fields = (ROOT / "docs" / "run-directory.md").read_text()
    assert all(f"`{field}`" in fields for field in samples(path, 1)[0])
    sample = samples(path, 1)[0]
    assert [(span["by"], span["length"]) for span in sample["turns"]][:2] == [("model", 8), ("environment", 2)]
    assert sample["length"] == sum(span["length"] for span in sample["turns"] if span["by"] == "model")
    assert trainer.config.env.path in (path / "config.yaml").read_text()


def test_an_environment_that_leaves_the_reward_to_the_config_gets_it_on_the_last_answer(tmp_path):
    async def silent(client, data):
        await client.chat(client.messages, max_new_tokens=2)
        await client.chat(client.messages)

    _, path = train(tmp_path, *FEW, "total_train_steps=1", env=silent)
    assert metrics(path)[1]["reward/mean"] > 0.3  # the embedded model's own, in one go
    rows = samples(path, 1)
    assert {row["branch"] for row in rows} == {0, 1}
    assert all(json.dumps(row["reward_parts"]).startswith('{"final"') for row in rows)


def test_environments_that_fail_cost_their_samples_and_too_many_end_the_run(tmp_path):
    _, path = train(tmp_path / "some", *FEW, "total_train_steps=1", env=episode_envs.unlucky)
    row = metrics(path)[1]
    assert row["reward/failures"] == row["episode/failures_crash"] > 0
    failed = [r for r in samples(path, 1) if r["failure"]]
    assert len(failed) == row["reward/failures"]
    said = "crash: environment: RuntimeError: bad luck"
    assert all(r["failure"].startswith(said) and r["advantage"] == 0 for r in failed)

    async def never(client, data):
        raise RuntimeError("nothing works")

    with pytest.raises(RewardError, match="nothing works"):
        train(tmp_path / "all", *FEW, "evaluator.at_start=false", env=never)


def test_an_environment_is_refused_before_any_work(tmp_path):
    for options, given, says in (
        ((), episode_envs.not_async, "async def"),
        (("env.path=toolz",), None, "toolz"),
        (("env.path=tools", "env.options.tools=[hammer]"), None, "hammer"),
        (("env.options.hours=1",), episode_envs.Patient, "hours"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_trainer(tmp_path, *options, env=given)
    with pytest.raises(ConfigError, match="workflow"):
        make_trainer(tmp_path, env=episode_envs.unlucky, workflow=lambda requests, sampler: ())
    assert not any(tmp_path.iterdir())


@pytest.mark.full
def test_the_tool_example_learns_to_ask(tmp_path):
    """Without the tool < 40 %, with it after training > 90 %."""
    config, how = ROOT / "examples/tools/calculator.yaml", [f"cluster.fileroot={tmp_path}", "total_train_steps=12"]
    alone = evaluate_run(load(config, [*how, "env.path=null", "evaluator.size=64"]).config, None, 0)
    assert alone["avg"]["value"] < 0.4
    trainer = Trainer(config, overrides=how)
    trainer.train(report=False)
    assert metrics(trainer.path)[-1]["eval/accuracy"] > 0.9
