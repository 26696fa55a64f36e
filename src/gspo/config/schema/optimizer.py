"""`optimizer` and `mb_spec`: the update and the size of a pass."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class MicroBatch(Section):
    max_tokens_per_mb: int = key(
        8192, "Tokens per forward and backward pass. It changes memory and speed, not results.", low=1
    )


class Optimizer(Section):
    lr: float | None = key(
        None, "Learning rate.", unset="1e-6, or 1e-5 with LoRA; ten times that with algorithm sft", low=0.0
    )
    type: Literal["adam", "adamw", "adamw8bit", "sgd"] = key(
        "adamw",
        "Optimizer. adam means AdamW, as in AReaL; adamw8bit stores its moments in 8 bits (one rank; docs/memory.md).",
    )
    offload: bool = key(
        False,
        "On a GPU: keep AdamW's moments and the float32 copy of the weights in the host's memory and update there (one "
        "rank). It saves 12 bytes of GPU memory per weight and costs the copies of gradients and weights.",
    )
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0.0)
    gradient_clipping: float = key(1.0, "Maximum norm of the gradient; 0: no clipping.", low=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate schedule after the warm-up. linear and cosine end at 0."
    )
    warmup_steps_proportion: float = key(
        0.0, "Fraction of all steps in which the learning rate rises from 0.", low=0.0, high=1.0
    )
    beta1: float = key(0.9, "Adam's decay of the first moment.", low=0.0, high=0.9999999)
    beta2: float = key(0.999, "Adam's decay of the second moment.", low=0.0, high=0.9999999)
    eps: float = key(1e-8, "Adam's ε, added to the square root of the second moment.", low=0.0)
