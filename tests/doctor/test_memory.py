"""Shapes and memory from config.json alone, held against transformers' own models."""

import json

import pytest

from gspo.doctor import memory as estimate
from gspo.doctor.memory import Shape, Unknown, adapter_parameters, find_shape, shape_of
from gspo.system.gpus import visible_gpus

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


@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_the_count_is_that_of_the_model_itself(family, extra):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **COMMON, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(config.to_json_string()), "test")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.exact


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
    assert shape_of(qwen, "x").parameters == 1_543_714_304  # Qwen2.5-1.5B, as its card says


def test_an_unfamiliar_family_is_marked_as_rough():
    assert not shape_of({"model_type": "novel", **COMMON}, "x").exact


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
        assert isinstance(find_shape(path), Shape)
    found = find_shape("org/name")
    assert isinstance(found, Shape)
    assert "aaa" in found.source
    missing = find_shape("org/other")
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
BROKEN_TEXTS = ["", "[]", "{", "[" * 100_000, "\udcff", *(json.dumps({**COMMON, **fields}) for fields in BROKEN_FIELDS)]


@pytest.mark.parametrize("text", BROKEN_TEXTS)
def test_a_broken_config_json_is_unknown_and_never_an_exception(text, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    assert isinstance(find_shape(str(tmp_path)), Unknown)


def test_absurd_layer_counts_do_not_hang(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "num_hidden_layers": 10**11, "num_experts": 4}))
    assert isinstance(find_shape(str(tmp_path)), Unknown)


def test_embedded_models_are_asked_of_their_own_table():
    assert isinstance(find_shape("embedded:tiny"), Unknown)
    found = find_shape("embedded:tiny", embedded=lambda path: {"model_type": "llama", **COMMON})
    assert isinstance(found, Shape)


def test_an_adapter_counts_rank_times_both_sides():
    shape = shape_of({"model_type": "llama", **COMMON}, "x")
    assert adapter_parameters(shape, 4, ["q_proj"]) == 4 * (32 + 32) * 3
    assert adapter_parameters(shape, 4, ["q_proj", "down_proj"]) == 4 * ((32 + 32) + (48 + 32)) * 3
    attention, mlp = (32 + 32) * 2 + (32 + 16) * 2, (32 + 48) * 3
    assert adapter_parameters(shape, 4, ["all-linear"]) == 4 * (attention + mlp) * 3
    assert adapter_parameters(shape, 4, ["nonsense"]) is None


def test_training_memory_by_hand():
    shape = shape_of({"model_type": "llama", **COMMON}, "x")
    n = shape.parameters

    def sizes(**kwargs):
        items = estimate.trainer_items(shape, trained_parameters=n, **kwargs)
        return [item.num_bytes for item in items]

    assert sizes(dtype="float32", optimizer="adamw", num_shards=1) == [4 * n, 4 * n, 8 * n]
    assert sizes(dtype="bfloat16", optimizer="adamw", num_shards=1) == [2 * n, 2 * n, 12 * n]
    assert sizes(dtype="float32", optimizer="sgd", num_shards=1) == [4 * n, 4 * n, 0]
    assert sizes(dtype="float64", optimizer="adamw", num_shards=1) == [8 * n, 8 * n, 16 * n]
    assert sizes(dtype="float32", optimizer="adamw", num_shards=2) == [2 * n, 2 * n, 4 * n]


def test_the_cache_holds_a_groups_prompt_once():
    shape = shape_of({"model_type": "llama", **COMMON}, "x")
    per_token = 2 * 3 * 2 * 8 * 4  # keys and values × layers × heads × head size × float32
    item = estimate.cache_item(
        shape, num_sequences=16, group_size=8, prompt_tokens=10, max_new_tokens=20, dtype="float32"
    )
    assert item.num_bytes == (16 * 20 + 2 * 10) * per_token


def test_logits_exist_in_chunks():
    shape = shape_of({"model_type": "llama", **COMMON}, "x")
    chunk, full = estimate.logits_items(shape, chunk=8, tokens_per_mb=80)
    assert (chunk.num_bytes, full.num_bytes) == (8 * 50 * 4, 80 * 50 * 4)
    assert full.side == "comparison"


def test_hidden_gpus_are_not_counted(monkeypatch):
    monkeypatch.setattr(estimate, "_names", lambda folder: ["nvidia0", "nvidia1", "nvidiactl", "null"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == 2
    for value, expected in (("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == expected
