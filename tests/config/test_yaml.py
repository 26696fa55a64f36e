"""Reading YAML: places, numbers, and everything that is not a plain mapping is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.config import load
from gspo.errors import ConfigError


def write(folder: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text))
    return str(caught.value)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load(write(tmp_path, "# nothing\n")).config == load(None).config


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-6", "0.000001", "1_0e-7", ".1e-5"])
def test_floats_are_floats_however_they_are_written(tmp_path, written):
    lr = load(write(tmp_path, f"actor: {{optimizer: {{lr: {written}}}}}")).config.actor.optimizer.lr
    assert lr == pytest.approx(1e-6, rel=1e-12)


def test_integers_serve_where_a_number_is_wanted_and_become_floats(tmp_path):
    value = load(write(tmp_path, "gconfig: {temperature: 1}")).config.gconfig.temperature
    assert value == 1.0
    assert isinstance(value, float)


def test_anchors_and_merge_keys_work_and_own_keys_win(tmp_path):
    text = "train_dataset: &data\n  path: a.jsonl\n  split: train\nvalid_dataset:\n  <<: *data\n  split: dev\n"
    config = load(write(tmp_path, text)).config
    assert config.valid_dataset is not None
    assert (config.valid_dataset.path, config.valid_dataset.split) == ("a.jsonl", "dev")


def test_a_number_that_names_a_trial_keeps_its_zeros(tmp_path):
    assert load(write(tmp_path, "trial_name: 007")).config.trial_name == "007"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", ["run.yaml:1", "mapping", "a list"]),
        ("just words\n", ["run.yaml:1", "mapping"]),
        ("seed: 1\nseed: 2\n", ["run.yaml:2", "seed appears twice", "run.yaml:1"]),
        ("seed:\n\t1\n", ["run.yaml:2", "not valid YAML"]),
        ("seed: 1\n---\nseed: 2\n", ["not valid YAML"]),
        ("seed: [1\n", ["not valid YAML"]),
        ("a: 1\nseed: !!python/object/apply:os.system [touch x]\n", ["run.yaml:2", "!!python", "not allowed"]),
        ("seed: !secret x\n", ["run.yaml:1", "!secret", "not allowed"]),
        ("seed: !!binary aGk=\n", ["!!binary", "not allowed"]),
        ("reward: !!set {a}\n", ["!!set", "not allowed"]),
        ("seed: !!int x\n", ["run.yaml:1", "not a number"]),
        ("? [a, b]\n: 1\n", ["run.yaml:1", "key must be a name"]),
        ("actor: &a {path: *a}\n", ["alias"]),
        ("a: &a [*a]\n", ["contains itself"]),
        ("actor: {<<: 3}\n", ["<<", "mapping"]),
        (b"seed: 1\ntrial_name: \xff\xfe\n", ["run.yaml:2", "UTF-8"]),
        (b"\x00\x01\x02\xffgarbage", ["run.yaml:1"]),
        ("seed: \x07\n", ["run.yaml:1", "control character"]),
        ("seed: " + "9" * 6000, ["6000 characters"]),
        ("[" * 3000, ["run.yaml"]),
        ("seed: " + "{a: " * 60 + "1" + "}" * 60, ["nested too deeply"]),
        ('trial_name: "\\xZZ"\n', ["not valid YAML"]),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(tmp_path, text, words):
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message


def test_an_explosion_of_aliases_is_bounded(tmp_path):
    bomb = 'a0: &a0 ["x","x","x","x","x","x","x","x","x"]\n'
    bomb += "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    assert "expanding aliases" in refusal(tmp_path, bomb)


def test_missing_files_directories_and_huge_files_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist \(looked from /.*\); `gspo examples` lists"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="larger than"):
        load(write(tmp_path, b"#" * (2 << 20)))
    with pytest.raises(ConfigError, match="cannot be read"):
        load("a\0b")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert load(write(tmp_path, b"\xef\xbb\xbfseed: 5\n")).config.seed == 5


def test_a_planted_tag_runs_nothing(tmp_path):
    canary = tmp_path / "canary"
    refusal(tmp_path, f"seed: !!python/object/apply:os.mkdir ['{canary}']\n")
    assert not canary.exists()
