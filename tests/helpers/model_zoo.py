"""Tiny random models of the tested list, float64, with settings that make mistakes visible."""

import torch
import transformers as tf

VOCAB = 61
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large enough that attention matters: with the usual 0.02 a wrong mask hardly changes a log-prob.
    "initializer_range": 0.4,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_BASE),
    "llama_tied": lambda: tf.LlamaConfig(**_BASE, tie_word_embeddings=True, attention_bias=True),
    "qwen2": lambda: tf.Qwen2Config(**_BASE),
    "qwen2_window": lambda: tf.Qwen2Config(**_BASE, **_ALTERNATING, use_sliding_window=True),
    "qwen3": lambda: tf.Qwen3Config(**_BASE, tie_word_embeddings=True),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **_BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "mixtral": lambda: tf.MixtralConfig(**_BASE, num_local_experts=4, num_experts_per_tok=2),
    "mixtral_window": lambda: tf.MixtralConfig(**_BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "olmoe": lambda: tf.OlmoeConfig(**_BASE, num_experts=4, num_experts_per_tok=2),
    "gemma": lambda: tf.GemmaConfig(**_BASE),
    "gemma2": lambda: tf.Gemma2Config(
        **_BASE, **_ALTERNATING, query_pre_attn_scalar=11, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**_BASE, **_ALTERNATING, query_pre_attn_scalar=11),
    "mistral": lambda: tf.MistralConfig(**_BASE),
    "mistral_window": lambda: tf.MistralConfig(**_BASE, sliding_window=4),
    "granite": lambda: tf.GraniteConfig(
        **_BASE, logits_scaling=3.0, attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.7
    ),
    "cohere": lambda: tf.CohereConfig(**_BASE, logit_scale=0.3),
}
NAMES = tuple(_CONFIGS)
WINDOWED = ("qwen2_window", "mixtral_window", "gemma2", "gemma3", "mistral_window")


def build(name: str, dtype: torch.dtype = torch.float64, **changes: object) -> tf.PreTrainedModel:
    config = _CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        # "eager" knows soft-capping; the experts' grouped product has no float64 kernel.
        return tf.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()


TOKENS = torch.arange(24).reshape(2, 12) % VOCAB


def gradients(model: tf.PreTrainedModel) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=TOKENS).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
