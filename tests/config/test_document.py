"""A config as text: the resolved file loads to the same config, and docs/config.md is what the schema says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from areal_files import NEW, OLD

from gspo.algorithms import ALGORITHMS
from gspo.config import config_fingerprint, dump, effective_objective, load, write_origins
from gspo.config.resolve import read_origins
from gspo.config.schema import known_keys
from gspo.migrate import rules
from lab.pages import document

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(file for file in (ROOT / "examples").rglob("*.yaml") if file.name != "study.yaml")


def again(loaded, folder):
    path = folder / "resolved.yaml"
    path.write_text(dump(loaded), encoding="utf-8")
    return load(path)


def test_there_are_examples():
    assert {"gsm8k_gspo.yaml", "gsm8k_grpo.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_shipped_example_survives_dump_and_load(path, tmp_path):
    loaded = load(path)
    reloaded = again(loaded, tmp_path)
    assert reloaded.config == loaded.config
    assert config_fingerprint(reloaded.config) == config_fingerprint(loaded.config)
    assert effective_objective(reloaded) == effective_objective(loaded)


@pytest.mark.parametrize("text", [OLD, NEW])
def test_migrated_configs_survive_dump_and_load_without_a_word(text, tmp_path):
    path = tmp_path / "areal.yaml"
    path.write_text(text)
    loaded = load(path)
    reloaded = again(loaded, tmp_path)
    assert reloaded.config == loaded.config
    assert reloaded.messages == []


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["actor.eps_clip=auto"],
        ["actor.rejection_sampling.preset=sequence_mask"],
        ["actor.prox_logp_method=rollout", "critic={}", "ref={}"],
        ["eval_gconfig={n_samples: 4}", "actor.reward_norm={mean_level: group}", "actor.use_lora=true"],
    ],
    ids=str,
)
def test_every_algorithm_survives_dump_and_load(name, extra, tmp_path):
    loaded = load(None, [f"algorithm={name}", *extra])
    assert again(loaded, tmp_path).config == loaded.config


def test_awkward_texts_and_numbers_survive_dump_and_load(tmp_path, monkeypatch):
    text = "a \"quoted\" ${seed} \\${x} # no comment: 'x' \n\tü \u2028 \U0001f600 - [ { & * ! | > % @ `"
    monkeypatch.setenv("GSPO_TEST_TEXT", text)
    path = tmp_path / "run.yaml"
    path.write_text(
        "trial_name: '007'\nexperiment_name: 'true'\n"
        "train_dataset: {system_prompt: '${oc.env:GSPO_TEST_TEXT}', path: 'null', columns: {prompt: '1e-6'}}\n"
        "gconfig: {stop: ['', ' ', '\\${a}', '~', 'no', '0x1F', '12:30', '1', 1, 2]}\n"
        "actor: {optimizer: {lr: 1.2345678901234567e-301}}\n"
        "vllm: {a: [1, {b: null, 'c d': '\\${e}', 'f: g': 1e-7}], 3: x, 'yes': true, h: '${oc.env:GSPO_TEST_TEXT}'}\n"
    )
    loaded = load(path)
    assert loaded.config.train_dataset.system_prompt == text
    assert loaded.config.vllm["a"][1]["c d"] == "${e}"
    assert again(loaded, tmp_path).config == loaded.config


def test_the_dump_names_every_key_and_who_decided_it(tmp_path):
    loaded = load(None, ["algorithm=gspo", "ref={}", "critic={}", "actor.rejection_sampling={}", "eval_gconfig={}"])
    text = dump(loaded)
    assert "eps_clip: 0.0003  # algorithm gspo" in text
    assert "algorithm: gspo  # command line" in text
    data = yaml.safe_load(text)
    for key in known_keys().values():
        section, value = key.name.rpartition(".")[0], data
        if section and loaded.origins.get(section) is not None and not loaded.is_set(section):
            continue  # below a section that is null
        for part in key.name.split("."):
            assert part in value, key.name
            value = value[part]


def test_a_digest_ignores_spelling_and_notices_every_value():
    plain = config_fingerprint(load(None, ["actor.optimizer.lr=1e-6"]).config)
    assert (
        plain
        == config_fingerprint(load(None, ["actor.optimizer.lr=0.000001"]).config)
        == config_fingerprint(load(None).config)
    )
    assert plain != config_fingerprint(load(None, ["actor.optimizer.lr=1.0000001e-6"]).config)


def test_the_examples_can_clip_and_divide():
    for path in EXAMPLES:
        config = load(path).config
        if config.algorithm == "sft":  # nothing is clipped, so one update per batch is enough
            continue
        sequences = config.train_dataset.batch_size * config.gconfig.n_samples
        assert config.actor.ppo_n_minibatches >= 2
        assert sequences % config.actor.ppo_n_minibatches == 0
        assert config.train_dataset.batch_size % config.actor.ppo_n_minibatches == 0


def test_the_math_examples_are_twins_and_the_level_turns_grpo_into_gspo():
    gspo, grpo = (ROOT / "examples/math" / f"gsm8k_{name}.yaml" for name in ("gspo", "grpo"))
    assert not load(grpo).is_set("actor.eps_clip")
    as_gspo = load(grpo, ["+actor.importance_sampling_level=sequence"])
    assert effective_objective(as_gspo)["settings"] == effective_objective(load(gspo))["settings"]
    assert effective_objective(load(grpo))["settings"]["clip_low"] == 0.2
    for path in (gspo, grpo):
        config = load(path).config
        assert (config.rollout.backend, config.actor.backend, config.gconfig.n_samples) == ("auto", "auto", 8)


def test_the_committed_documentation_is_the_generated_one():
    committed = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert committed == document(), "run: python -m gspo.config > docs/config.md"


@pytest.mark.run
def test_the_module_prints_the_documentation():
    result = subprocess.run([sys.executable, "-m", "gspo.cli", "config"], capture_output=True, check=True)
    assert result.stdout.decode() == document()


def test_the_documentation_has_every_key_and_every_key_of_areals():
    text = document()
    for name in known_keys():
        assert f"`{name.rpartition('.')[2]}`" in text
    for name in rules():
        assert f"`{name}`" in text
    assert text.count("\n| auto | ") >= 2  # the rows of π_old without a method


def test_origins_survive_the_file_of_a_run(tmp_path):
    loaded = load(None, ["algorithm=gspo", "seed=3"])
    (tmp_path / "origins.json").write_text(write_origins(loaded.origins))
    assert read_origins(tmp_path) == loaded.origins
    assert read_origins(tmp_path / "older run") == {}
