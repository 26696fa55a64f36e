"""`gspo doctor` refuses what cannot run on this machine, by the checks that a run makes before its first step."""

import json

import pytest
import vision_zoo

from gspo.cli import main as cli
from gspo.config import load
from gspo.doctor.explanation import explain
from gspo.doctor.ready import examine

TINY = ["actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic", "train_dataset.batch_size=4"]


def failed(*overrides):
    """The failed checks of a tiny config: key → message."""
    loaded = load(None, [*TINY, *overrides])
    return {c.what: c.text for c in examine(loaded, explain(loaded).sections["memory"]) if c.state == "failed"}


def test_the_tiny_config_can_run():
    assert failed() == {}


def test_a_missing_file_a_missing_column_and_a_long_prompt_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.csv").write_text("task,gold\n1+1=,2\n" * 40)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1" * 3000, "answer": "1"}) + "\n")
    rows = "reward.functions=[numeric]"
    assert "there is no file nosuch.jsonl" in failed(rows, "train_dataset.path=nosuch.jsonl")["train_dataset.path"]
    assert "train_dataset.columns.prompt" in failed(rows, "train_dataset.path=words.csv")["data"]
    long = failed(rows, "train_dataset.path=long.jsonl", "train_dataset.split=all", "valid_dataset.path=long.jsonl",
                  "valid_dataset.split=all")  # fmt: skip
    assert "the prompt has 3000 tokens" in long["data"]


def test_a_missing_key_of_a_judge_and_a_function_that_cannot_be_imported_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = 'reward.functions=[{name: judge, url: "http://127.0.0.1:9/v1", model: m, api_key_env: JUDGE_KEY}]'
    assert "JUDGE_KEY is not set" in failed(judge)["rewards"]
    monkeypatch.setenv("JUDGE_KEY", "secret")
    said = failed(judge)["rewards"]
    assert "judge at http://127.0.0.1:9/v1/chat/completions: nothing answers" in said
    assert "secret" not in said


@pytest.mark.run
def test_a_users_function_is_imported_as_a_run_would(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\ndef f(text): return 1.0\n")
    assert "no_such_module" in failed(f"reward.functions=[{tmp_path}/mine.py:f]")["rewards"]


def test_an_engine_gpus_and_memory_that_are_not_here_are_found(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    without = failed("rollout.backend=vllm:d4", "vllm.python=/nowhere/python", "cluster.n_gpus_per_node=8")
    assert "vllm.python is '/nowhere/python'" in without["processes"]
    assert "this machine has 0 GPUs" in failed("cluster.n_gpus_per_node=8")["processes"]
    big = ["actor.path=smollm2-135m", "gconfig.max_new_tokens=8000", "gconfig.n_samples=64",
           "train_dataset.batch_size=512", "rollout.max_concurrent_rollouts=100000"]  # fmt: skip
    assert "TiB" in failed(*big)["memory"]


def test_a_wrong_model_names_its_key_and_the_nearest_name():
    assert "Did you mean smollm2-135m?" in failed("actor.path=smolm2-135m")["actor.path"]
    assert failed("actor.path=./models/qwen")["actor.path"].startswith("actor.path: there is no folder")
    assert "Did you mean embedded:tiny?" in failed("actor.path=embedded:tny")["actor.path"]


def test_an_environment_that_fails_is_one_problem(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    found = failed(f"env.path={tmp_path}/mine.py:play")
    assert list(found) == ["environment"]
    assert "no_such_module" in found["environment"]


def test_another_vocabulary_is_found():
    other = failed("actor.path=embedded:tiny-tools", "ref.path=embedded:tiny", "actor.kl_loss_coef=0.1")["ref.path"]
    assert "another vocabulary" in other
    assert "16 tokens and 18 tokens" in other
    loaded = load(None, [*TINY, "actor.path=embedded:tiny-tools", "ref.path=embedded:tiny", "actor.kl_loss_coef=0.1"])
    assert [c.state for c in examine(loaded) if c.what == "ref.path"] == ["failed"]


def test_the_exit_code_and_the_last_line_separate_config_and_machine(capsys):
    words = ["doctor", *(f"{word}" for word in TINY)]
    config = ["--config", "examples/quickstart.yaml"]
    assert cli.main([*words, *config]) == 0
    assert capsys.readouterr().out.endswith("This machine: it can run here.\n")
    assert cli.main([*words, *config, "train_dataset.path=nosuch.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "Config: no problems found" in out
    assert out.endswith("This machine: it cannot run here: 1 problem (✗).\n")
    assert cli.main([*words, *config, "train_dataset.path=nosuch.jsonl", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1
    assert cli.main([*words, *config, "--quick"]) == 0
    assert "This machine: not checked" in capsys.readouterr().out


def test_a_model_without_tokens_for_the_prompts_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Who wrote Hamlet?", "answer": "7"}\n' * 40)
    loaded = load(None, [*TINY, f"train_dataset.path={tmp_path}/rows.jsonl", "reward.functions=[numeric]"])
    (data,) = (check.text for check in examine(loaded) if check.what == "data")
    assert "embedded:tiny has no token for some characters of the first prompt" in data


def test_images_that_a_part_of_the_run_cannot_take_are_found(tmp_path):
    rows = vision_zoo.shown_rows(tmp_path, 4)
    data = [f"train_dataset.path={rows}", "train_dataset.size=null", "gconfig.max_new_tokens=4"]
    data += ["train_dataset.split=all", f"valid_dataset.path={rows}", "valid_dataset.split=all"]
    run = [f"actor.path={vision_zoo.model_folder(tmp_path / 'model')}", *data]
    assert "data" not in failed(*run)
    assert "several trainer ranks take text alone" in failed(*run, "actor.backend=fsdp:d2")["data"]
    assert "row 0: the prompt shows an image, and the model takes text alone" in failed(*data)["data"]
    # The image's tokens count: the text alone would fit.
    assert "row 0: the prompt has 9 tokens" in failed(*run, "gconfig.max_tokens=12")["data"]
    (tmp_path / "2.png").write_bytes(b"no image")
    assert "row 2: 2.png: the image cannot be read" in failed(*run)["data"]
