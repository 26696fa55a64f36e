"""Names, types and bounds: the key, where it was set, the nearest name, the remedy; all of a file at once."""

from __future__ import annotations

import pytest

from gspo.config import dump, load
from gspo.config.schema import known_keys
from gspo.errors import ConfigError


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("actor.esp_clip", "actor.eps_clip"),
        ("actor.epsclip", "actor.eps_clip"),
        ("actor.importance_sampling_lvl", "actor.importance_sampling_level"),
        ("gconfig.n_sample", "gconfig.n_samples"),
        ("n_samples", "gconfig.n_samples"),
        ("actor.lr", "actor.optimizer.lr"),
        ("train_datset", "train_dataset"),
        ("experiment_nam", "experiment_name"),
        ("Algorithm", "algorithm"),
        ("actor.rejection_sampling.uper", "actor.rejection_sampling.upper"),
    ],
)
def test_an_unknown_key_is_met_with_the_nearest_known_one(typo, near):
    message = refusal(f"{typo}=1")
    assert f"{typo} is not a known key; the nearest is {near}:" in message
    assert message.startswith("command line: ")


def test_a_key_like_no_other_is_told_where_the_list_is():
    assert "docs/config.md" in refusal("zzzzqqqq=1")
    assert "zzzzqqqq" in refusal("~zzzzqqqq")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=true", ["seed must be an integer", "boolean true"]),
        ("seed=1.5", ["seed must be an integer", "1.5"]),
        ("seed=1e3", ["seed must be an integer", "write 1000"]),
        ('seed="1"', ["seed must be an integer", "without quotes"]),
        ("seed=[1]", ["seed must be an integer", "a list"]),
        ("seed=null", ["seed must be an integer", "null"]),
        ("seed=-1", ["seed must be at least 0", "-1"]),
        ("seed=99999999999999999999", ["seed", "64 bits"]),
        ("strict=1", ["strict must be true or false", "integer 1"]),
        ("strict=maybe", ["strict must be true or false"]),
        ("gconfig.temperature=.nan", ["gconfig.temperature must be a finite number"]),
        ("gconfig.temperature=.inf", ["gconfig.temperature must be a finite number"]),
        ("gconfig.temperature=1e999", ["gconfig.temperature must be a finite number"]),
        ("gconfig.temperature=nan", ["gconfig.temperature must be a number"]),
        ("gconfig.top_p=0", ["gconfig.top_p must be above 0 and at most 1"]),
        ("gconfig.top_p=1.01", ["gconfig.top_p must be above 0 and at most 1"]),
        ("actor.c_clip=1", ["actor.c_clip must be above 1"]),
        ("actor.eps_clip=automatic", ["actor.eps_clip must be a number or auto or null", "did you mean auto"]),
        ("actor.eps_clip=1.5", ["actor.eps_clip", "at most 1"]),
        ("actor.dtype=bf16", ["actor.dtype must be one of auto, float32", "did you mean bfloat16"]),
        ("trial_name=yes", ["trial_name must be a string", "quotes"]),
        ("trial_name=../up", ["trial_name", "folder name"]),
        ("experiment_name=..", ["experiment_name", "folder name"]),
        ("actor=3", ["actor must be a section", "integer 3"]),
        ("reward.weights=[1, x]", ["reward.weights must be a number", "'x'"]),
        ("reward.functions=numeric", ["reward.functions must be a list of strings"]),
        ("vllm=[1]", ["vllm must be a mapping"]),
        ("vllm.x=.nan", ["vllm", "finite"]),
        ("algorithm=gpso", ["algorithm must be one of gspo", "did you mean gspo"]),
        ("rollout.backend=vlm:d2", ["rollout.backend", "unknown backend", "vllm"]),
        ("rollout.backend=vllm:d0", ["rollout.backend", "at least 1"]),
        ("actor.backend=fsdp:d2t2", ["actor.backend", "fsdp:d4"]),
        ("actor.backend=megatron:d4", ["actor.backend", "megatron", "fsdp:dN"]),
        ("actor.backend=archon:d4", ["actor.backend", "archon", "fsdp:dN"]),
    ],
)
def test_a_wrong_value_is_met_with_what_is_wanted_and_what_was_got(override, words):
    message = refusal(override)
    assert message.startswith("command line: ")
    for word in words:
        assert word in message


def test_bounds_are_inclusive_or_exclusive_as_the_schema_says():
    assert load(None, ["gconfig.top_p=1.0", "gconfig.temperature=0", "actor.c_clip=1.0001"]).config.gconfig.top_p == 1.0


def test_all_problems_of_a_file_are_reported_together_in_order(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sed: 1\nactor:\n  eps_clip: x\n  path: ${nope}\ngconfig: {top_p: 3}\nactor.lr: 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["threads=-1"])
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{n}" for n in (1, 3, 4, 5, 6)] + ["command line"]


def test_a_dotted_key_in_a_file_is_explained(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor.path: x\n")
    with pytest.raises(ConfigError, match="write it nested"):
        load(path)


def test_null_empties_lists_mappings_and_sections():
    config = load(None, ["gconfig.stop=null", "vllm=null", "actor=null", "gconfig=null"]).config
    assert config == load(None).config
    config.gconfig.stop.append("x")
    assert load(None, ["gconfig.stop=null"]).config.gconfig.stop == []


def test_every_key_has_a_sentence_and_bounds_that_its_default_meets():
    for key in known_keys().values():
        assert key.doc.endswith("."), key.name
        value = key.default
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert key.low is None or value >= key.low, key.name
            assert key.high is None or value <= key.high, key.name
            assert key.above is None or value > key.above, key.name


# Lists of sections and of mappings


def test_a_list_of_sections_is_checked_key_by_key():
    loaded = load(None, ["train_dataset.mixture=[{path: a.jsonl, weight: 2}, {path: b.jsonl}]"])
    assert [(s.path, s.weight, s.size) for s in loaded.config.train_dataset.mixture] == [
        ("a.jsonl", 2.0, None),
        ("b.jsonl", 1.0, None),
    ]
    with pytest.raises(ConfigError) as caught:
        load(None, ["train_dataset.mixture=[{path: a, wieght: 2}, 3, {path: b, weight: -1, size: many}]"])
    said = str(caught.value)
    assert "train_dataset.mixture[0].wieght is not a known key; the nearest is train_dataset.mixture[0].weight" in said
    assert "train_dataset.mixture[1] must be a section, got the integer 3" in said
    assert "train_dataset.mixture[2].weight must be above 0, got -1" in said
    assert "train_dataset.mixture[2].size must be an integer or null" in said


def test_a_list_may_mix_texts_and_mappings():
    functions = load(None, ["reward.functions=[math, {name: final, marker: '='}]"]).config.reward.functions
    assert functions == ["math", {"name": "final", "marker": "="}]
    with pytest.raises(ConfigError, match=r"reward\.functions must be a string, got a list"):
        load(None, ["reward.functions=[[math]]"])


def test_lists_of_sections_and_mappings_survive_dump_and_load(tmp_path):
    overrides = [
        "train_dataset.mixture=[{path: 'a:b', name: x, chat_template: false, options: {n: 2}, reward: [{name: math}]}]",
        "reward.functions=[math, {name: regex, pattern: 'a: [0-9]+', weight: 0.5}]",
        "train_dataset.chat_template='{{ messages }}'",
    ]
    before = load(None, overrides)
    (tmp_path / "config.yaml").write_text(dump(before))
    assert load(tmp_path / "config.yaml").config == before.config
