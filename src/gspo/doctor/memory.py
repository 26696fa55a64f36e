"""Memory arithmetic for `gspo doctor`: the bytes of tensors by their shapes. Torch-free.

Not all of them exist at the same time: `peak` has the rule. `gspo bench --workload memory` compares it with the peak of
real runs on a CPU (docs/memory.md). Allocators and kernels of GPUs need memory in addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gspo.doctor.shapes import Shape
from gspo.system.text import count, human

# Of a training process on a CPU: its bytes without the tensors of model and pass, and how much more memory a pass takes
# than the tensors that it keeps, because the C library's heap has gaps. Both are fitted to the peaks of lab/memory.py.
LIBRARIES, HEAP = 500 * 10**6, 1.15
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Item:
    """One line of the estimate; `num_bytes` None: unknown. `side`: trainer, sampler, comparison (not in a sum).

    `when` the trainer holds it: always; in a pass (activations and logits, from the forward pass on); gradients, which
    replace the activations in the backward pass; loading, until the first pass.
    """

    name: str
    num_bytes: int | None
    how: str
    side: str = "trainer"
    when: Literal["always", "pass", "gradients", "loading"] = "always"


def peak(items: Iterable[Item], num_micro_batches: int) -> int | None:
    """Bytes of the trainer at its peak; None if an item is unknown. 0 micro-batches: without activations and logits.

    In the backward pass activations are freed as gradients appear. Gradients of one micro-batch stay for the next.
    """
    sums = {"always": 0, "pass": 0, "gradients": 0, "loading": 0}
    for item in items:
        if item.side == "trainer":
            if item.num_bytes is None:
                return None
            sums[item.when] += item.num_bytes
    passes, gradients = sums["pass"] if num_micro_batches else 0, sums["gradients"]
    training = passes + gradients if num_micro_batches > 1 else max(passes, gradients)
    return sums["always"] + max(training, sums["loading"])


def activations_item(
    shape: Shape, *, tokens: int, dtype: str, checkpointing: bool, adapter_numbers: int, heap: float, note: str = ""
) -> Item:
    """What the forward pass of one micro-batch keeps for the backward pass. `adapter_numbers`: per token, of LoRA."""
    each, rest = shape.activations + adapter_numbers, ""
    if not shape.activations:
        return Item("activations", None, "they cannot be counted without the model's weights", side="comparison")
    if checkpointing:
        # The input of every layer, and one layer at a time.
        each, rest = shape.layers * shape.hidden + each // shape.layers, ", recomputed layer by layer"
    size = BYTES[dtype]
    gaps = f", × {heap} for gaps in the heap" if heap > 1 else ""
    how = f"{tokens:,} tokens × {each:,} numbers × {size} bytes{rest}{gaps}{note}"
    return Item("activations, at most", int(tokens * each * size * heap), how, when="pass")


def parameters_item(what: str, num: int, dtype: str, num_shards: int, note: str = "") -> Item:
    shards = f" / {num_shards} ranks" if num_shards > 1 else ""
    how = f"{count(num)} × {BYTES[dtype]} bytes ({dtype}){shards}{note}"
    return Item(f"{what} parameters", num * BYTES[dtype] // num_shards, how)


def quantized_item(what: str, num: int, bits: int, saved_from: str) -> Item:
    """`num` frozen parameters in 8 or 4 bits; blocks of 64 have one scale of 4 bytes."""
    return Item(
        f"{what} parameters, quantised",
        num * bits // 8 + num * 4 // 64,
        f"{count(num)} × {bits} bits and their scales, instead of {BYTES[saved_from]} bytes ({saved_from})",
    )


def training_items(
    what: str, num: int, dtype: str, optimizer: str, num_shards: int, *, offload: bool = False
) -> list[Item]:
    """Gradients and optimizer state of `num` trained parameters on one rank, sharded over `num_shards`.

    `offload`: the state is in the host's memory, and not in the sum.
    """
    size, shards = BYTES[dtype], f" / {num_shards} ranks" if num_shards > 1 else ""
    parts = []
    if optimizer != "sgd":
        packed = optimizer == "adamw8bit"
        # Blocks of 256 numbers have one scale of 4 bytes.
        parts = [("two moments of 8 bits", 2 * (1 + 4 / 256)) if packed else ("two moments", 2 * max(size, 4))]
        # AdamW of 16-bit weights trains a float32 copy of them: updates of 1e-6 would be lost in 16 bits.
        parts += [("a float32 copy of the weights", max(size, 4))] if size < 4 or offload else []
    each = sum(bytes_ for _, bytes_ in parts)
    kinds = " + ".join(kind for kind, _ in parts) or "none"
    return [
        Item(f"{what} gradients", num * size // num_shards, f"{count(num)} × {size} bytes{shards}", when="gradients"),
        Item(
            f"{what} optimizer state",
            int(num * each) // num_shards,
            f"{optimizer}: {kinds}, {count(num)} × {each:.4g} bytes{shards}"
            + (", in the host's memory" if offload else ""),
            side="comparison" if offload else "trainer",
        ),
    ]


def logits_items(shape: Shape, *, chunk: int, tokens_per_mb: int) -> list[Item]:
    """Two chunks of float32 logits (logits and exp), as we compute them, and what all logits at once would need."""
    row, chunk = shape.vocabulary * 4, min(chunk, tokens_per_mb)
    return [
        Item(
            "logits, two chunks",
            2 * chunk * row,
            f"2 × {chunk:,} positions × {shape.vocabulary:,} logits × 4 bytes",
            when="pass",
        ),
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
