"""`gspo export`: a run's weights as a model folder that transformers, and every engine built on it, can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gspo.config.schema import Config
from gspo.errors import ConfigError
from gspo.runs.export import SHARD, base_name, refuse_used, write_model
from gspo.train.build.policy import load_policy


def export(
    config: Config,
    run: Path,
    step: int,
    to: Path,
    *,
    merge: bool = False,
    shard: str = SHARD,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the policy after `step` into the new or empty folder `to`: configs, weights, tokenizer.

    A run with an adapter exports the adapter in peft's format, or with `merge` the merged plain model.
    `texts` are further files by name, such as the model card.
    """
    if merge and not config.actor.use_lora:
        raise ConfigError(f"{run} has no adapter to merge (actor.use_lora is false): leave out --merge")
    refuse_used(to)
    policy, tokenizer = load_policy(config, run, step)
    origin = {"run": str(run), "step": step, "from": config.actor.path, "algorithm": config.algorithm}
    base = base_name(config.actor.path) if config.actor.use_lora and not merge else None
    return write_model(policy, tokenizer, to, origin, adapter_of=base, shard=shard, texts=texts)
