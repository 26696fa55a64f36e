"""The model that an inference engine has to load, and its identity, without loading the weights in this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from gspo.config import Config
from gspo.models import EMBEDDED, cache, check_settings, check_weights, end_tokens, load_model, locate, open_folder
from gspo.sampling import context_limit, sampler_identity
from gspo.train import device_and_dtype, make_tokenizer, published_dtype


def model_folder(config: Config, tmp: Path, *, weights: bool = True) -> str:
    """The folder that the engine has to load. Random weights are written to `tmp` first.

    `weights` is False for an engine that the user runs: it may have its files on another machine.
    """
    # Only random weights have to be written: an engine cannot create the same ones from our seed.
    if not config.actor.init_from_scratch:
        return as_folder(config.actor.path, weights=weights)
    model: Any = load_model(config.actor.path, device_and_dtype(config)[1], from_scratch=True, seed=config.seed)
    with cache.quiet():
        model.save_pretrained(tmp, safe_serialization=True)
        make_tokenizer(config).save_pretrained(tmp)
    return str(tmp)


def as_folder(path: str, key: str = "actor.path", *, weights: bool = False) -> str:
    """The folder of a model or tokenizer, checked: the engine opens what the trainer may open, and nothing else."""
    path = locate(path, key, weights=weights)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        embedded.build(path)
        return str(embedded.embedded_folder(path))
    check_settings(Path(path))
    if weights:
        check_weights(Path(path), key)
    return path


def identity_for(config: Config, source: str) -> dict[str, Any]:
    """`sampler_identity` from the model's config: this process does not load the weights."""
    dtype = published_dtype(config) or device_and_dtype(config)[1]
    tokenizer = make_tokenizer(config)
    model = without_weights(source)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    return sampler_identity(
        model,
        seed=config.seed,
        ends=end_tokens(model, tokenizer),
        max_context=context_limit(model, config.gconfig.max_tokens),
        dtype=dtype,
    )


def without_weights(source: str) -> Any:
    """The model on the meta device."""
    found = open_folder(source, weights=False)
    with cache.quiet(), torch.device("meta"):
        return found.kind.from_config(found.config, trust_remote_code=False)
