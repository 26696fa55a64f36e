"""The command line: set, add, reset; and what was set is told apart from what was not."""

from __future__ import annotations

import json

import pytest

from gspo.config import load, value_of
from gspo.config.schema import known_keys
from gspo.errors import ConfigError

CASES = {
    **{f"{mark or 'nothing'} sets keys of the file and others":
       ("seed: 3\n", [f"{mark}seed=4", f"{mark}actor.optimizer.lr=1e-5"], {"seed": 4, "actor.optimizer.lr": 1e-5})
       for mark in ("", "+", "++")},
    "~ forgets what the file says under any name":
        ("seed: 9\nactor: {group_size: 4, behave_imp_weight_cap: 3.0, use_decoupled_loss: true}\n",
         ["~seed", "~gconfig.n_samples", "~actor.rejection_sampling"],
         {"seed": 1, "gconfig.n_samples": 8, "actor.rejection_sampling": None}),
    "overrides apply in order": ("", ["seed=4", "~seed", "seed=6"], {"seed": 6}),
    "a key brings its null section to life": ("ref: null\n", ["ref.path=other"], {"ref.path": "other"}),
    "a key inside a referred section is set alone":
        ("gconfig: {top_p: 0.8, n_samples: 6}\neval_gconfig: ${gconfig}\n", ["eval_gconfig.n_samples=2"],
         {"eval_gconfig.top_p": 0.8, "eval_gconfig.n_samples": 2, "gconfig.n_samples": 6}),
    "values may refer to keys, be empty and hold equals signs":
        ("", ["seed=${gconfig.n_samples}", "train_dataset.system_prompt=a=b", "tokenizer_path="],
         {"seed": 8, "train_dataset.system_prompt": "a=b", "tokenizer_path": ""}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "values"), CASES.values(), ids=CASES)
def test_overrides_change_what_the_file_says(tmp_path, text, overrides, values):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = load(path, overrides).config
    assert {key: value_of(config, key) for key in values} == values


def test_a_key_that_was_set_and_reset_is_not_set():
    assert not load(None, ["seed=4", "~seed"]).is_set("seed")


def test_every_key_of_the_schema_can_be_reset_and_known_ones_never_are_unknown():
    for name in known_keys():
        assert load(None, [f"~{name}"]).config == load(None).config


def test_every_plain_key_accepts_its_own_default():
    overrides = [
        f"+{k.name}={json.dumps(k.default)}" for k in known_keys().values() if k.section is None and not k.free
    ]
    nullable = {k.name for k in known_keys().values() if k.section is not None and k.nullable}
    outside = [o for o in overrides if not any(o.startswith(f"+{name}.") for name in nullable)]
    # The switches follow the algorithm, whatever was written; everything else is what was written.
    assert load(None, outside).config == load(None).config


def test_lists_mappings_and_nulls_are_values(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("ref: {path: x}\nvllm: {a: 1, b: {c: 2}}\nactor: {optimizer: {lr: 1e-5, eps: 1e-7}}\n")
    overrides = ["reward.functions=[numeric, format]", "ref=null", "vllm={b: {d: 3}}", "vllm.e=true"]
    config = load(path, [*overrides, "actor.optimizer={lr: 2e-5}"]).config
    assert config.reward.functions == ["numeric", "format"]
    assert config.ref is None
    assert config.vllm == {"a": 1, "b": {"c": 2, "d": 3}, "e": True}
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps) == (2e-5, 1e-7)


def test_origins_tell_who_decided(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: gspo\nseed: 1\nactor:\n  use_lora: false\n")
    loaded = load(path, ["threads=2"])
    assert str(loaded.origin("seed")) == f"{path}:2"
    assert loaded.is_set("seed")  # although 1 is its default
    assert str(loaded.origin("threads")) == "command line"
    assert str(loaded.origin("actor.eps_clip")) == "algorithm gspo"
    assert str(loaded.origin("gconfig.top_p")) == "default"
    assert not loaded.is_set("gconfig.top_p")
    assert not loaded.is_set("gconfig")
    assert loaded.is_set("actor")
    assert not loaded.is_set("no.such.key")


def test_a_null_that_leaves_the_choice_to_us_is_not_a_setting():
    loaded = load(None, ["actor.eps_clip=null", "actor.importance_sampling_level=sequence"])
    assert loaded.config.actor.eps_clip == 3e-4
    assert not loaded.is_set("actor.eps_clip")


def test_an_optional_section_written_empty_is_set(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("ref: {}\n")
    assert load(path).is_set("ref")
    assert not load(None).is_set("ref")


@pytest.mark.parametrize(
    "text", ["seed", "=3", "~seed=3", "+~seed", "a b=3", "seed==", "--seed=3", "", "~", "seed..x=1"]
)
def test_what_is_no_override_is_refused_with_the_forms(text):
    with pytest.raises(ConfigError) as caught:
        load(None, [text])
    assert "command line" in str(caught.value)


def test_all_bad_overrides_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load(None, ["seed", "sed=1", "threads=[1", "~nope"])
    assert len(str(caught.value).splitlines()) == 4


def test_a_broken_value_on_the_command_line_is_a_config_error():
    for text in ("seed=[1", "seed={a: 1", "seed=!!python/name:os.system", "seed=&a [*a]"):
        with pytest.raises(ConfigError, match="command line"):
            load(None, [text])


def test_an_entry_of_a_list_names_the_list(tmp_path):
    for word in ("reward.functions.0.url=x", "reward.functions[0]=x"):
        with pytest.raises(ConfigError, match=r"set the whole list, 'reward.functions=\[…\]'"):
            load(None, [word])


def test_an_algorithm_of_another_level_on_the_command_line_drops_the_eps_of_the_file():
    result = load("examples/quickstart.yaml", ["algorithm=grpo"])
    assert (result.config.actor.eps_clip, result.config.actor.eps_clip_higher) == (0.2, 0.2)
    assert str(result.origin("actor.eps_clip")) == "algorithm grpo"
    dropped = [line for line in result.messages if "is dropped" in line]
    assert [line.split(": ")[1].split(" is")[0] for line in dropped] == [
        "actor.eps_clip 0.002", "actor.eps_clip_higher 0.0025",
    ]  # fmt: skip
    assert "a range of sequence ratios, and algorithm=grpo has token ratios" in dropped[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=gspo_token"],  # the same level
        ["algorithm=luspo"],
        ["algorithm=grpo", "actor.importance_sampling_level=sequence"],
        ["actor.importance_sampling_level=sequence"],
    ],
)
def test_an_eps_of_the_same_level_stays(overrides):
    assert load("examples/quickstart.yaml", overrides).config.actor.eps_clip == 2e-3


def test_an_eps_on_the_command_line_stays_with_any_algorithm():
    result = load("examples/quickstart.yaml", ["algorithm=grpo", "actor.eps_clip=1e-3"])
    assert (result.config.actor.eps_clip, result.config.actor.eps_clip_higher) == (1e-3, 1e-3)
