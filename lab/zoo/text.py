"""Tiny random models of every causal architecture of the installed transformers, for checks and tests.

A config of an architecture is its default config with small sizes. Sizes are set by the name of the attribute, so that
a new architecture needs an entry of its own only if its sizes depend on each other in a new way.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.errors import DataError
from gspo.models import cache, find_padding_by_place

VOCAB = 61
CAUSAL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_HIDDEN, _INNER, _LAYERS, _HEADS, _HEAD_DIM, _CONTEXT = 32, 48, 4, 4, 8, 128
_SIZES: dict[str, Any] = {
    # Width, depth, heads. Four layers: most hybrids have one layer of each kind among the first four.
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "embedding_dim", "emb_dim"), _HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "input_embedding_size", "output_embedding_size"), _HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner", "dff"), _INNER),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "intermediate_size_mlp"), _INNER),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size", "feed_forward_size"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "mamba_n_groups"), 2),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "d_head", "dim_head", "kv_channels", "attention_head_size"), _HEAD_DIM
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), _CONTEXT),
    # Windows and chunks that cut a sequence of the probe.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 5),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), 6),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "router_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "zero_expert_num": 2,
    "moe_layer_end_index": 3,
    # Multi-head latent attention: the value dimension is not the key dimension.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 64,  # more than any sequence of the probe: ties at 0 make a smaller choice depend on the padding
    # Linear attention and state-space layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_expand": 2,
    "expand": 2,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "mamba_d_ssm": 64,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    # Further tables of embeddings.
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    # Transformations of scores and logits that a layout must not lose.
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 5.0),
    "attn_logit_softcapping": 3.0,
    "logit_scale": 0.3,
    "logits_scaling": 3.0,
    "lm_head_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    # Far from flat: a wrong mask must change the log-probs.
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "mask_token_id"), None),
}
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
_MLA = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("longcat_flash", "minicpm3", "youtu"),
)
_TOKENS: dict[str, Any] = dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id"), 1
)  # of classes that need numbers
# Types that cannot be built small, are not a language model on their own, or are refused; with the reason.
EXCEPTIONS = {
    "blt": "a model of bytes, with a second model that cuts them into patches",
    "cpmant": "builds, but is refused: not causal, every token sees the whole input, later tokens too",
    "gemma4_assistant": "a draft model, which reads the hidden states of another model",
    "git": "takes images",
    "phi4_multimodal": "takes images and sound; its text model is phi3",
    "reformer": "builds, but is refused: transformers computes its gradients in training mode only, which has dropout",
    "xlnet": "its default is not causal; with attn_type: uni it trains on padded rows, but is not checked, because "
    "transformers fails on an attention mask for several rows",
}
# What an architecture needs besides.
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True, **_TOKENS} for name in _ENCODERS},
    # In these classes `head_dim` is the rotary part of a head.
    **{name: {"head_dim": 4, "num_key_value_heads": _HEADS} for name in _MLA},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj", "minimax_m3_vl_text")},
    "bamba": {"attn_layer_indices": [1]},
    "cwm": _TOKENS,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},  # the model needs the first two
        "ffn_config": {"hidden_size": _HIDDEN, "ffn_hidden_size": _INNER, "moe_top_k": 2},
    },
    "modernbert-decoder": {**_TOKENS, "sep_token_id": 1, "cls_token_id": 1},
    "falcon": {"alibi": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": _HEADS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0], "floor_scale": 4, "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "n_groups": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1},
    "roc_bert": {
        "is_decoder": True,
        "shape_vocab_size": VOCAB,
        "pronunciation_vocab_size": VOCAB,
        **_TOKENS,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "xlm": {"causal": True, **_TOKENS, "mask_token_id": 0},
    "xmod": {"is_decoder": True, "default_language": "en_XX", **_TOKENS},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 2 * _HIDDEN},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "qwen4_exp_text": {
        "output_gate_type": "silu",
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of a few thousand parameters; DataError for an architecture that does not take text alone."""
    if model_type not in CAUSAL_TYPES:
        raise DataError(f"transformers has no causal language model of type {model_type!r}")
    if model_type in EXCEPTIONS:
        raise DataError(f"{model_type}: {EXCEPTIONS[model_type]}")
    kind: Any = CONFIG_MAPPING[model_type]
    with cache.quiet():
        default = kind()
        if default.is_encoder_decoder:
            raise DataError(f"{model_type} is an encoder-decoder model")
        text = default.get_text_config(decoder=True)
        if text is not default:
            known = "" if text.model_type in CAUSAL_TYPES else ", which AutoModelForCausalLM does not build"
            raise DataError(f"{model_type} takes more than text; its text model is {text.model_type}{known}")
        names = vars(default).keys() | type(default).attribute_map.keys()
        sizes = {name: value for name, value in _SIZES.items() if name in names}
        return kind(**{"vocab_size": VOCAB, **sizes, **_OWN.get(model_type, {})})


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A model of `tiny_config` with random weights of `seed`; `changes` are attributes of its config."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(), cache.quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    find_padding_by_place(model)
    return model.to(dtype).eval()  # pyright: ignore[reportArgumentType]  # XLNet makes float32 weights
