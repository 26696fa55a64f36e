"""Memory arithmetic for `gspo doctor`: the bytes of tensors by their shapes. Torch-free.

Allocators, kernels, activations and the framework need memory in addition.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo.doctor.shapes import Shape
from gspo.system.text import count, human

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Item:
    """One line of the estimate; `num_bytes` None: unknown. `side`: trainer, sampler, comparison (not in a sum)."""

    name: str
    num_bytes: int | None
    how: str
    side: str = "trainer"


def parameters_item(what: str, num: int, dtype: str, num_shards: int, note: str = "") -> Item:
    shards = f" / {num_shards} ranks" if num_shards > 1 else ""
    how = f"{count(num)} × {BYTES[dtype]} bytes ({dtype}){shards}{note}"
    return Item(f"{what} parameters", num * BYTES[dtype] // num_shards, how)


def training_items(what: str, num: int, dtype: str, optimizer: str, num_shards: int) -> list[Item]:
    """Gradients and optimizer state of `num` trained parameters on one rank, sharded over `num_shards`."""
    size, shards = BYTES[dtype], f" / {num_shards} ranks" if num_shards > 1 else ""
    parts = []
    if optimizer != "sgd":
        # AdamW of 16-bit weights trains a float32 copy of them: updates of 1e-6 would be lost in 16 bits.
        parts = [("two moments", 2 * max(size, 4)), *([("a float32 copy of the weights", 4)] if size < 4 else [])]
    each = sum(bytes_ for _, bytes_ in parts)
    kinds = " + ".join(kind for kind, _ in parts) or "none"
    return [
        Item(f"{what} gradients", num * size // num_shards, f"{count(num)} × {size} bytes{shards}"),
        Item(
            f"{what} optimizer state",
            num * each // num_shards,
            f"{optimizer}: {kinds}, {count(num)} × {each} bytes{shards}",
        ),
    ]


def logits_items(shape: Shape, *, chunk: int, tokens_per_mb: int) -> list[Item]:
    """One chunk of float32 logits, as we compute them, and what all logits at once would need."""
    row = shape.vocabulary * 4
    return [
        Item("logits, one chunk", chunk * row, f"{chunk:,} positions × {shape.vocabulary:,} logits × 4 bytes"),
        Item(
            "(all logits at once)",
            tokens_per_mb * row,
            f"{tokens_per_mb:,} positions × {shape.vocabulary:,} × 4 bytes; not allocated",
            side="comparison",
        ),
    ]


def cache_item(
    shape: Shape,
    *,
    num_sequences: int,
    group_size: int,
    prompt_tokens: int | None,
    max_new_tokens: int,
    dtype: str,
    num_samplers: int = 1,
) -> Item:
    """Keys and values if every sequence reaches its maximum length; the prompt of a group is stored once."""
    # 2: keys and values.
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]
    # Rounded up.
    prompts = -(-num_sequences // group_size)
    tokens = num_sequences * max_new_tokens + prompts * (prompt_tokens or 0)
    how = f"{num_sequences:,} sequences × {max_new_tokens:,} tokens"
    how += (
        f" + {prompts:,} prompts × {prompt_tokens:,}"
        if prompt_tokens
        else f" (+ {human(prompts * per_token)} per token of prompt length)"
    )
    how += f", {human(per_token)} each" + (f", over {num_samplers} samplers" if num_samplers > 1 else "")
    return Item("KV cache, at most", tokens * per_token // num_samplers, how, side="sampler")
