"""An exported folder is the policy: transformers computes the same logits and tokens from it."""

import json
import stat

import model_zoo
import pytest
import torch
import training_runs
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.config import load
from gspo.errors import CheckpointError, ConfigError
from gspo.learner import PolicyModule
from gspo.models import embedded, load_model
from gspo.runs.export import write_model
from gspo.train import export, load_policy

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    trainer, path = training_runs.train(tmp_path_factory.mktemp("runs"), "total_train_steps=2", "saver.freq_steps=1")
    return trainer, path, load(path / "config.yaml").config


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def test_transformers_computes_the_policys_logits_from_an_export(run, tmp_path):
    trainer, path, config = run
    folder = export(config, path, 2, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode("184+768=")
    assert tokens == trainer.parts.learner.tokenizer.encode("184+768=")
    assert tokenizer.decode(tokens) == "184+768="
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    trained = logits(trainer.parts.learner.policy.model, tokens)
    assert (logits(loaded, tokens) - trained).abs().max() <= 1e-5
    before = logits(load_model("embedded:tiny"), tokens)
    assert (trained - before).abs().max() > 1e-3  # the test sees that training moved the weights
    assert (logits(load_model(str(folder)), tokens) - trained).abs().max() <= 1e-5  # our own loader is stricter
    assert loaded.generation_config.eos_token_id == trainer.parts.learner.tokenizer.eos_token_id
    assert json.loads((folder / "gspo.json").read_text())["step"] == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in folder.iterdir())


def test_a_policy_is_restored_as_it_was_at_each_step(run):
    trainer, path, config = run
    tokens = trainer.parts.learner.tokenizer.encode("12+34=")
    at = [logits(load_policy(config, path, step)[0].model, tokens) for step in (0, 1, 2)]
    assert torch.equal(at[0], logits(load_model("embedded:tiny"), tokens))
    assert torch.equal(at[2], logits(trainer.parts.learner.policy.model, tokens))
    assert not torch.equal(at[1], at[0])
    assert not torch.equal(at[1], at[2])


def test_an_export_replaces_nothing(run, tmp_path):
    _, path, config = run
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--to"):
        export(config, path, 2, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert (export(config, path, 2, tmp_path / "empty") / "config.json").is_file()


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    import shutil

    _, path, config = run
    copy = tmp_path / "run"
    shutil.copytree(path, copy)
    weights = copy / "checkpoints" / "step_000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 4
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        export(config, copy, 2, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]  # nothing is left aside


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe", "gemma2", "mixtral"])
def test_every_family_comes_back_from_several_files_with_equal_logits(name, tmp_path):
    model = model_zoo.build(name, torch.float32)
    folder = write_model(PolicyModule(model), embedded.embedded_tokenizer(), tmp_path / name, {}, shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = [3, 14, 15, 9, 26, 5]
    assert (logits(loaded, tokens) - logits(model, tokens)).abs().max() <= 1e-5
    assert loaded.dtype == torch.float32
