"""Tiny random models of every architecture the in-process sampler is tested with."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
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


def build(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
