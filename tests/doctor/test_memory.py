"""Parameters counted on the meta device, held against real models; the arithmetic of memory by hand."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import load
from gspo.doctor import memory
from gspo.doctor.explanation import explain
from gspo.doctor.memory import ModelFields, Shape, Unknown, adapter_parameters, count_weights, find_source, shape_of
from gspo.models import embedded, find

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16}),
    ("phi3", {}),
    ("olmo2", {}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16, "mlp_only_layers": [0]}),
    (
        "qwen2_moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
]


def made(family, **extra):
    """A real model of random weights, and its config.json."""
    config = AutoConfig.for_model(family, **{**COMMON, **extra})
    return AutoModelForCausalLM.from_config(config), ModelFields("test", json.loads(config.to_json_string()))


def counted(family="llama", **extra):
    shape = count_weights(ModelFields("test", {"model_type": family, **COMMON, **extra}))
    assert isinstance(shape, Shape)
    return shape


@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_the_count_is_that_of_the_model_itself(family, extra):
    model, source = made(family, **extra)
    shape = count_weights(source)
    assert isinstance(shape, Shape), shape
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shape.head == (0 if tied else 50 * 32)
    assert shape.experts == extra.get("num_experts", extra.get("num_local_experts", 0))


def test_published_sizes_come_out():
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    assert count_weights(ModelFields("x", qwen)).parameters == 1_543_714_304  # Qwen2.5-1.5B, as its card says
    moe = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    assert count_weights(ModelFields("x", moe)).parameters == 30_532_122_624  # Qwen3-30B-A3B: 30.5 billion


@pytest.mark.parametrize("name", [*embedded.RECIPES, *find.FETCHED])
def test_shapes_json_is_what_would_be_counted(name):
    source = find_source(name)
    assert isinstance(source, ModelFields)
    assert shape_of(source) == count_weights(source), (
        f"write the counted shape of {name} into src/gspo/doctor/shapes.json"
    )


def test_a_folder_and_a_cached_hub_name_are_read_and_another_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    text = json.dumps({"model_type": "llama", **COMMON})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    repository = tmp_path / "hub" / "models--org--name"
    for revision in ("aaa", "bbb"):
        (repository / "snapshots" / revision).mkdir(parents=True)
        (repository / "snapshots" / revision / "config.json").write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa")
    for path in (str(folder), "org/name"):
        found = find_source(path)
        assert isinstance(found, ModelFields)
        assert isinstance(shape_of(found), Shape)
        assert found.context == 64
    assert "aaa" in find_source("org/name").name
    missing = find_source("org/other")
    assert isinstance(missing, Unknown)
    assert "org/other" in missing.reason


BROKEN_FIELDS = [
    {"hidden_size": "big"},
    {"hidden_size": -4},
    {"hidden_size": 10**30},
    {"vocab_size": True},
    {"num_attention_heads": 0},
    {"num_experts": 4, "mlp_only_layers": 3},
]
BROKEN_TEXTS = [
    "",
    "[]",
    "{",
    "[" * 100_000,
    "\udcff",
    *(json.dumps({"model_type": "qwen3_moe", **COMMON, **fields}) for fields in BROKEN_FIELDS),
]


@pytest.mark.parametrize("text", BROKEN_TEXTS)
def test_a_broken_config_json_is_unknown_and_never_an_exception(text, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    report = explain(load(None, ["algorithm=gspo", f"actor.path={json.dumps(str(tmp_path))}"]), num_gpus=0)
    found = report.sections["memory"]
    assert found["known"] is False
    assert str(tmp_path) in found["unknown"]
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "novel"}, "here: transformers cannot build this model"),
        ({"model_type": "novel"}, "novel"),
        ({"num_hidden_layers": 10**11}, "100,000,000,000"),  # and it does not hang
        ({"text_config": {"num_experts": 10**11}}, "100,000,000,000"),
    ],
)
def test_a_model_that_cannot_be_built_is_unknown_with_the_reason(fields, reason):
    found = count_weights(ModelFields("here", {"model_type": "qwen3_moe", **COMMON, **fields}))
    assert isinstance(found, Unknown)
    assert reason in found.reason


def test_a_folder_that_asks_for_a_kernel_is_not_built(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "_attn_implementation": "owner/kernel"}')
    found = find_source(str(tmp_path))
    assert isinstance(found, Unknown)
    assert "_attn_implementation is 'owner/kernel'" in found.reason


@pytest.mark.parametrize(("family", "extra"), FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    "targets", [["all-linear"], ["q_proj", "o_proj"], ["c_attn"], ["self_attn.v_proj"], ["all-linear", "experts"]]
)
def test_an_adapter_is_counted_as_it_is_built(family, extra, targets):
    from gspo.errors import ConfigError
    from gspo.models import add_adapter

    model, source = made(family, **extra)
    found = adapter_parameters(count_weights(source), 4, targets)
    try:
        add_adapter(model, rank=4, alpha=8, target_modules=targets, seed=0)
    except ConfigError:
        assert found is None
    else:
        assert found == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_critic_is_counted_as_it_is_built():
    from gspo.learner import PolicyModule, ValueModule

    for tied in (True, False):
        model, source = made("llama", tie_word_embeddings=tied)
        shape = count_weights(source)
        module = ValueModule(PolicyModule(model))
        assert shape.parameters - shape.head + shape.hidden + 1 == sum(p.numel() for p in module.parameters())


def test_the_memory_section_counts_adapter_reference_and_critic():
    def items(*overrides):
        loaded = load(None, ["actor.path=embedded:tiny", "actor.dtype=bfloat16", *overrides])
        return {item["name"]: item["num_bytes"] for item in explain(loaded, num_gpus=0).sections["memory"]["items"]}

    n, hidden = 335_712, 96  # embedded:tiny, tied
    lora = items("algorithm=gspo", "actor.use_lora=true", "actor.lora_rank=2")
    adapter = 2 * (672 + 480 + 480 + 672 + 3 * 1056)
    assert lora["actor parameters"] == 2 * n
    assert lora["adapter parameters"] == lora["adapter gradients"] == 4 * adapter
    assert lora["adapter optimizer state"] == 8 * adapter
    assert "actor gradients" not in lora
    assert items("algorithm=gspo", "actor.kl_loss_coef=1", "ref.path=embedded:tiny")["reference parameters"] == 2 * n
    critic = items("algorithm=ppo", "critic.path=embedded:tiny")
    assert critic["critic parameters"] == 2 * (n + hidden + 1)
    assert items("algorithm=gspo", "actor.use_lora=true", "actor.target_modules=[wrong]")["adapter"] is None


def test_training_memory_by_hand():
    def sizes(dtype, optimizer, shards):
        return [item.num_bytes for item in memory.training_items("actor", 100, dtype, optimizer, shards)]

    assert sizes("float32", "adamw", 1) == [400, 800]
    assert sizes("bfloat16", "adamw", 1) == [200, 1200]
    assert sizes("float32", "sgd", 1) == [400, 0]
    assert sizes("bfloat16", "sgd", 1) == [200, 0]
    assert sizes("float64", "adamw", 1) == [800, 1600]
    assert sizes("float32", "adamw", 2) == [200, 400]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_optimizer_state_is_that_of_the_optimizer(dtype, kind):
    from gspo.learner import make_optimizer

    weight = torch.nn.Parameter(torch.ones(100, dtype=dtype))
    optimizer = make_optimizer([weight], kind=kind, lr=0.1, weight_decay=0.0, betas=(0.9, 0.99), eps=1e-8)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(x.numel() * x.element_size() for x in optimizer.state[weight].values() if x is not None and x.dim())
    gradients, state = memory.training_items("actor", 100, str(dtype).removeprefix("torch."), kind, 1)
    assert (gradients.num_bytes, state.num_bytes) == (weight.grad.numel() * weight.grad.element_size(), held)


def test_the_cache_holds_a_groups_prompt_once():
    per_token = 2 * 3 * 2 * 8 * 4  # keys and values × layers × heads × head size × float32
    item = memory.cache_item(
        counted(), num_sequences=16, group_size=8, prompt_tokens=10, max_new_tokens=20, dtype="float32"
    )
    assert item.num_bytes == (16 * 20 + 2 * 10) * per_token


def test_logits_exist_in_chunks():
    chunk, full = memory.logits_items(counted(), chunk=8, tokens_per_mb=80)
    assert (chunk.num_bytes, full.num_bytes) == (2 * 8 * 50 * 4, 80 * 50 * 4)
    assert full.side == "comparison"
