"""An adapter changes what it should and nothing else; merged, saved and switched off it is what it says."""

import json
import os
import subprocess
import sys

import model_zoo
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from gspo.errors import ConfigError, DataError
from gspo.models import lora
from gspo.models.loading import load_model

EXPERTS = ("qwen3_moe", "mixtral", "olmoe")
HOW = {"rank": 4, "alpha": 8, "target_modules": ["all-linear"], "seed": 3}


def with_adapter(model, **how):
    """An adapter that does something: B is not 0."""
    lora.add_adapter(model, **(HOW | how))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def adapted(name="qwen3", dtype=torch.float32, **how):
    return with_adapter(model_zoo.build(name, dtype), **how)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 12)[None]).logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_a_new_adapter_leaves_the_model_as_it_was_and_trains_nothing_else(name):
    plain, model = model_zoo.build(name, torch.float32), model_zoo.build(name, torch.float32)
    lora.add_adapter(model, **HOW)
    assert torch.equal(logits(model), logits(plain))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_A." in n or ".lora_B." in n for n in trained)
    assert type(model) is type(plain)
    assert type(model.get_output_embeddings()) is torch.nn.Linear  # the head is left alone


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma2", "qwen3_moe"])
def test_merged_and_unmerged_logits_agree(name):
    model = adapted(name, torch.float64)
    plain = model_zoo.build(name)
    gap = (logits(plain) - logits(model)).abs().max()
    before = {n: p.clone() for n, p in model.named_parameters()}
    plain.load_state_dict(lora.merged_state(model))
    assert gap > 1e-2  # the adapter does something
    assert (logits(plain) - logits(model)).abs().max() <= 1e-5
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("targets", [["experts"], ["all-linear", "experts"]])
@pytest.mark.parametrize("name", EXPERTS)
def test_an_adapter_on_experts_starts_as_the_model_and_is_the_same_merged_saved_and_switched_off(
    name, targets, tmp_path
):
    new, plain = model_zoo.build(name), model_zoo.build(name)
    lora.add_adapter(new, **(HOW | {"target_modules": targets}))
    assert torch.equal(logits(new), logits(plain))
    model = adapted(name, torch.float64, target_modules=targets)
    trained = {n.split(".lora_")[0].partition(".base_layer")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if n.endswith(".experts")} == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert (len(trained) > 2) == ("all-linear" in targets)
    want = logits(model)
    assert (logits(plain) - want).abs().max() > 1e-2  # the adapter does something
    with lora.adapter_off(model):
        assert torch.equal(logits(model), logits(plain))
    lora.save_adapter(model, tmp_path, "some/base")
    by_peft = PeftModel.from_pretrained(model_zoo.build(name), str(tmp_path))
    assert (logits(by_peft) - want).abs().max() <= 1e-12
    plain.load_state_dict(lora.merged_state(model))  # strict: the names of a plain model, every one of them
    assert (logits(plain) - want).abs().max() <= 1e-12


def test_every_expert_has_a_low_rank_change_of_its_own():
    model = adapted("qwen3_moe", torch.float64, target_modules=["experts"], rank=2)
    before, after = model_zoo.build("qwen3_moe").state_dict(), lora.merged_state(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changes = after[name] - before[name]
    assert [int(torch.linalg.matrix_rank(change)) for change in changes] == [2] * len(changes)
    assert torch.linalg.matrix_rank(changes.flatten(0, 1)) > 2  # they share no A


def test_peft_reads_a_saved_adapter_and_computes_the_same(tmp_path):
    model = adapted()
    lora.save_adapter(model, tmp_path, "some/base")
    loaded = PeftModel.from_pretrained(model_zoo.build("qwen3", torch.float32), str(tmp_path))
    assert (logits(loaded) - logits(model)).abs().max() <= 1e-6
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "some/base"
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8, 0.0)


def test_the_reference_is_the_model_with_its_adapter_off_for_the_time_of_the_block():
    model, plain = adapted(), model_zoo.build("qwen3", torch.float32)
    before = logits(model)
    with lora.adapter_off(model):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), before)
    with pytest.raises(ZeroDivisionError), lora.adapter_off(model):
        _ = 1 / 0
    assert torch.equal(logits(model), before)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())
    with pytest.raises(ConfigError, match=r"use_lora.*ref\.path"), lora.adapter_off(plain):
        pass


