"""The `gspo` command as a user meets it: in a process of its own, with its exit codes."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import gspo
from gspo.algorithms import ALGORITHMS
from gspo.cli import main as cli
from gspo.errors import ConfigError, RolloutError
from gspo.launcher import LAUNCHERS
from gspo.system import by_name

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"
GSPO_YAML = str(EXAMPLES / "gsm8k_gspo.yaml")


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "gspo", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": "", **env},
    )


def test_help_teaches_the_first_commands_and_every_verb(capsys):
    for args in ([], ["--help"], ["-h"]):
        assert cli.main(args) == 0
        text = capsys.readouterr().out
        assert "gspo doctor gsm8k_gspo " in text
        assert all(re.search(rf"^  {verb} +\w", text, re.MULTILINE) for verb in cli.VERBS)
        assert max(map(len, text.splitlines())) <= 100


def test_the_configs_and_keys_that_help_names_exist(capsys):
    cli.main([])
    commands = re.findall(r"^  (gspo (?:train|doctor|config) \S+)  ", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert cli.main(["config", command.split()[-1]]) == 0


def test_config_explains_a_key_a_section_and_a_last_part(capsys):
    assert cli.main(["config", "actor.eps_clip"]) == 0
    key = capsys.readouterr().out
    assert "a number or auto or null, above 0 and at most 1; default null" in " ".join(key.split())
    assert cli.main(["config", "actor"]) == 0
    assert "actor.eps_clip_higher" in capsys.readouterr().out
    assert cli.main(["config", "eps_clip"]) == 0
    assert capsys.readouterr().out == key


def test_a_name_of_an_example_or_a_file_is_a_config_even_if_a_key_ends_in_it(tmp_path, monkeypatch, capsys):
    assert cli.main(["config", "agent"]) == 0  # the last part of env.agent, too
    assert capsys.readouterr().out.startswith("# The resolved config")
    monkeypatch.chdir(tmp_path)
    Path("seed").write_text("seed: 7\n")
    assert cli.main(["config", "seed"]) == 0
    assert "seed: 7  # seed:1" in capsys.readouterr().out


def test_an_example_is_copied_with_the_files_it_names_and_runs_from_its_new_place(tmp_path, monkeypatch, capsys):
    from gspo.config import load

    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples"]) == 0
    assert re.search(r"^quickstart +The embedded default", capsys.readouterr().out, re.MULTILINE)
    shipped = load("agent").config.env.agent
    assert Path(shipped.partition(":")[0]).is_file()  # though there is no folder examples here
    assert cli.main(["examples", "copy", "agent", "mine"]) == 0
    assert sorted(p.name for p in Path("mine").iterdir()) == ["agent.yaml", "solver.py"]
    assert load("mine/agent.yaml").config.env.agent == "mine/solver.py:solve"
    assert cli.main(["examples", "copy", "code_gspo"]) == 0
    assert load("code_gspo.yaml").config.train_dataset.path == "problems"
    assert Path("problems", "train.jsonl").is_file()
    capsys.readouterr()
    Path("mine/agent.yaml").unlink()
    assert cli.main(["examples", "copy", "agent", "mine"]) == 2
    assert "mine/solver.py exists" in capsys.readouterr().err
    assert not Path("mine/agent.yaml").exists()
    assert cli.main(["examples", "copy", "quikstart"]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err


def test_version(capsys):
    for word in ("--version", "-V", "version"):
        assert cli.main([word]) == 0
        assert capsys.readouterr().out == f"gspo {gspo.__version__}\n"


@pytest.mark.run
def test_doctor_explains_with_less_than_two_seconds_of_work_in_a_process_of_its_own():
    def work_s():  # CPU time: the machine may be busy
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = work_s()
    done = run("doctor", "--quick", GSPO_YAML)
    assert work_s() - start < 2
    assert (done.returncode, done.stderr) == (0, "")
    assert "clip(sᵢ, 1−3e-4, 1+4e-4)" in done.stdout
    assert "\x1b" not in done.stdout


def test_doctor_takes_overrides_and_options_in_any_order(capsys):
    level = "+actor.importance_sampling_level=sequence"
    grpo = str(EXAMPLES / "gsm8k_grpo.yaml")
    answers = []
    for args in ([grpo, level, "--json"], ["--json", grpo, level], [level, "--config", grpo, "--json"]):
        assert cli.main(["doctor", "--quick", *args]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["objective"]["same_as"] == "gspo"


def test_doctor_exits_2_for_the_impossible_and_for_warnings_when_strict(capsys):
    assert cli.main(["doctor", GSPO_YAML, "gconfig.n_samples=1"]) == 2
    assert "cannot run" in capsys.readouterr().out
    assert cli.main(["doctor", "--quick", GSPO_YAML, "actor.eps_clip=0.2"]) == 0
    assert "Config: 1 warning." in capsys.readouterr().out
    assert cli.main(["doctor", GSPO_YAML, "actor.eps_clip=0.2", "strict=true", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.run
def test_a_typo_exits_2_with_the_nearest_name_and_no_traceback():
    done = run("doctor", GSPO_YAML, "actor.esp_clip=0.2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "actor.eps_clip" in done.stderr
    assert "command line" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreadable_config_is_json_too(capsys):
    assert cli.main(["doctor", "--json", "no/such.yaml"]) == 2
    captured = capsys.readouterr()
    assert "no/such.yaml" in json.loads(captured.out)["unreadable"][0]
    assert "no/such.yaml" in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor"], "no config given"),
        (["train"], "no config given"),
        (["config"], "no config given"),
        (
            ["doctor", "total_train_steps=2"],
            "'total_train_steps=2' sets a key; pass a YAML file or the name",
        ),
        (["config", "actor.esp_clip"], "the nearest is actor.eps_clip"),
        (["config", "path"], "several keys end in path: "),
        (["config", "a.yaml"], "not exist"),
        (["docter"], "did you mean doctor?"),
        (["objectives", "gsop"], "did you mean gspo?"),
        (["train", "quikstart"], "did you mean the example quickstart?"),
    ],
)
def test_a_mistake_exits_2_and_is_told_what_is_wanted_or_near(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_option_exits_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["doctor", GSPO_YAML, "--jsn"])
    assert exit_info.value.code == 2
    assert "--jsn" in capsys.readouterr().err


def test_objectives_lists_all_and_shows_one(capsys):
    assert cli.main(["objectives"]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", table, re.MULTILINE) for name in ALGORITHMS)
    for spelling in ("gspo_token", "GSPO-token"):
        assert cli.main(["objectives", spelling]) == 0
        card = capsys.readouterr().out
        assert "sᵢₜ = sg[sᵢ] · π_θ(yᵢₜ)/sg[π_θ(yᵢₜ)]" in card
        assert "arXiv 2507.18071, eq. 13–17" in card
        assert "clip_low 3e-4, clip_high 4e-4" in card


def test_config_prints_a_yaml_that_loads_to_the_same_config(tmp_path, capsys):
    from gspo.config import load

    assert cli.main(["config", GSPO_YAML, "gconfig.n_samples=16"]) == 0
    file = tmp_path / "resolved.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(file).config == load(GSPO_YAML, ["gconfig.n_samples=16"]).config


def raising(error):
    def raise_it(_words):
        raise error

    return raise_it


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a"), 2), (RolloutError("b"), 1), (KeyboardInterrupt(), 130)])
def test_exit_codes_of_errors(error, code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", raising(error))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err.startswith("gspo: ")


def test_our_own_bugs_are_not_dressed_up_as_user_errors(monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.run
def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; ({sys.executable} -m gspo config {GSPO_YAML}; echo code $? >&2) | exec 0<&-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == "code 0"


@pytest.mark.run
def test_errors_that_quote_a_config_are_inert(tmp_path):
    file = tmp_path / "hostile.yaml"
    file.write_text('algorithm: "\\e]0;owned\\a\\u202e"\n')
    done = run("doctor", str(file))
    assert done.returncode == 2
    assert not set("\x1b\x07\u202e") & set(done.stderr)
    assert "owned" in done.stderr


@pytest.mark.run
def test_a_terminal_without_utf8_still_gets_its_answer():
    done = run("objectives", "gspo", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "Group Sequence Policy Optimization" in done.stdout


@pytest.mark.run
def test_no_color_is_respected_on_a_terminal():
    """A pseudo-terminal is a terminal: colours by default, none with NO_COLOR."""
    import pty

    def output(**env):
        leader, follower = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo", "doctor", "--quick", GSPO_YAML],
            stdout=follower,
            env={**clean, "TERM": "xterm", **env},
        )
        os.close(follower)
        read = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # Linux's end of file on a pseudo-terminal
                break
            if not chunk:
                break
            read += chunk
        os.close(leader)
        assert process.wait(timeout=60) == 0
        return read

    assert b"\x1b[" in output()
    assert b"\x1b[" not in output(NO_COLOR="1")


def test_new_takes_the_first_free_trial_name(tmp_path):
    from gspo.cli.train import free_trial_name
    from gspo.config import load

    config = load(None, [f"cluster.fileroot={tmp_path}", "experiment_name=e", "trial_name=t"]).config
    names = []
    for _ in range(3):
        names.append(free_trial_name(config))
        (tmp_path / "e" / names[-1]).mkdir(parents=True)
    assert names == ["t", "t-2", "t-3"]


def test_the_table_of_verbs_names_functions_and_the_launchers():
    for verb in cli.VERBS.values():
        assert verb.run.startswith("lab.") or callable(by_name(verb.run))
    assert tuple(cli.VERBS["train"].arguments["--on"]["choices"]) == LAUNCHERS


def test_a_broken_pipe_that_is_not_stdout_is_an_error(monkeypatch):
    def lose_a_server(_):
        raise BrokenPipeError("the server left")

    monkeypatch.setattr("gspo.cli.common.objectives", lose_a_server)
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            cli.main(["objectives"])


def test_two_examples_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    from gspo import shipped

    for name in ("a/run.yaml", "b/run.yaml", "b/one.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("seed: 1\n")
    monkeypatch.setattr(shipped, "shipped", lambda _: tmp_path)
    assert list(shipped.example_files()) == ["a/run", "b/run", "one"]
    assert shipped.find_config("b/run") == tmp_path / "b" / "run.yaml"
    assert shipped.find_config("run") is None
