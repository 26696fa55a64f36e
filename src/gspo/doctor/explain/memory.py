"""The memory of trainer and sampler, line by line. A model without a known shape is unknown, with the reason."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from gspo.config.backends import SAMPLERS, parse_backend
from gspo.config.layout import layout_of
from gspo.doctor import memory
from gspo.doctor.explain.policies import reference_is_policy
from gspo.doctor.memory import Item
from gspo.doctor.shapes import ModelFields, Shape, Unknown, adapted_layers, adapter_parameters, find_source, shape_of
from gspo.learner.policy import HEAD_CHUNK
from gspo.lint.facts import Facts
from gspo.sampling.requests import rows_at_once
from gspo.system.text import count


def memory_section(f: Facts, source: ModelFields | Unknown) -> dict[str, Any]:
    shape = source if isinstance(source, Unknown) else shape_of(source)
    if isinstance(source, Unknown) or isinstance(shape, Unknown):
        reason = shape.reason if isinstance(shape, Unknown) else ""
        return {"model": f.actor.path, "known": False, "unknown": reason, "items": []}
    tokens, num_parts = _micro_batch(f)
    items = [*_trainer_memory(f, shape, tokens), *_sampler_memory(f, shape)]
    sizes = [item.num_bytes for item in items if item.side == "sampler"]
    # An unknown item makes the total unknown; a partial sum would look too small.
    sampler = None if None in sizes else sum(size for size in sizes if size is not None)
    totals = {"trainer": memory.peak(items, num_parts), "sampler": sampler}
    return {
        "model": f.actor.path,
        "known": True,
        "unknown": None,
        "shape": {
            "source": source.name,
            "family": shape.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": shape.vocabulary,
            "context": source.context,
            "experts": shape.experts,
        },
        "items": [asdict(item) for item in items],
        "totals": totals,
        "least": memory.peak(items, 0),  # of the trainer, with short completions
        "per_rank": layout_of(f.config, f.num_gpus).ranks,
    }


def _micro_batch(f: Facts) -> tuple[int, int]:
    """Tokens of the largest micro-batch of a rank if all completions are as long as allowed; micro-batches per update.

    A prompt counts once for its completions, as it is computed. If its length is unknown, it does not count.
    """
    generation, group = f.config.gconfig, max(f.config.gconfig.n_samples, 1)
    each = f.num_sequences / f.num_minibatches / layout_of(f.config, f.num_gpus).ranks
    tokens = math.ceil(each * (generation.max_new_tokens + (f.config.train_dataset.max_length or 0) / group))
    most = f.actor.mb_spec.max_tokens_per_mb
    return min(tokens, most), math.ceil(tokens / most)


def _trainer_memory(f: Facts, shape: Shape, tokens: int) -> list[Item]:
    actor, shards = f.actor, layout_of(f.config, f.num_gpus).ranks
    bits, quantised = actor.lora_base_bits, shape.linear_parameters if actor.lora_base_bits else 0
    items = [memory.parameters_item("actor", shape.parameters - quantised, f.dtype, shards)]
    if bits is not None:
        items.append(memory.quantized_item("actor", quantised, bits, f.dtype))
        if f.on_cpu:  # for a GPU the model is loaded and quantised in the host's memory
            size = memory.BYTES[f.dtype]
            how = f"{count(shape.parameters)} × {size} bytes ({f.dtype}), until they are quantised"
            items.append(Item("actor parameters, as loaded", shape.parameters * size, how, when="loading"))
    if actor.use_lora:
        items += _adapter_memory(f, shape, shards)
    else:
        items += _training_memory(f, "actor", shape.parameters, f.dtype, shards)
    adapted = adapted_layers(shape, actor.target_modules) * actor.lora_rank if actor.use_lora else 0
    items.append(
        memory.activations_item(
            shape,
            tokens=tokens,
            dtype=f.dtype,
            checkpointing=actor.gradient_checkpointing,
            adapter_numbers=adapted,
            heap=memory.HEAP if f.on_cpu else 1.0,
            note="" if f.config.train_dataset.max_length else ", plus prompts",
        )
    )
    items += memory.logits_items(shape, chunk=HEAD_CHUNK, tokens_per_mb=tokens)
    if not actor.use_lora:
        num = shape.vocabulary * shape.hidden
        how = f"{count(num)} × 4 bytes; it is made first, while all activations are there"
        items.append(Item("gradient of the head", num * 4, how, when="pass"))
    if f.on_cpu:
        items.append(Item("Python and libraries", memory.LIBRARIES, "torch, transformers and their data; measured"))
    ref, critic = f.config.ref, f.config.critic
    frozen: dict[str, str] = {}
    if ref is not None and (actor.kl_loss_coef > 0 or actor.kl_ctl > 0) and not reference_is_policy(f):
        frozen["reference"] = ref.path or actor.path
    if f.config.teacher is not None and not f.config.teacher.is_server:
        frozen["teacher"] = f.config.teacher.path
    for name, path in frozen.items():
        other = _shape_at(path)
        items.append(
            Item(f"{name} parameters", None, other.reason)
            if isinstance(other, Unknown)
            else memory.parameters_item(name, other.parameters, f.dtype, shards, ", no gradients")
        )
    if critic is not None and f.objective["advantage"] == "gae":
        other = _shape_at(critic.path or actor.path)
        if isinstance(other, Unknown):
            return [*items, Item("critic", None, other.reason)]
        # The language-model head is replaced by a linear layer from the hidden state to one value.
        num = other.parameters - other.head + other.hidden + 1
        items.append(memory.parameters_item("critic", num, f.dtype, shards))
        items += _training_memory(f, "critic", num, f.dtype, shards)
    return items


def _adapter_memory(f: Facts, shape: Shape, shards: int) -> list[Item]:
    """A LoRA adapter has at least float32 parameters, whatever the frozen model's precision."""
    num = adapter_parameters(shape, f.actor.lora_rank, f.actor.target_modules)
    if num is None:
        unknown = "the adapter's size is unknown: actor.target_modules names a layer that the model does not have"
        return [Item("adapter", None, unknown)]
    dtype = "float64" if f.dtype == "float64" else "float32"
    return [
        memory.parameters_item("adapter", num, dtype, shards),
        *_training_memory(f, "adapter", num, dtype, shards),
    ]


