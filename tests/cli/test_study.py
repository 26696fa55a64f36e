"""`gspo study FILE`: a user's own arms and seeds from one short file; and `gspo train --seeds`."""

import json

import pytest

from gspo.cli.main import main
from gspo.errors import ConfigError
from gspo.report import read_metrics
from gspo.studies import plan

STUDY = """
base: quickstart
common: {total_train_steps: 1}
seeds: [1, 2]
arms:
  gspo:
  grpo: {algorithm: grpo}
  grpo, own range: {algorithm: grpo, actor.eps_clip: 0.1}
  defaults:
    ~actor.eps_clip:
    ~actor.eps_clip_higher:
"""


def study(folder, text=STUDY):
    (folder / "mine.yaml").write_text(text)
    return plan.find_study(str(folder / "mine.yaml"))


def test_base_seeds_and_arms_are_enough_and_each_arm_is_compared_with_the_first(tmp_path):
    mine = study(tmp_path)
    assert [(check.arm, check.against) for check in mine.checks] == [
        (arm, "gspo") for arm in ("grpo", "grpo, own range", "defaults")
    ]
    assert len(plan.jobs(mine)) == 4 * 2
    assert all(job.overrides["total_train_steps"] == 1 for job in plan.jobs(mine))
    assert mine.plots
    tasks = study(tmp_path, STUDY + "tasks: {short: {gconfig.max_new_tokens: 8}, long: {}}\n")
    assert [check.against for check in tasks.checks] == ["gspo @ short"] * 3 + ["gspo @ long"] * 3


def test_an_arm_has_the_range_of_its_own_algorithm_and_a_reset_key_its_default(tmp_path):
    mine = study(tmp_path)
    config = {arm: plan.configured(mine, mine.overrides(arm), 1).config.actor for arm in mine.arms}
    assert {arm: actor.eps_clip for arm, actor in config.items()} == {
        "gspo": 0.002, "grpo": 0.2, "grpo, own range": 0.1, "defaults": 0.0003,
    }  # fmt: skip
    assert config["defaults"].eps_clip_higher == 0.0004
    # What was dropped is told, once for each key of an arm.
    told = [text.partition(" is dropped")[0].split(":")[0::3] for text in plan.dropped(mine)]
    assert [arm for arm, _ in told] == ["grpo", "grpo", "grpo, own range"]
    assert not any("command line" in text for text in plan.dropped(mine))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("grpo: {algorithm: grpo}", "grpo: {algoritm: grpo}", "mine.yaml:7, arm grpo: algoritm is not a known key"),
        ("~actor.eps_clip:", "~actor.eps_clop:", "mine.yaml:10, arm defaults: actor.eps_clop is not a known key"),
        ("total_train_steps: 1", "total_train_steps: one", "mine.yaml:3, arm gspo: total_train_steps must be"),
        ("base: quickstart", "base: nowhere.yaml", "base: nowhere.yaml is neither a file"),
        ("seeds: [1, 2]", "seeds: 2", "seeds must be a list of integers"),
        ("seeds: [1, 2]", "", "a study needs base"),
        ("  gspo:", "  gspo: 3", "gspo must be a mapping of overrides"),
        ("base: quickstart", "bases: 1\nbase: quickstart", "unknown keys bases"),
        ("base: quickstart", "plots: [rewards]\nbase: quickstart", "unknown curve 'rewards'; available: accuracy, "),
        ("base: quickstart", "measures: [end]\nbase: quickstart", "unknown measure 'end'"),
        ("base: quickstart", "checks: [{says: x, measure: gain, arm: b}]\nbase: quickstart", "unknown arm 'b'; .*gspo"),
        ("base: quickstart", "checks: [{says: it learns}]\nbase: quickstart", "checks or tune: .*measure"),
    ],
)
def test_an_error_names_the_study_file_and_for_an_arm_the_line(old, new, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as found:
        plan.jobs(study(tmp_path, STUDY.replace(old, new, 1)))
    assert "command line" not in str(found.value)


def test_list_shows_the_given_study_alone(tmp_path, capsys):
    study(tmp_path)
    assert main(["study", "list", str(tmp_path / "mine.yaml")]) == 0
    said = capsys.readouterr().out
    assert "0 of 8" in said
    assert "clipping" not in said


@pytest.mark.run
def test_the_results_of_a_study_are_beside_its_file_and_nothing_else_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = "{total_train_steps: 1, train_dataset.batch_size: 2, evaluator.size: 4, gconfig.max_new_tokens: 8}"
    (tmp_path / "own").mkdir()
    study(tmp_path / "own", f"{{base: quickstart, common: {few}, seeds: [1], arms: {{a: , b: {{algorithm: grpo}}}}}}")
    assert main(["study", "own/mine.yaml"]) == 0
    assert "mine: 2 new runs, 0 found, 0 failed" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "own").iterdir()} - {"mine.png"} == {
        "mine.yaml", "mine.json", "mine.md",
    }  # fmt: skip
    assert {file.name for file in tmp_path.iterdir()} == {"own", "runs"}
    assert {row["arm"] for row in json.loads((tmp_path / "own" / "mine.json").read_text())["records"]} == {"a", "b"}
    assert main(["study", "own/mine.yaml"]) == 0
    assert "mine: 0 new runs, 2 found, 0 failed" in capsys.readouterr().out


@pytest.mark.run
def test_several_seeds_are_runs_of_their_own_equal_to_single_ones_then_their_mean(tmp_path, capsys):
    few = ("total_train_steps=1", "train_dataset.batch_size=4", "evaluator.size=8", "threads=1")
    words = ["train", "quickstart", *few, f"cluster.fileroot={tmp_path}"]
    assert main([*words, "--seeds", "2"]) == 0
    rewards = [read_metrics(tmp_path / "quickstart" / f"gspo-s{seed}")[1]["reward/mean"] for seed in (1, 2)]
    table = capsys.readouterr().out.rpartition("Outcome")[2]
    mean, half = sum(rewards) / 2, 12.7062 * abs(rewards[0] - rewards[1]) / 2  # t of one degree of freedom · s / √2
    assert f"{mean:.3f} ± {half:.3f}" in table
    # The second run of a process is the run of a process of its own.
    assert main([*words, "seed=2", "trial_name=alone"]) == 0
    assert read_metrics(tmp_path / "quickstart" / "alone")[1]["reward/mean"] == rewards[1]
    # The same command continues each run.
    assert main([*words, "--seeds", "2", "total_train_steps=2"]) == 0
    assert [len(read_metrics(tmp_path / "quickstart" / f"gspo-s{seed}")) for seed in (1, 2)] == [3, 3]


def test_seeds_and_a_new_run_are_not_combined(capsys):
    assert main(["train", "quickstart", "--seeds", "2", "--new"]) == 2
    assert "--seeds must be 1 or more, and not with --new" in capsys.readouterr().err
