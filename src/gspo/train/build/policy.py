"""The policy: loaded, given its adapter, checked and sharded; also loaded from a checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gspo.config.schema import Config
from gspo.config.schema.dataset import ENVIRONMENT_ROWS
from gspo.errors import ConfigError, DataError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import probe
from gspo.learner.policy.sharding import shard
from gspo.learner.ranks.world import ALONE, World
from gspo.models import embedded
from gspo.models.loading import load_model, load_tokenizer
from gspo.models.moe import check_replay
from gspo.models.vision.parts import freeze_vision, vision_parameters
from gspo.runs import checkpoint
from gspo.system.files import step_name
from gspo.system.imports import by_name
from gspo.train.build.compute import device_and_dtype, sharding

if TYPE_CHECKING:
    from gspo.models.vision.processor import Processor

PROCESSOR = "gspo.models.vision.processor:load_processor"


def _load(config: Config, dtype: torch.dtype, device: torch.device, tokenizer: Any) -> Any:
    """The model of actor.path; only the part that is trained requires gradients."""
    model: Any = load_model(
        config.actor.path,
        dtype,
        # What is to be quantised is read into the host's memory.
        device if config.actor.lora_base_bits is None else "cpu",
        from_scratch=config.actor.init_from_scratch,
        seed=config.seed,
        tokenizer=tokenizer,
        images=with_tower(config),
    )
    set_trained_part(config, model)
    return model if config.actor.lora_base_bits is None else model.to(device)


def make_policy(config: Config, sequence_level: bool, world: World = ALONE) -> tuple[PolicyModule, Any]:
    """The policy and its tokenizer, checked against a plain forward pass."""
    actor = config.actor
    device, dtype = device_and_dtype(config)
    tokenizer = make_tokenizer(config)
    # What is to be cut is read into the host's memory, and placed layer by layer.
    at_first = device if world.size == 1 else torch.device("cpu")
    model = _load(config, dtype, at_first, tokenizer)
    policy = PolicyModule(
        model,
        fp32_head=sequence_level if actor.fp32_lm_head is None else actor.fp32_lm_head,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    if world.size > 1:
        # Hash the frozen weights while every tensor is whole; `checkpoint.save` uses the stored digest.
        checkpoint.base(policy)
        shard(policy, policy, world, **sharding(config))
    # After sharding, so that the check covers the model in the form in which it trains.
    policy.processor = processor_of(policy, actor.path, tokenizer)
    probe(policy, share_prefix=actor.share_prefix, processor=policy.processor)
    if actor.routing_replay != "none":
        check_replay(policy.model)
    return policy, tokenizer


def make_tokenizer(config: Config) -> Any:
    """The tokenizer of the run; an error names the key that was set."""
    # The config fills tokenizer_path from actor.path: the error names the key that the user set.
    if config.tokenizer_path in (None, config.actor.path):
        return load_tokenizer(config.actor.path, "actor.path")
    return load_tokenizer(config.tokenizer_path, "tokenizer_path")


def with_tower(config: Config) -> bool:
    """Whether a model that transformers can load with or without its vision tower is loaded with it."""
    return config.actor.freeze_vision is not None


def make_reader(config: Config, tokenizer: Any) -> Any:
    """What makes tokens of a row: the processor of a vision-language model, or the tokenizer."""
    return by_name(PROCESSOR)(config.actor.path, tokenizer) or tokenizer


def processor_of(policy: PolicyModule, path: str, tokenizer: Any, key: str = "actor.path") -> Processor | None:
    """The processor of a vision-language model; None: the model takes text alone, for `policy.images_refused`."""
    if policy.vision is None:
        return None
    found, reason = None, "its folder has no image processor (preprocessor_config.json)"
    try:
        found = by_name(PROCESSOR)(path, tokenizer, key)
    except DataError as cause:
        reason = str(cause)
    if found is None:
        # It can still be trained on text.
        policy.vision, policy.images_refused = None, reason
    return found


def alphabet_warning(config: Config, prompt: str) -> list[str]:
    """A line if an embedded model has no token for some characters of a prompt."""
    path = config.actor.path
    if config.train_dataset.path == ENVIRONMENT_ROWS:
        return []  # the environment decides what the model reads
    if path not in embedded.RECIPES or not (unknown := embedded.unknown_characters(path, prompt)):
        return []
    return [
        f"warning: {path} has no token for some characters of the first prompt: {unknown[:40]!r}; "
        f"set actor.path to a language model, for example smollm2-135m"
    ]


def load_policy(config: Config, run: Path | None, step: int) -> tuple[PolicyModule, Any]:
    """The policy after `step` and its tokenizer; step 0 is the model that training started from.

    The checkpoint is verified and keeps its dtype: a run trained in bfloat16 on a GPU loads as bfloat16 on a CPU.
    """
    device, dtype = device_and_dtype(config)
    folder = None
    if step and run is not None:
        folder = run / "checkpoints" / step_name(step)
        dtype = checkpoint.stored_dtype(folder, dtype)
    tokenizer = make_tokenizer(config)
    model = _load(config, dtype, device, tokenizer)
    policy = PolicyModule(model)
    policy.processor = processor_of(policy, config.actor.path, tokenizer)
    # No optimizer: the weights are loaded to evaluate or export, not to train.
    if folder is not None:
        checkpoint.load_checkpoint(folder, policy, None)
    return policy, tokenizer


def set_trained_part(config: Config, model: Any) -> None:
    """With actor.freeze_vision the tower is frozen; with actor.use_lora the model is frozen, quantised if
    actor.lora_base_bits is set, and gets its adapter."""
    actor = config.actor
    if actor.freeze_vision:
        if not vision_parameters(model):
            raise ConfigError(
                f"actor.freeze_vision is true, but {actor.path} ({type(model).__name__}) has no vision tower; remove it"
            )
        freeze_vision(model)
    if actor.lora_base_bits is not None:
        by_name("gspo.models.lora:quantize_linears")(model, actor.lora_base_bits)
    if actor.use_lora:
        by_name("gspo.models.lora:add_adapter")(
            model,
            rank=actor.lora_rank,
            alpha=actor.lora_alpha,
            target_modules=actor.target_modules,
            seed=config.seed,
        )


def whole_model(config: Config, tokenizer: Any, compute_dtype: torch.dtype | None, *, with_adapter: bool) -> Any:
    """The policy's model, unsharded, for a sampler in one process; the trained weights are loaded later."""
    device, dtype = device_and_dtype(config)
    actor = config.actor
    model: Any = load_model(
        actor.path,
        compute_dtype or dtype,
        device,
        from_scratch=actor.init_from_scratch,
        seed=config.seed,
        tokenizer=tokenizer,
        images=with_tower(config),
    )
    if with_adapter:
        set_trained_part(config, model)
    if compute_dtype is not None:
        # An adapter is float32 on a half-precision model, but computes in what all of the policy does. Buffers stay:
        # the frequencies of rotary positions are float32 in every model.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(compute_dtype)
    return model


def context_length(config: Config, policy: PolicyModule) -> int:
    """Longest prompt + completion: the model's context, or gconfig.max_tokens if that is set."""
    return limit_context(config, getattr(policy.model.config.get_text_config(), "max_position_embeddings", None))


def limit_context(config: Config, own: int | None) -> int:
    """gconfig.max_tokens, else the model's own context; None: it has no limit."""
    own, asked = own or 2**31, config.gconfig.max_tokens
    if asked is not None and asked > own:
        raise ConfigError(f"gconfig.max_tokens is {asked}, but the context of {config.actor.path} is {own}; set {own}")
    return asked or own