def test_the_seed_decides_the_adapter_and_leaves_other_randomness_alone():
    a, b, c = (model_zoo.build("qwen3") for _ in range(3))
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    for model, seed in ((a, 1), (b, 1), (c, 2)):
        lora.add_adapter(model, **(HOW | {"seed": seed}))
    assert torch.equal(torch.random.get_rng_state(), before)
    ours = [[p for p in m.parameters() if p.requires_grad] for m in (a, b, c)]
    assert all(torch.equal(x, y) for x, y in zip(ours[0], ours[1], strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(ours[0], ours[2], strict=True))


def test_the_adapter_of_a_half_precision_model_is_float32():
    model = model_zoo.build("qwen3", torch.bfloat16)
    lora.add_adapter(model, **HOW)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16
    assert lora.merged_state(model)["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_named_modules_get_an_adapter_and_no_others():
    model = adapted(target_modules=["q_proj", "v_proj"])
    names = {n.split(".lora_")[0].rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_porj"], "no linear layer 'q_porj'; it has down_proj, gate_proj, k_proj"),
        (["lm_head"], "'lm_head' is the language-model head"),
        (["embed_tokens"], "no linear layer 'embed_tokens'"),
        (["q_proj", "all-linear"], "no linear layer 'all-linear'"),
        (["all-linear", "experts"], "has no experts in packed tensors; remove 'experts'"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_by_the_key(targets, message):
    with pytest.raises(ConfigError, match=message) as caught:
        lora.add_adapter(model_zoo.build("llama"), **(HOW | {"target_modules": targets}))
    assert "actor.target_modules" in str(caught.value)


def test_the_digest_is_of_the_frozen_weights_alone():
    model = adapted()
    before = lora.base_digest(model)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1.0)
    assert lora.base_digest(model) == before
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).view(-1)[0].add_(1e-6)
    assert lora.base_digest(model) != before


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[lora\]'"):
        lora.add_adapter(model_zoo.build("llama"), **HOW)


def stored(tmp_path, name="qwen3", **how):
    """A saved adapter, its base model in a folder, and the logits of both together."""
    model = adapted(name, **how)
    model_zoo.build(name, torch.float32).save_pretrained(tmp_path / "base")
    lora.save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    return tmp_path / "adapter", logits(model)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_a_folder_with_an_adapter_is_its_base_model_with_the_adapter_merged(tmp_path, name):
    folder, expected = stored(tmp_path, name)
    model = load_model(str(folder), key="teacher.path", adapters=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert (logits(model) - logits(load_model(str(tmp_path / "base")))).abs().max() > 1e-2
    with pytest.raises(DataError, match=r"actor\.path must be a whole model"):
        load_model(str(folder))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_an_adapter_on_layers_that_store_their_weight_transposed_is_merged_too(tmp_path):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    base.save_pretrained(tmp_path / "base")
    with_adapter(base)
    lora.save_adapter(base, tmp_path / "adapter", str(tmp_path / "base"))
    merged = load_model(str(tmp_path / "adapter"), key="teacher.path", adapters=True)
    torch.testing.assert_close(logits(merged), logits(base), rtol=1e-4, atol=1e-4)


def test_rank_stabilized_adapters_are_scaled_by_the_root_of_the_rank(tmp_path):
    folder, _ = stored(tmp_path)
    edit(folder, use_rslora=True)
    base = model_zoo.build("qwen3", torch.float32)
    expected = PeftModel.from_pretrained(base, str(folder))
    got = load_model(str(folder), key="teacher.path", adapters=True)
    torch.testing.assert_close(logits(got), logits(expected), rtol=1e-4, atol=1e-4)


def edit(folder, **settings):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "LoRA adapter only"),
        ({"use_dora": True}, "use_dora is True, which is not plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
        ({"base_model_name_or_path": "/nowhere"}, r"teacher\.path.*'/nowhere'"),
    ],
)
def test_an_adapter_that_adds_something_else_is_refused(tmp_path, settings, words):
    folder, _ = stored(tmp_path)
    edit(folder, **settings)
    with pytest.raises(DataError, match=words):
        load_model(str(folder), key="teacher.path", adapters=True)


def test_an_adapter_of_another_model_and_one_without_weights_are_refused(tmp_path):
    folder, _ = stored(tmp_path)
    model_zoo.build("llama", torch.float32).save_pretrained(tmp_path / "other")
    weights = load_file(folder / "adapter_model.safetensors")
    for wrong in (
        {name: tensor[:, :-1].clone() if "lora_A" in name else tensor for name, tensor in weights.items()},
        {name: tensor for name, tensor in weights.items() if "lora_B" not in name},
        {name.replace("layers.0", "layers.9"): tensor for name, tensor in weights.items()},
        {name: tensor * torch.nan for name, tensor in weights.items()},
    ):
        save_file(wrong, folder / "adapter_model.safetensors")
        with pytest.raises(DataError, match="is not an adapter of Qwen3ForCausalLM"):
            load_model(str(folder), key="teacher.path", adapters=True)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(DataError, match="pickle files"):
        load_model(str(folder), key="teacher.path", adapters=True)


def quantized(bits, name="qwen3", dtype=torch.float64):
    """A model with an adapter on a quantised base."""
    if bits == 4:
        pytest.importorskip("bitsandbytes", reason="weights of 4 bits need bitsandbytes")
    model = model_zoo.build(name, dtype)
    lora.quantize_linears(model, bits)
    return with_adapter(model)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.007), (4, 0.11)])