def _training_memory(f: Facts, what: str, num: int, dtype: str, shards: int) -> list[Item]:
    how = f.actor.optimizer
    offload = how.offload and how.type != "sgd" and not f.on_cpu
    return memory.training_items(what, num, dtype, how.type, shards, offload=offload)


def _shape_at(path: str) -> Shape | Unknown:
    source = find_source(path)
    return source if isinstance(source, Unknown) else shape_of(source)


def _sampler_memory(f: Facts, shape: Shape) -> list[Item]:
    sampler, generation = parse_backend(f.config.rollout.backend, SAMPLERS), f.config.gconfig
    items = []
    concurrent = f.config.rollout.max_concurrent_rollouts or (
        f.num_sequences
        if f.external_sampler
        else rows_at_once(shape.parameters, generation.max_new_tokens, f.config.rollout.max_head_offpolicyness)
    )
    if f.external_sampler:
        gpus = sampler.tensor * sampler.pipeline
        size = memory.BYTES[f.dtype] if f.dtype != "float64" else 4
        items.append(
            Item(
                "sampler parameters",
                shape.parameters * size // gpus,
                f"{count(shape.parameters)} × {size} bytes" + (f" / {gpus} GPUs" if gpus > 1 else ""),
                side="sampler",
            )
        )
    items.append(
        memory.cache_item(
            shape,
            num_sequences=min(concurrent, f.num_sequences),
            group_size=generation.n_samples,
            prompt_tokens=f.config.train_dataset.max_length,
            max_new_tokens=generation.max_new_tokens,
            dtype=f.dtype,
            num_samplers=sampler.data,
        )
    )
    return items
