"""Tiny random models of every architecture the in-process sampler is tested with."""

import copy

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

VOCAB, WINDOW = 48, 7
_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from flat: a wrong mask must show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED}
_MOE = {"num_experts_per_tok": 2, "head_dim": 8}

CONFIGS = {
    "llama": LlamaConfig(**_SIZE),
    "llama_mha": LlamaConfig(**{**_SIZE, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": Qwen2Config(**_SIZE),
    "qwen2_sliding": Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED),
    "qwen3": Qwen3Config(**_SIZE, head_dim=8),
    "qwen3_moe": Qwen3MoeConfig(**_SIZE, **_MOE, num_experts=4, moe_intermediate_size=16),
    "gemma": GemmaConfig(**_SIZE, head_dim=16),
    "gemma2": Gemma2Config(
        **_SIZE, **_SLIDING, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gemma3": Gemma3TextConfig(**_SIZE, **_SLIDING, query_pre_attn_scalar=8),
    "mistral": MistralConfig(**_SIZE, sliding_window=WINDOW),
    "phi3": Phi3Config(**_SIZE, sliding_window=None),
    "olmo2": Olmo2Config(**_SIZE),
    "gpt_oss": GptOssConfig(**{**_SIZE, **_MOE, **_SLIDING}, num_local_experts=4),
}


# Models that continuous batching cannot serve, or serves with unusual shapes: by model type, built when needed.
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": _HYBRID,
    "head_dim": 8,
    "initializer_range": 0.1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "initializer_range": 0.1}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
OTHERS = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 32, "head_dim": 8},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "minimax": {**_LOCAL, "block_size": 4, "layer_types": _HYBRID, "initializer_range": 0.1},
    "jamba": {
        **_EXPERTS,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "initializer_range": 0.1,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "llama4_text": {
        **_LOCAL,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "no_rope_layers": [1, 1, 0],
        "head_dim": 8,
    },
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4},
    "openai-gpt": _GPT,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name](**{**_SIZE, **OTHERS[name]}) if name in OTHERS else copy.deepcopy(CONFIGS[name])
    # The experts' grouped product has no float64 kernel.
    experts = {} if dtype == torch.float32 else {"experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype, **experts).eval()
