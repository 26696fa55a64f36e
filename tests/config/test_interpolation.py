"""`${…}`: types kept, texts joined, either era's names, and errors that name the place."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gspo.config import load
from gspo.errors import ConfigError


def loaded(folder, text, overrides=()):
    path = folder / "run.yaml"
    path.write_text(text)
    return load(path, overrides)


def refusal(folder, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, overrides)
    return str(caught.value)


def test_a_whole_value_keeps_its_type(tmp_path):
    config = loaded(tmp_path, "seed: ${train_dataset.batch_size}\ntrain_dataset: {batch_size: 64}\n").config
    assert config.seed == 64


def test_references_may_be_chained_and_name_whole_sections(tmp_path):
    text = "critic: {optimizer: '${actor.optimizer}'}\nactor: {optimizer: {lr: '${seed}'}}\nseed: 77\n"
    text += "eval_gconfig: '${gconfig}'\ngconfig: {n_samples: 3}\n"
    config = loaded(tmp_path, text).config
    assert config.critic is not None
    assert config.eval_gconfig is not None
    assert (config.critic.optimizer.lr, config.eval_gconfig.n_samples) == (77, 3)


def test_a_reference_may_look_through_a_section_that_is_a_reference(tmp_path):
    text = "critic: {optimizer: '${actor.optimizer}'}\nactor: {optimizer: {lr: 5}}\nseed: ${critic.optimizer.lr}\n"
    assert loaded(tmp_path, text).config.seed == 5


def test_references_inside_a_text_become_part_of_it(tmp_path):
    text = "experiment_name: e\ntrial_name: ${experiment_name}-s${seed}-lr${actor.optimizer.lr}\n"
    assert loaded(tmp_path, text + "actor: {optimizer: {lr: 1e-6}}\n").config.trial_name == "e-s1-lr1e-6"


def test_an_unset_key_answers_with_its_default(tmp_path):
    assert loaded(tmp_path, "critic: {value_eps_clip: '${gconfig.top_p}'}\n").config.critic.value_eps_clip == 1.0


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


def test_a_backslash_keeps_the_characters(tmp_path):
    text = "train_dataset: {system_prompt: 'a \\${seed} costs ${seed}'}\n"
    assert loaded(tmp_path, text).config.train_dataset.system_prompt == "a ${seed} costs 1"


@pytest.mark.parametrize("name", ["actor.group_size", "gconfig.n_samples"])
@pytest.mark.parametrize("written", ["actor: {group_size: 6}\n", "gconfig: {n_samples: 6}\n"])
def test_either_eras_name_finds_the_value(tmp_path, name, written):
    assert loaded(tmp_path, f"{written}seed: ${{{name}}}\n").config.seed == 6


def test_a_repeated_key_that_is_not_written_answers_with_what_it_repeats(tmp_path):
    text = "cluster: {fileroot: /data}\ntrain_dataset: {path: '${saver.fileroot}/x.jsonl'}\n"
    assert loaded(tmp_path, text).config.train_dataset.path == "/data/x.jsonl"


def test_a_cycle_is_an_error_that_shows_it(tmp_path):
    message = refusal(tmp_path, "seed: ${threads}\nthreads: ${total_train_steps}\ntotal_train_steps: ${threads}\n")
    assert "refers to itself" in message
    assert "threads → total_train_steps → threads" in message


def test_a_section_that_holds_a_reference_to_itself_is_a_cycle(tmp_path):
    assert "refers to itself" in refusal(tmp_path, "actor: {path: '${actor}'}\n")


def test_an_unknown_reference_names_its_place(tmp_path):
    message = refusal(tmp_path, "experiment_name: x\nseed: ${trian_dataset.batch_size}\n")
    assert "run.yaml:2" in message
    assert "trian_dataset.batch_size" in message


def test_a_reference_that_fails_is_complained_about_once(tmp_path):
    message = refusal(tmp_path, "seed: ${nowhere}\nthreads: ${seed}\n")
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    "text", ["trial_name: a${b\n", "trial_name: ${}\n", "trial_name: x${actor}\n", "seed: ${a:b}\n"]
)
def test_broken_references_are_errors_with_a_place(tmp_path, text):
    assert "run.yaml:1" in refusal(tmp_path, text)


def test_growth_by_reference_is_bounded(tmp_path):
    names = [f"f{n}" for n in range(40)]
    flags = "\n".join(f"  {new}: ${{vllm.{old}}}${{vllm.{old}}}" for old, new in pairwise(names))
    assert "characters" in refusal(tmp_path, f"vllm:\n  f0: abcdefgh\n{flags}\n")
    maps = "\n".join(f"  {new}: {{a: '${{vllm.{old}}}', b: '${{vllm.{old}}}'}}" for old, new in pairwise(names))
    assert "values" in refusal(tmp_path, f"vllm:\n  f0: {{x: 1}}\n{maps}\n")


def test_a_long_chain_of_references_ends_in_an_error(tmp_path):
    chain = "\n".join(f"  f{n}: ${{vllm.f{n + 1}}}" for n in range(2000))
    assert "chain of more than" in refusal(tmp_path, f"vllm:\n{chain}\n  f2000: 1\n")
