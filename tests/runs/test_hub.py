"""`gspo export` writes a model card and pushes the folder: to a fake of the hub's HTTP interface on loopback."""

import os
import subprocess
import sys

import fake_hub
import pytest
import training_runs
import yaml
from huggingface_hub import ModelCard
from made_runs import eval_row, make_run, step_row

from gspo.config import load
from gspo.report import Exported, model_card
from gspo.runs.export import open_repository

CONFIG = """algorithm: grpo
actor:
  path: owner/base  # run.yaml:3
  importance_sampling_level: token
train_dataset:
  path: openai/gsm8k
reward:
  functions: [math]
"""


def card_of(tmp_path, rows, **changes):
    origins = {"actor.path": ("file", "run.yaml:3"), "train_dataset.path": ("default", "")}
    run = make_run(tmp_path / "run", rows, config=CONFIG, origins=origins)
    return model_card(Exported(run, 2, "me/mine", "0.2.0", "GRPO (a paper)", **changes))


def test_a_card_has_what_the_hub_reads_and_scores_with_intervals(tmp_path):
    rows = [{"step": 0, **eval_row(0.25)}, step_row(1), step_row(2, **eval_row(0.5))]
    text = card_of(tmp_path, rows, base_model="owner/base")
    assert not fake_hub.problems_of_card(text)
    data = ModelCard(text).data  # huggingface_hub's own reader
    assert (data.library_name, data.base_model, data.datasets) == ("transformers", "owner/base", ["openai/gsm8k"])
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
    assert "| all | 25.0% (21.4–28.9) | 50.0% (45.7–54.3) | 512 |" in text
    assert text.count("| all |") == 1
    assert "gspo train gspo_config.yaml" in text
    hand = text.partition("```yaml\n")[2].partition("```")[0]
    assert hand == "actor.path: owner/base\n"  # defaults are not listed


def test_a_card_of_a_run_without_evaluation_says_so_and_text_of_the_run_is_inert(tmp_path):
    text = card_of(tmp_path, [step_row(1), step_row(2)], is_adapter=True)
    assert "was not evaluated" in text
    assert "model-index" not in text
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "peft"
    (tmp_path / "run" / "config.yaml").write_text('actor:\n  path: "a\\e[31mb"\n')
    assert "\x1b" not in model_card(Exported(tmp_path / "run", 2, "mine", "0.2.0", "GSPO"))


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("a/b/c", {}, "--push 'a/b/c'"),
        ("mine", {}, "give owner/name"),
        ("me/mine", {}, "hf auth login"),
    ],
)
def test_a_wrong_name_or_a_missing_token_is_found_before_the_export(name, variables, message, monkeypatch):
    monkeypatch.setattr("gspo.runs.export.get_token", lambda: None)
    with pytest.raises(Exception, match=message):
        open_repository(name, public=False)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return training_runs.train(tmp_path_factory.mktemp("runs"), "total_train_steps=1", "saver.freq_steps=1")[1]


def export(hub, run, to, *words, token=fake_hub.TOKEN):
    # HF_ENDPOINT is read when huggingface_hub is imported: in a process of its own.
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    variables |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "gspo", "export", str(run), "--step", "last", "--to", str(to), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=variables)


@pytest.mark.full
def test_an_export_is_pushed_whole_with_its_card_and_a_refused_push_says_how_to_go_on(run, tmp_path):
    with fake_hub.serving() as hub:
        refused = export(hub, run, tmp_path / "refused", "--push", "me/mine", token="hf_wrong")
        assert refused.returncode == 2
        assert "--push me/mine" in refused.stderr
        assert not (tmp_path / "refused").exists()  # before any work
        done = export(hub, run, tmp_path / "model", "--push", "me/mine")
        assert done.returncode == 0, done.stderr
        assert f"pushed: {hub.url}/me/mine/commit/" in done.stdout
        pushed = hub.repositories["me/mine"]
        assert pushed["private"] is True
        written = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
        assert pushed["files"] == written
        assert {"README.md", "model.safetensors", "gspo_config.yaml"} <= written.keys()
        assert "POST /api/validate-yaml" in hub.asked
        assert load(tmp_path / "model" / "gspo_config.yaml").config == load(run / "config.yaml").config
        hub.fail_commits = True
        failed = export(hub, run, tmp_path / "again", "--push", "me/mine", "--public")
        assert failed.returncode == 1, failed.stderr
        assert f"hf upload me/mine {tmp_path / 'again'}" in failed.stderr
        assert pushed["private"] is True  # an existing repository keeps its visibility
