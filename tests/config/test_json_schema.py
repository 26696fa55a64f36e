"""`gspo config --schema`: every shipped config is valid by it, and what `load` refuses for its type is refused here."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from gspo.cli.main import main
from gspo.cli.schema import json_schema
from gspo.config import load
from gspo.config.schema import known_keys
from gspo.config.yaml_tree import read
from gspo.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    f
    for d in ("examples", "lab/studies")
    for f in (ROOT / d).rglob("*.yaml")
    if "catalog" not in f.parts and f.name != "study.yaml"
)


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path, validator):
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(read(path).data())] == []


def test_a_resolved_config_and_the_defaults_are_valid(validator):
    resolved = load(None, ["algorithm=ppo", "critic={}", "ref={}"]).config
    assert list(validator.iter_errors(resolved.model_dump())) == []
    for key in known_keys().values():
        if key.section is None:
            data = value = {}
            *sections, name = key.name.split(".")
            for section in sections:
                value = value.setdefault(section, {})
            value[name] = key.default
            assert validator.is_valid(data), key.name


@pytest.mark.parametrize(
    "text",
    [
        "sed: 1",
        "seed: x",
        "seed: -1",
        "seed: true",
        "strict: 1",
        "algorithm: gpso",
        "actor: {dtype: bf16}",
        "actor: {eps_clip: 2}",
        "actor: {eps_clip: automatic}",
        "actor: {optimizer: {learning_rate: 1}}",
        "gconfig: {top_p: 0}",
        "gconfig: {stop: {a: 1}}",
        "train_dataset: {mixture: [{wieght: 1}]}",
        "train_dataset: {mixture: [3]}",
        "vllm: [1]",
    ],
)
def test_a_typo_a_wrong_type_and_a_bound_are_refused_by_both(text, validator, tmp_path):
    assert not validator.is_valid(yaml.safe_load(text))
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "seed: ${gconfig.n_samples}",
        "algorithm: ${oc.env:GSPO_ALGORITHM,gspo}",
        "eval_gconfig: ${gconfig}",
        "trial_name: 7",
        "actor:",
        "gconfig: {stop: null}",
        "actor: {eps_clip: auto}",
        "vllm: {max_model_len: 4096, anything: [1, {a: b}]}",
        "reward: {functions: [math, {name: final, marker: '='}]}",
    ],
)
def test_what_load_accepts_is_accepted(text, validator, tmp_path):
    assert list(validator.iter_errors(yaml.safe_load(text))) == []
    (tmp_path / "run.yaml").write_text(text)
    load(tmp_path / "run.yaml")


def test_the_command_writes_the_schema_with_help_bounds_choices_and_defaults(capsys):
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    actor, sampling = schema["$defs"]["Actor"]["properties"], schema["$defs"]["Generation"]["properties"]
    assert sampling["top_p"]["anyOf"][0] == {"exclusiveMinimum": 0.0, "maximum": 1.0, "type": "number"}
    assert sampling["n_samples"]["default"] == 8
    assert actor["dtype"]["anyOf"][0]["enum"][0] == "auto"
    assert actor["target_modules"]["default"] == ["all-linear"]
    assert all(each["description"].endswith(".") for each in actor.values())
    assert "unset" not in json.dumps(list(actor["optimizer"]))
