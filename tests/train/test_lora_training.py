"""Training an adapter: a frozen base, checkpoints of the adapter alone, and it learns."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_runs import RANKED, digests, logits, make_trainer, metrics, signals, train
from transformers import AutoModelForCausalLM

from gspo.cli.main import main
from gspo.config import load
from gspo.errors import CheckpointError, ConfigError
from gspo.learner import PolicyModule, weight_names
from gspo.models import adapter_off, embedded, load_model
from gspo.train.build.learner import load_policy
from gspo.train.commands import export

pytestmark = pytest.mark.run

LORA = ("actor.use_lora=true", "actor.lora_rank=8", "actor.lora_alpha=16", "actor.optimizer.lr=2e-3")
THREE = ("total_train_steps=3", "saver.freq_steps=1")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    trainer, path = train(tmp_path_factory.mktemp("lora"), *LORA, *THREE)
    return trainer, path, load(path / "config.yaml").config


def test_the_base_is_untouched_bit_for_bit_and_the_optimizer_holds_the_adapter_alone(run):
    trainer, _, _ = run
    base = load_model("embedded:tiny").state_dict()
    policy = trainer.parts.learner.policy
    frozen = {n.replace(".base_layer", ""): p for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert frozen.keys() <= base.keys()
    assert all(torch.equal(p, base[n]) for n, p in frozen.items())
    held = {id(p) for group in trainer.parts.learner.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in policy.named_parameters() if ".lora_" in n}
    assert any(bool(p.any()) for n, p in policy.named_parameters() if ".lora_B." in n)  # it was trained
    with adapter_off(policy.model):
        assert torch.equal(logits(policy.model), logits(load_model("embedded:tiny")))


def test_a_checkpoint_holds_the_adapter_its_moments_and_the_digest_of_the_base(run):
    _, path, _ = run
    folder = path / "checkpoints" / "step_000003"
    assert all(".lora_" in n for n in load_file(folder / "model.safetensors"))
    assert all(".lora_" in n for n in load_file(folder / "optimizer.safetensors"))
    base = json.loads((folder / "manifest.json").read_text())["base"]
    assert base["dtype"] == "float32"
    assert len(base["sha256"]) == 64


QUANTIZED = ("actor.lora_base_bits=8", "actor.optimizer.type=adamw8bit")


@pytest.mark.full
@pytest.mark.parametrize("more", [(), QUANTIZED])
def test_a_run_stopped_by_a_signal_and_resumed_is_the_uninterrupted_one(run, tmp_path, more):
    through = train(tmp_path / "through", *LORA, *THREE, *more)[1] if more else run[1]
    workflow = signals(1)
    trainer = make_trainer(tmp_path, *LORA, *THREE, *more, workflow=workflow)
    summary = trainer.train(report=False)
    assert workflow.sent
    assert (summary.finished, summary.steps) == (False, 2)
    again = trainer.train(report=False)
    assert again.finished
    assert digests(again.path) == digests(through)


def test_another_base_under_the_same_name_is_refused_when_going_on_and_when_evaluating(tmp_path):
    base = tmp_path / "base"
    model, tokenizer = embedded.build("embedded:tiny")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    how = (*LORA, f"actor.path={base}", "total_train_steps=1", "evaluator.at_start=false")
    _, path = train(tmp_path / "runs", *how)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 0.25
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not the base model of this run.*actor\.path"):
        train(tmp_path / "runs", *how, "total_train_steps=2")
    with pytest.raises(CheckpointError, match="not the base model of this run"):
        load_policy(load(path / "config.yaml").config, path, 1)


def test_other_adapter_settings_in_a_used_directory_are_refused(run):
    root = run[1].parents[1]
    with pytest.raises(ConfigError, match=r"actor\.lora_rank: 8 → 4"):
        train(root, *LORA, *THREE, "actor.lora_rank=4", "total_train_steps=4")


def test_exports_merged_and_as_an_adapter_have_the_policys_logits(run, tmp_path):
    trainer, path, config = run
    trained = logits(trainer.parts.learner.policy.model)
    merged = export(config, path, 3, tmp_path / "merged", merge=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(trainer.parts.learner.policy.model)
    assert (logits(loaded) - trained).abs().max() <= 1e-5
    assert (logits(load_model(str(merged))) - trained).abs().max() <= 1e-5  # our own loader is stricter
    adapter = export(config, path, 3, tmp_path / "adapter")
    assert not (adapter / "model.safetensors").exists()
    by_peft = PeftModel.from_pretrained(load_model("embedded:tiny"), str(adapter))
    assert (logits(by_peft) - trained).abs().max() <= 1e-5
    by_transformers = AutoModelForCausalLM.from_pretrained(adapter)  # finds the base by the adapter's config
    assert (logits(by_transformers) - trained).abs().max() <= 1e-5
    assert (trained - logits(load_model("embedded:tiny"))).abs().max() > 1e-3


def test_weights_for_a_sampler_are_those_of_a_plain_model(run):
    policy = run[0].parts.learner.policy
    plain = load_model("embedded:tiny")
    names = dict(weight_names(policy))
    assert names.keys() == dict(weight_names(PolicyModule(plain))).keys()
    plain.load_state_dict(names, strict=False)
    assert (logits(plain) - logits(policy.model)).abs().max() <= 1e-5


def test_the_verbs_evaluate_and_export_a_lora_run(run, tmp_path, capsys):
    path = str(run[1])
    threads = torch.get_num_threads()
    assert main(["eval", path, "--step", "last", "--problems", "8", "--json"]) == 0
    torch.set_num_threads(threads)
    measured = json.loads(capsys.readouterr().out)
    assert measured["num_problems"] == 8
    assert main(["export", path, "--step", "last", "--merge", "--to", str(tmp_path / "m")]) == 0
    assert (tmp_path / "m" / "model.safetensors").is_file()
    assert main(["export", path, "--step", "last", "--to", str(tmp_path / "a")]) == 0
    assert "by this path, which another machine does not have. --merge" in capsys.readouterr().out
    assert (tmp_path / "a" / "adapter_config.json").is_file()


def test_merging_a_run_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave out --merge"):
        export(load(None, ["actor.path=embedded:tiny"]).config, tmp_path, 1, tmp_path / "out", merge=True)


@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_quantised_base_sampler_trainer_and_export_are_one_policy(tiny, tmp_path, bits):
    if bits == 4:
        pytest.importorskip("bitsandbytes", reason="weights of 4 bits need bitsandbytes")
    trainer, path = train(tmp_path, *LORA, f"actor.lora_base_bits={bits}", "total_train_steps=2", RANKED)
    noise = [row["noise/log_s_p95_abs"] for row in metrics(path)[1:]]  # the first row is the evaluation before it
    assert max(noise) < 1e-5, noise  # both compute with the same rounded weights
    config = load(path / "config.yaml").config
    trained = logits(trainer.parts.learner.policy.model)
    assert (logits(load_policy(config, path, 2)[0].model) - trained).abs().max() == 0
    merged = load_model(str(export(config, path, 2, tmp_path / "merged", merge=True)))
    assert (logits(merged) - trained).abs().max() <= 1e-5
    assert (logits(load_model("embedded:tiny")) - trained).abs().max() > 1e-3
    with pytest.raises(ConfigError, match=rf"actor\.lora_base_bits: {bits} → {12 - bits}"):
        train(tmp_path, *LORA, f"actor.lora_base_bits={12 - bits}", "total_train_steps=3", RANKED)
