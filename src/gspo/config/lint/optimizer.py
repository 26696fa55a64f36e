"""Lint rules for the trained weights: learning rate, adapters, number types."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.lint.facts import Facts, Finding
from gspo.system.text import number

HIGH_LR = {"full": 1e-4, "lora": 1e-3}


def zero_learning_rate(f: Facts) -> Iterator[Finding]:
    if not f.actor.optimizer.lr:
        yield f.warn(
            "actor.optimizer.lr",
            "a learning rate of 0 changes no weight",
            "set actor.optimizer.lr: 1e-6, or 1e-5 with LoRA",
        )


def high_learning_rate(f: Facts) -> Iterator[Finding]:
    actor, lr = f.actor, f.actor.optimizer.lr or 0.0
    is_new_model = actor.init_from_scratch or actor.path.startswith("embedded:")
    if is_new_model or actor.optimizer.type == "sgd" or lr <= HIGH_LR["lora" if actor.use_lora else "full"]:
        return
    usual = "about 1e-5 for an adapter" if actor.use_lora else "about 1e-6 for all weights"
    yield f.warn(
        "actor.optimizer.lr",
        f"{number(lr)} is far above the usual learning rate for RL on a trained model ({usual})",
        f"set actor.optimizer.lr: {'1e-5' if actor.use_lora else '1e-6'}, and increase it from there",
    )


def adapter_on_no_module(f: Facts) -> Iterator[Finding]:
    if f.actor.use_lora and not f.actor.target_modules:
        yield f.error(
            "actor.target_modules",
            "the adapter has no target modules, so nothing is trained",
            "set actor.target_modules: [all-linear]",
        )


def adapter_on_random_weights(f: Facts) -> Iterator[Finding]:
    if f.actor.use_lora and f.actor.init_from_scratch:
        yield f.warn(
            "actor.init_from_scratch",
            "an adapter on random, frozen weights cannot learn much",
            "set actor.use_lora: false, or actor.init_from_scratch: false",
        )


def half_precision_on_cpu(f: Facts) -> Iterator[Finding]:
    if f.actor.dtype in ("bfloat16", "float16") and f.on_cpu:
        yield f.warn(
            "actor.dtype",
            f"{f.actor.dtype} on a CPU is slow, and updates with a small learning rate are rounded to 0",
            "set actor.dtype: auto, which is float32 on a CPU",
        )


def half_precision_head(f: Facts) -> Iterator[Finding]:
    if f.sequence_level and f.actor.fp32_lm_head is False and f.dtype in ("bfloat16", "float16"):
        yield f.warn(
            "actor.fp32_lm_head",
            f"rounding of {f.dtype} logits alone can move a sequence ratio out of its clip range",
            "set actor.fp32_lm_head: true",
        )
