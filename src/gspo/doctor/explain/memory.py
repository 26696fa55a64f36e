"""The memory of trainer and sampler, line by line. A model without a known shape is unknown, with the reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gspo.config.backends import SAMPLERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.lint.facts import Facts
from gspo.doctor import memory
from gspo.doctor.explain.policies import reference_is_policy
from gspo.doctor.memory import Item
from gspo.doctor.shapes import ModelFields, Shape, Unknown, adapter_parameters, find_source, shape_of
from gspo.learner.policy import HEAD_CHUNK
from gspo.system.text import count

MAX_ROWS = 256  # of `train.build.sampler.local_sampler`


def memory_section(f: Facts, source: ModelFields | Unknown) -> dict[str, Any]:
    shape = source if isinstance(source, Unknown) else shape_of(source)
    if isinstance(source, Unknown) or isinstance(shape, Unknown):
        reason = shape.reason if isinstance(shape, Unknown) else ""
        return {"model": f.actor.path, "known": False, "unknown": reason, "items": []}
    items = [*_trainer_memory(f, shape), *_sampler_memory(f, shape)]
    totals = {}
    for side in ("trainer", "sampler"):
        sizes = [item.num_bytes for item in items if item.side == side]
        # An unknown item makes the total unknown; a partial sum would look too small.
        totals[side] = None if None in sizes else sum(size for size in sizes if size is not None)
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
        "per_rank": layout_of(f.config, f.num_gpus).ranks,
    }


def _trainer_memory(f: Facts, shape: Shape) -> list[Item]:
    actor, shards = f.actor, layout_of(f.config, f.num_gpus).ranks
    items = [memory.parameters_item("actor", shape.parameters, f.dtype, shards)]
    if actor.use_lora:
        items += _adapter_memory(f, shape, shards)
    else:
        items += memory.training_items("actor", shape.parameters, f.dtype, actor.optimizer.type, shards)
    items += memory.logits_items(shape, chunk=HEAD_CHUNK, tokens_per_mb=actor.mb_spec.max_tokens_per_mb)
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
        items += memory.training_items("critic", num, f.dtype, actor.optimizer.type, shards)
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
        *memory.training_items("adapter", num, dtype, f.actor.optimizer.type, shards),
    ]


def _shape_at(path: str) -> Shape | Unknown:
    source = find_source(path)
    return source if isinstance(source, Unknown) else shape_of(source)


def _sampler_memory(f: Facts, shape: Shape) -> list[Item]:
    sampler, generation = parse_backend(f.config.rollout.backend, SAMPLERS), f.config.gconfig
    items = []
    # Our own sampler decodes at most this many sequences at a time.
    concurrent = f.config.rollout.max_concurrent_rollouts or (f.num_sequences if f.external_sampler else MAX_ROWS)
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