def test_a_quantised_base_is_the_base_within_its_rounding_and_nothing_else_is_rounded(bits, error):
    model, plain = quantized(bits), model_zoo.build("qwen3").state_dict()
    state = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    rounded = {name for name, tensor in plain.items() if not torch.equal(state[name], tensor)}
    assert rounded == {name for name in plain if "_proj.weight" in name}  # not norms, embeddings and head
    for name in rounded:
        assert 0 < (state[name] - plain[name]).norm() < error * plain[name].norm(), name
    codes = [p for n, p in model.named_parameters() if n.endswith(".codes")]
    assert sum(p.numel() for p in codes) * 8 == bits * sum(plain[name].numel() for name in rounded)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_logits_and_gradients_on_a_quantised_base_are_those_of_a_plain_model_with_its_weights(bits, name):
    model = quantized(bits, name)
    same = adapted(name, torch.float64)  # its base in 64 bits, then the unpacked weights and the same adapter
    same.load_state_dict(model.state_dict())
    ids = torch.arange(1, 12)[None]
    for each in (model, same):
        each(input_ids=ids).logits.square().sum().backward()
    torch.testing.assert_close(logits(model), logits(same), rtol=0, atol=1e-10)
    theirs = dict(same.named_parameters())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {n for n, p in theirs.items() if p.requires_grad}
    for n, p in trained.items():
        torch.testing.assert_close(p.grad, theirs[n].grad, rtol=1e-8, atol=1e-10)
    plain = model_zoo.build(name)
    plain.load_state_dict(lora.merged_state(model))  # strict: an export has the names of a plain model
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-9)


def test_the_digest_of_a_quantised_base_is_of_its_bits():
    digests = [lora.base_digest(quantized(bits)) for bits in (8, 4, 4)]
    assert digests[1] == digests[2]
    assert len({*digests, lora.base_digest(adapted(dtype=torch.float64))}) == 3


def test_what_cannot_be_quantised_is_refused_by_the_key(monkeypatch):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(ConfigError, match=r"actor\.lora_base_bits: GPT2LMHeadModel has no linear layer"):
        lora.quantize_linears(gpt2, 4)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"actor\.lora_base_bits 4 needs bitsandbytes: pip install .*\[quantized\]"):
        lora.quantize_linears(model_zoo.build("llama"), 4)


@pytest.mark.run
def test_bitsandbytes_asks_no_hub_for_a_kernel(tmp_path):
    pytest.importorskip("bitsandbytes")
    asked = tmp_path / "asked"
    (tmp_path / "kernels.py").write_text(f"def get_kernel(*_, **__):\n    open({str(asked)!r}, 'w')\n")
    code = "from gspo.models import lora; import torch, sys; assert lora._layers(torch.nn.Linear(1, 1)) == {}\n"
    code += "assert not {'peft', 'bitsandbytes'} & sys.modules.keys()\nlora._bitsandbytes()\nimport kernels, peft\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert not asked.exists()
