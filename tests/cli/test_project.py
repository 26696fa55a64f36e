"""The first commands: `gspo init`, whose projects run as they are written, `quickstart` and shell completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from gspo.cli import main as cli
from gspo.cli.project import SCHEMA, completion_script, write_project
from gspo.errors import ConfigError
from gspo.report import read_metrics
from gspo.rewards import unavailable
from gspo.studies import plan

ONE_STEP = ("total_train_steps=1", "train_dataset.batch_size=4", "evaluator.size=4", "threads=1")

TASKS = cli.VERBS["init"].arguments["--task"]["choices"]
SHELLS = cli.VERBS["completion"].arguments["shell"]["choices"]


@pytest.mark.parametrize("task", TASKS)
def test_a_project_has_a_config_that_its_schema_and_the_doctor_accept(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my project", "--task", task]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "my project"
    text = (folder / "train.yaml").read_text()
    schema = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    jsonschema.validate(yaml.safe_load(text), json.loads((folder / schema[1]).read_text()))
    assert not any(
        word in (folder / name).read_text() for name in ("train.yaml", "README.md") for word in ("NAME", "ABOUT")
    )
    commands = re.findall(r"^gspo \S+ \S+", (folder / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 3
    assert all(command in said for command in commands)
    monkeypatch.chdir(folder)
    assert cli.main(["doctor", "--quick", "train.yaml"]) == 0
    assert "Config: no problems found" in capsys.readouterr().out


def test_the_study_of_a_project_has_arms_that_differ_in_the_objective_and_its_range_alone(tmp_path, monkeypatch):
    write_project(tmp_path / "mine", "study")
    monkeypatch.chdir(tmp_path / "mine")
    study = plan.find_study("study.yaml")
    ours, theirs = (plan.set_keys(plan.configured(study, study.overrides(arm), 1)) for arm in study.arms)
    differ = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert {"algorithm", "actor.eps_clip"} <= differ
    assert all(key == "algorithm" or key.startswith("actor.") for key in differ)
    assert theirs.get("actor.eps_clip") == 0.2


def test_a_project_overwrites_nothing(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="does not overwrite"):
        write_project(tmp_path / "used", "math")
    assert [file.name for file in (tmp_path / "used").iterdir()] == ["mine.txt"]
    write_project(tmp_path / "new", "math")
    with pytest.raises(ConfigError, match="does not overwrite"):
        write_project(tmp_path / "new", "sft")


def test_train_and_test_rows_of_a_project_are_disjoint(tmp_path):
    for task in TASKS:
        write_project(tmp_path / task, task)
        train, test = (
            set((tmp_path / task / "data" / f"{s}.jsonl").read_text().splitlines()) for s in ("train", "test")
        )
        assert train
        assert test
        assert not train & test
        assert (tmp_path / task / SCHEMA).is_file()


def gspo(folder, *words):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.run
def test_a_project_trains_as_it_is_written(tmp_path, monkeypatch):
    write_project(tmp_path / "mine", "math")
    monkeypatch.chdir(tmp_path / "mine")
    assert cli.main(["train", "train.yaml", *ONE_STEP]) == 0
    (run,) = (tmp_path / "mine" / "runs" / "mine").iterdir()
    assert [row["step"] for row in read_metrics(run)] == [0, 1]
    assert "`gspo doctor --reward` shows more" not in (run / "log.txt").read_text()  # reward.check found nothing


@pytest.mark.run
@pytest.mark.parametrize("task", TASKS)
def test_the_reward_of_a_project_raises_no_alarm(task, tmp_path, monkeypatch, capsys):
    if task == "code" and unavailable():
        pytest.skip(unavailable())
    write_project(tmp_path / "mine", task)
    monkeypatch.chdir(tmp_path / "mine")
    code, said = cli.main(["doctor", "--reward", "train.yaml"]), capsys.readouterr()
    if task in ("chat", "tools"):
        assert (code, said.out) == (2, "")
        assert "an environment gives its own rewards" in said.err
    else:
        assert code == 0
        assert not any(mark in said.out for mark in ("✗ ", "! "))
        # The tests of a program are not a text that a model could write, so its reward cannot be checked this way.
        assert said.out.count("✓ ") == (task != "code")


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_the_reward_test_passes_the_doctor_agrees_and_the_project_trains_and_reports(task, tmp_path, tiny):
    if task == "code" and unavailable():
        pytest.skip(unavailable())
    write_project(tmp_path / "mine", task)
    folder, python = tmp_path / "mine", (sys.executable, "-m")
    assert " passed" in gspo(folder, *python, "pytest", "-q", "-p", "no:cacheprovider")
    assert "This machine: it can run here." in gspo(folder, *python, "gspo", "doctor", "train.yaml")
    gspo(folder, *python, "gspo", "train", "train.yaml", *ONE_STEP)
    (run,) = (folder / "runs" / "mine").iterdir()
    assert [row["step"] for row in read_metrics(run)] == [0, 1]
    assert "`gspo doctor --reward` shows more" not in (run / "log.txt").read_text()
    gspo(folder, *python, "gspo", "report", str(run))


# -- Shell completion -----------------------------------------------------------------------------------------


def bash(*words):
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = completion_script("bash") + f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _gspo; "
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert not done.stderr
    return [line for line in done.stdout.split("\n") if line]


@pytest.mark.run
def test_bash_completes_verbs_options_choices_examples_and_keys():
    assert set(bash("gspo", "")) >= cli.VERBS.keys()
    assert bash("gspo", "che") == ["checkpoints"]
    assert bash("gspo", "train", "--o") == ["--on"]
    assert bash("gspo", "train", "--on", "s") == ["slurm"]
    assert bash("gspo", "train", "quick") == ["quickstart"]
    assert bash("gspo", "train", "x.yaml", "gconfig.n_s") == ["gconfig.n_samples="]
    assert bash("gspo", "init", "p", "--task", "") == list(TASKS)
    assert bash("gspo", "eval", "--data", "") == []  # a file: bash's own completion
    assert "copy" in bash("gspo", "examples", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_has_every_verb_and_every_option(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(re.search(rf"\b{verb}\b", script) for verb in cli.VERBS)
    assert ("-l dry-run" if shell == "fish" else "--dry-run") in script


@pytest.mark.run
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_another_shell_reads_its_completion(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = Path(tmp_path / "completion")
    file.write_text(("autoload -U compinit && compinit -u\n" if shell == "zsh" else "") + completion_script(shell))
    # fish can be asked for completions; zsh's widget runs in an editor only, so it is asked for the definition.
    ask = "complete -C 'gspo che'" if shell == "fish" else 'print "$_comps[gspo]"'
    done = subprocess.run(
        [shell, "-c", f"source {file}; {ask}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("checkpoints" if shell == "fish" else "_gspo") in done.stdout
