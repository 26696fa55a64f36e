"""`${…}`: types kept, texts joined, either era's names, and errors that name the place."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gspo.config import load, value_of
from gspo.errors import ConfigError


def loaded(folder, text, overrides=()):
    path = folder / "run.yaml"
    path.write_text(text)
    return load(path, overrides)


def refusal(folder, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, overrides)
    return str(caught.value)


VALUES = {
    "a whole value keeps its type":
        ("seed: ${train_dataset.batch_size}\ntrain_dataset: {batch_size: 64}\n", {"seed": 64}),
    "a chain of references":
        ("critic: {optimizer: '${actor.optimizer}'}\nactor: {optimizer: {lr: '${seed}'}}\nseed: 77\n",
         {"critic.optimizer.lr": 77}),
    "a whole section":
        ("eval_gconfig: '${gconfig}'\ngconfig: {n_samples: 3}\n", {"eval_gconfig.n_samples": 3}),
    "through a section that is a reference":
        ("critic: {optimizer: '${actor.optimizer}'}\nactor: {optimizer: {lr: 5}}\nseed: ${critic.optimizer.lr}\n",
         {"seed": 5}),
    "inside a text":
        ("experiment_name: e\ntrial_name: ${experiment_name}-s${seed}-lr${actor.optimizer.lr}\n"
         "actor: {optimizer: {lr: 1e-6}}\n", {"trial_name": "e-s1-lr1e-6"}),
    "an unset key answers with its default":
        ("critic: {value_eps_clip: '${gconfig.top_p}'}\n", {"critic.value_eps_clip": 1.0}),
    "a backslash keeps the characters":
        ("train_dataset: {system_prompt: 'a \\${seed} costs ${seed}'}\n",
         {"train_dataset.system_prompt": "a ${seed} costs 1"}),
    "a repeated key that is not written answers with what it repeats":
        ("cluster: {fileroot: /data}\ntrain_dataset: {path: '${saver.fileroot}/x.jsonl'}\n",
         {"train_dataset.path": "/data/x.jsonl"}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "values"), VALUES.values(), ids=VALUES)
def test_a_reference_is_replaced_by_what_it_names(tmp_path, text, values):
    config = loaded(tmp_path, text).config
    assert {key: value_of(config, key) for key in values} == values


def test_environment_variables_are_read_as_values_and_may_default(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_TEST_SEED", "12")
    monkeypatch.delenv("GSPO_TEST_NONE", raising=False)
    text = "seed: ${oc.env:GSPO_TEST_SEED}\nactor: {optimizer: {lr: '${oc.env:GSPO_TEST_NONE, 1e-5}'}}\n"
    config = loaded(tmp_path, text + "trial_name: t${oc.env:GSPO_TEST_SEED}\n").config
    assert (config.seed, config.actor.optimizer.lr, config.trial_name) == (12, 1e-5, "t12")
    assert "GSPO_TEST_NONE" in refusal(tmp_path, "seed: ${oc.env:GSPO_TEST_NONE}\n")


def test_what_an_environment_variable_holds_is_not_interpolated_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_TEST_TEXT", "${seed}")
    text = "train_dataset: {system_prompt: '${oc.env:GSPO_TEST_TEXT}', path: '${train_dataset.system_prompt}'}\n"
    config = loaded(tmp_path, text).config
    assert (config.train_dataset.system_prompt, config.train_dataset.path) == ("${seed}", "${seed}")


@pytest.mark.parametrize("name", ["actor.group_size", "gconfig.n_samples"])
@pytest.mark.parametrize("written", ["actor: {group_size: 6}\n", "gconfig: {n_samples: 6}\n"])
def test_either_eras_name_finds_the_value(tmp_path, name, written):
    assert loaded(tmp_path, f"{written}seed: ${{{name}}}\n").config.seed == 6


def test_a_reference_that_fails_is_complained_about_once(tmp_path):
    message = refusal(tmp_path, "seed: ${nowhere}\nthreads: ${seed}\n")
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trial_name: a${b\n", ["run.yaml:1"]),
        ("trial_name: ${}\n", ["run.yaml:1"]),
        ("trial_name: x${actor}\n", ["run.yaml:1"]),
        ("seed: ${a:b}\n", ["run.yaml:1"]),
        ("experiment_name: x\nseed: ${trian_dataset.batch_size}\n", ["run.yaml:2", "trian_dataset.batch_size"]),
        ("actor: {path: '${actor}'}\n", ["refers to itself"]),
        (
            "seed: ${threads}\nthreads: ${total_train_steps}\ntotal_train_steps: ${threads}\n",
            ["refers to itself", "threads → total_train_steps → threads"],
        ),
    ],
)
def test_broken_references_are_errors_that_name_the_place_or_the_cycle(tmp_path, text, words):
    message = refusal(tmp_path, text)
    assert all(word in message for word in words), message


def test_growth_by_reference_is_bounded(tmp_path):
    names = [f"f{n}" for n in range(40)]
    flags = "\n".join(f"  {new}: ${{vllm.{old}}}${{vllm.{old}}}" for old, new in pairwise(names))
    assert "characters" in refusal(tmp_path, f"vllm:\n  f0: abcdefgh\n{flags}\n")
    maps = "\n".join(f"  {new}: {{a: '${{vllm.{old}}}', b: '${{vllm.{old}}}'}}" for old, new in pairwise(names))
    assert "values" in refusal(tmp_path, f"vllm:\n  f0: {{x: 1}}\n{maps}\n")


def test_a_long_chain_of_references_ends_in_an_error(tmp_path):
    chain = "\n".join(f"  f{n}: ${{vllm.f{n + 1}}}" for n in range(2000))
    assert "chain of more than" in refusal(tmp_path, f"vllm:\n{chain}\n  f2000: 1\n")
