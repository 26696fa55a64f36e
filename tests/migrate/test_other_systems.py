"""TRL's and verl's names: every field of GRPOConfig has a fate, every target exists, and a config is told ours."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gspo import migrate
from gspo.config import known_keys, load
from gspo.errors import ConfigError
from gspo.migrate.other_systems import find, foreign_keys
from lab.pages import migrating

TABLES = Path(migrate.__path__[0])
PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def test_every_field_of_trls_grpo_config_is_mapped_explained_or_listed_as_missing():
    trl = pytest.importorskip("trl", reason="needs gspo[test]")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known = {key for system, key in foreign_keys() if system == "TRL"}
    assert not fields - known, "fields of GRPOConfig without a row in migrate/trl.yaml"
    if trl.__version__.startswith("1.16"):  # another version may have dropped some
        others = yaml.safe_load((TABLES / "trl.yaml").read_text(encoding="utf-8"))["others"]
        known -= {key for rows in others.values() for row in rows for key in row[0].split()}
        assert not known - fields, "rows of migrate/trl.yaml that are no field of GRPOConfig"


def test_every_key_that_is_named_as_ours_exists():
    wrong = {row.ours for row in foreign_keys().values() if row.fate == "mapped"} - known_keys().keys()
    assert not wrong


def test_a_row_has_a_key_of_ours_and_a_note_at_most_or_a_reason():
    for name in ("trl.yaml", "verl.yaml"):
        for tables in yaml.safe_load((TABLES / name).read_text(encoding="utf-8")).values():
            for fate, rows in tables.items():
                assert fate in ("mapped", "needless", "unsupported")
                for row in rows:
                    assert len(row) in ((2, 3) if fate == "mapped" else (2,)), row
                    assert all(isinstance(cell, str) and cell for cell in row), row


def test_no_key_has_two_rows():
    for name, system in (("trl.yaml", "TRL"), ("verl.yaml", "verl")):
        tables = yaml.safe_load((TABLES / name).read_text(encoding="utf-8"))
        keys = [key for table in tables.values() for rows in table.values() for row in rows for key in row[0].split()]
        assert len(keys) == len(set(keys)) == len([1 for each, _ in foreign_keys() if each == system])


def test_what_is_not_mapped_says_why():
    assert all(row.note for row in foreign_keys().values() if row.fate != "mapped")


def refused(*overrides, text=None, folder=None):
    path = None
    if text is not None:
        path = folder / "run.yaml"
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("num_generations=8", "num_generations is TRL's name; here it is gconfig.n_samples"),
        ("+epsilon=0.2", "epsilon is TRL's name; here it is actor.eps_clip"),
        ("actor.epsilon=0.2", "actor.epsilon is TRL's name; here it is actor.eps_clip"),
        ("gconfig.num_generations=8", "here it is gconfig.n_samples"),
        ("top_p=0.9", "here it is gconfig.top_p"),
        ("min_p=0.1", "here it is gconfig.min_p"),
        (
            "repetition_penalty=1.1",
            "repetition_penalty is a key of TRL and is not supported here: the log-probs would not be",
        ),
        ("logging_steps=1", "is not needed here: every step is logged"),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "is verl's name; here it is actor.eps_clip"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "a key of verl and is not supported here"),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true", "a key of verl and is not needed here"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator is verl's name; here it is algorithm"),
        ("critic.optim.lr=1e-5", "critic.optim.lr is verl's name; here it is critic.optimizer.lr"),
        ("critic.cliprange_value=0.2", "here it is critic.value_eps_clip"),
        ("trainer.total_epochs=3", "here it is total_train_epochs"),
    ],
)
def test_a_key_of_another_system_is_told_ours(override, says):
    assert says in refused(override)


def test_a_typo_of_ours_is_still_a_typo():
    assert "the nearest is actor.eps_clip" in refused("actor.esp_clip=0.1")
    assert "the nearest is gconfig.temperature" in refused("gconfig.temprature=1")
    assert "TRL" not in refused("actor.top_p=0.5"), "a key of ours in the wrong section"


def test_a_whole_verl_file_gets_a_line_for_each_key_with_its_place(tmp_path):
    text = """\
data:
  train_files: train.parquet
  train_batch_size: 64
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B}
  actor:
    optim: {lr: 1e-6}
    use_kl_loss: false
    mystery: 3
  rollout: {n: 8, name: vllm}
algorithm:
  adv_estimator: grpo
"""
    message = refused(text=text, folder=tmp_path)
    for line, ours in (
        (2, "train_dataset.path"), (3, "train_dataset.batch_size"), (5, "actor.path"), (7, "actor.optimizer.lr"),
        (8, "actor.kl_loss_coef"), (10, "gconfig.n_samples"), (10, "rollout.backend"), (12, "algorithm"),
    ):  # fmt: skip
        assert any(f"run.yaml:{line}" in row and f"here it is {ours}" in row for row in message.splitlines()), ours
    assert "actor_rollout_ref.actor.mystery is not a known key" in message


@pytest.mark.run
def test_doctor_says_ours_and_exits_2(tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text("num_generations: 8\nbeta: 0.04\n")
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "doctor", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert "here it is gconfig.n_samples" in said
    assert "here it is actor.kl_loss_coef" in said


def test_no_key_of_ours_is_refused_as_theirs():
    for name in known_keys():
        theirs = find(name)
        assert theirs is None or theirs.system == "TRL" or name.startswith("critic.")


def test_the_committed_page_is_the_generated_one_and_has_every_key():
    assert PAGE.read_text(encoding="utf-8") == migrating(), "run: make docs"
    for _, key in foreign_keys():
        assert f"`{key}`" in migrating()


@pytest.mark.run
def test_the_module_prints_the_page():
    result = subprocess.run([sys.executable, "-m", "gspo.cli", "migrating"], capture_output=True, check=True)
    assert result.stdout.decode() == migrating()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("use_peft", "actor.use_lora"),
        ("peft_config", "actor.use_lora"),
        ("model_name_or_path", "actor.path"),
        ("dataset_name", "train_dataset.path"),
        ("torch_dtype", "actor.dtype"),
        ("max_prompt_length", "train_dataset.max_length"),
        ("num_iterations", "actor.ppo_epochs"),
        ("load_in_4bit", "actor.lora_base_bits"),
        ("attn_implementation", "not needed"),
    ],
)
def test_keys_of_trls_scripts_and_older_versions_are_known(key, says):
    with pytest.raises(ConfigError, match=says):
        load(None, [f"{key}=1"])
