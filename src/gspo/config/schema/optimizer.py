"""`optimizer` and `mb_spec`: the update and the size of a pass."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class MicroBatch(Section):
    max_tokens_per_mb: int = key(8192, "Tokens per forward/backward pass; changes memory and speed, no result.", low=1)
    n_mbs: int | None = key(None, "At least this many micro-batches per mini-batch.", unset="as few as fit", low=1)


class Optimizer(Section):
    type: Literal["adam", "adamw", "sgd"] = key("adamw", "Optimizer; adam means AdamW, as in AReaL.")
    lr: float | None = key(None, "Learning rate.", unset="1e-6, or 1e-5 with LoRA", low=0.0)
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0.0)
    beta1: float = key(0.9, "Decay of the first moment.", low=0.0, high=0.9999999)
    beta2: float = key(0.999, "Decay of the second moment.", low=0.0, high=0.9999999)
    eps: float = key(1e-8, "Added to the root of the second moment.", low=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("constant", "Schedule after the warm-up.")
    min_lr_ratio: float = key(0.0, "Final learning rate over the peak, for linear and cosine.", low=0.0, high=1.0)
    warmup_steps_proportion: float = key(0.0, "Share of all steps with a rising learning rate.", low=0.0, high=1.0)
    gradient_clipping: float = key(1.0, "Largest gradient norm; 0: no clipping.", low=0.0)
