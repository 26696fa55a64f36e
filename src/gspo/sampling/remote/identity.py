"""The values that a trainer and a sampler server must share before the trainer uses the server's samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from gspo.models.moe import num_experts, route_shape, routers
from gspo.sampling.verify import Experts


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those of the model's generation config."""
    # eos_token_id is a number, a list, or None.
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return sorted(e for e in ends if e is not None)


def context_limit(model: Any, max_tokens: int | None) -> int:
    """Longest prompt + completion: gconfig.max_tokens if set, else the model's limit."""
    return max_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def sampler_identity(
    model: Any, *, seed: int, ends: Collection[int], max_context: int, dtype: torch.dtype
) -> dict[str, Any]:
    """What is compared when a trainer attaches to a server. Weights of a LoRA adapter are not counted."""
    text = model.config.get_text_config()
    return {
        "model": text.model_type,
        "num_vocab": int(text.vocab_size),
        "num_parameters": sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n),
        "dtype": str(dtype),
        "seed": seed,
        "ends": sorted(ends),
        "max_context": max_context,
    }


def experts_of(model: Any, needed: bool) -> Experts:
    """The expected form of a sample's expert routes. `needed`: a sample without routes is invalid."""
    found = routers(model)
    num_layers, per_token, _ = route_shape(found)
    return Experts(num_layers, per_token, num_experts(found), needed)
