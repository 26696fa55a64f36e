"""Lint rules for weights and machines: learning rate, number types, GPUs, servers, packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from gspo.config import TRAINERS, engine_flags, flags_of, layout_of, parse_backend
from gspo.errors import ConfigError
from gspo.lint.facts import Facts, Finding, error, rule, warning
from gspo.system import install_command, number

# By what is trained: the learning rate above which a run is warned, the usual ones, and one to start with.
HIGH_LR = {
    "all weights": (1e-4, "about 1e-6", "1e-6"),
    "an adapter": (1e-3, "about 1e-5", "1e-5"),
    "a small new model": (1e-2, "1e-5 to 1e-3", "1e-4"),
    "a model with SGD": (1.0, "1e-3 to 1", "0.1"),
    "a critic": (1e-3, "about 1e-5", "1e-5"),
}


@error("actor.entropy_target", "set actor.entropy_coef, for example 0.001, or actor.entropy_target: null")
def entropy_target_without_coefficient(f: Facts) -> str | None:
    if f.actor.entropy_target is not None and not f.actor.entropy_coef:
        return "the coefficient that follows the target starts at actor.entropy_coef, which is 0"


@warning("actor.optimizer.lr", "set actor.optimizer.lr: 1e-6, or 1e-5 with LoRA")
def zero_learning_rate(f: Facts) -> str | None:
    if not f.actor.optimizer.lr:
        return "a learning rate of 0 changes no weight"


@rule
def high_learning_rate(f: Facts) -> Iterator[Finding]:
    critic = f.config.critic
    models = [("actor", f.actor.optimizer.lr, "an adapter" if f.actor.use_lora else "all weights")]
    models += [("critic", critic.optimizer.lr, "a critic")] if critic is not None else []
    is_new = f.actor.init_from_scratch or f.actor.path.startswith("embedded:")
    for section, lr, trained in models:
        what = "a model with SGD" if f.actor.optimizer.type == "sgd" else "a small new model" if is_new else trained
        limit, usual, start = HIGH_LR[what]
        if lr is not None and lr > limit:
            yield f.warn(
                f"{section}.optimizer.lr",
                f"{number(lr)} is far above the usual learning rate for {what} ({usual}) and may "
                "destroy the model within a few steps",
                f"set {section}.optimizer.lr: {start}, and increase it from there",
            )


@error("actor.target_modules", "set actor.target_modules: [all-linear]")
def adapter_on_no_module(f: Facts) -> str | None:
    if f.actor.use_lora and not f.actor.target_modules:
        return "the adapter has no target modules, so nothing is trained"


@warning("actor.init_from_scratch", "set actor.use_lora: false, or actor.init_from_scratch: false")
def adapter_on_random_weights(f: Facts) -> str | None:
    if f.actor.use_lora and f.actor.init_from_scratch:
        return "an adapter on random, frozen weights cannot learn much"


@error(
    "actor.optimizer.type",
    "set actor.backend: fsdp:d1, or actor.optimizer.type: adamw, whose moments are sharded over the ranks",
)
def eight_bit_moments_on_ranks(f: Facts) -> str | None:
    if f.actor.optimizer.type == "adamw8bit" and layout_of(f.config, f.num_gpus).ranks > 1:
        return "adamw8bit packs the moments of whole tensors, and several ranks have shards of them"


@rule
def offloaded_state(f: Facts) -> Iterator[Finding]:
    optimizer = f.actor.optimizer
    if not optimizer.offload:
        return
    if layout_of(f.config, f.num_gpus).ranks > 1:
        yield f.error(
            "actor.optimizer.offload",
            "it moves whole tensors, and several ranks have shards of them",
            "set actor.optimizer.offload: false; the ranks share the optimizer's state",
        )
    if optimizer.type == "adamw8bit":
        yield f.error(
            "actor.optimizer.offload",
            "the moments of adamw8bit stay on the GPU, which packs them",
            "set actor.optimizer.type: adamw, or actor.optimizer.offload: false",
        )


@error("actor.lora_base_bits", "set actor.use_lora: true, or remove actor.lora_base_bits")
def quantised_weights_without_an_adapter(f: Facts) -> str | None:
    bits = f.actor.lora_base_bits
    if bits is not None and not f.actor.use_lora:
        return f"all weights are trained, and a weight of {bits} bits cannot hold an update of a small learning rate"


@rule
def quantised_base_elsewhere(f: Facts) -> Iterator[Finding]:
    """Where the sampler and the trainer could not use the same quantised weights."""
    if f.actor.lora_base_bits is None:
        return
    rounded = f.config.rollout.sampler_precision
    for is_so, key, what, remedy in (
        (
            layout_of(f.config, f.num_gpus).ranks > 1,
            "actor.backend",
            "several ranks shard the weights, and quantised ones are not sharded",
            "set actor.backend: fsdp:d1",
        ),
        (
            f.external_sampler is not None,
            "rollout.backend",
            f"{f.external_sampler} would add the adapter to weights that are not quantised, which is another policy",
            "set rollout.backend: local or local:dN",
        ),
        (
            rounded != "none",
            "rollout.sampler_precision",
            f"{rounded} would round quantised weights a second time",
            "set rollout.sampler_precision: none",
        ),
    ):
        if is_so:
            yield f.error(key, f"with actor.lora_base_bits, {what}", f"{remedy}, or remove actor.lora_base_bits")


@warning("actor.dtype", "set actor.dtype: auto, which is float32 on a CPU")
def half_precision_on_cpu(f: Facts) -> str | None:
    if f.actor.dtype in ("bfloat16", "float16") and f.on_cpu:
        return f"{f.actor.dtype} on a CPU is slow, and updates with a small learning rate are rounded to 0"


@warning("actor.fp32_lm_head", "set actor.fp32_lm_head: true")
def half_precision_head(f: Facts) -> str | None:
    if f.sequence_level and f.actor.fp32_lm_head is False and f.dtype in ("bfloat16", "float16"):
        return f"rounding of {f.dtype} logits alone can move a sequence ratio out of its clip range"


@rule
def too_few_gpus(f: Facts) -> Iterator[Finding]:
    layout, trainer = layout_of(f.config, f.num_gpus), parse_backend(f.config.actor.backend, TRAINERS)
    cluster, sampler = f.config.cluster, layout.sampler
    is_stated = cluster.n_gpus_per_node is not None
    # The GPUs of other machines are unknown unless the config states them.
    if layout.is_colocated or (not is_stated and (cluster.n_nodes > 1 or f.config.scheduler.type != "local")):
        return
    is_sized = sampler is not None and f.config.rollout.backend != "auto"
    needed = (sampler.world if sampler and is_sized else 0) + (trainer.world if trainer.name == "fsdp" else 0)
    offered = cluster.n_nodes * layout.gpus_per_node
    if offered == 0 and not f.engine.needs_cuda:
        return  # all processes run on the CPU
    if needed > offered:
        key = "actor.backend" if trainer.name == "fsdp" else "rollout.backend"
        # Only a warning if the number was detected here: the run may be meant for another machine.
        finding = f.error if f.loaded.is_set("cluster.n_gpus_per_node") else f.warn
        yield finding(
            "cluster.n_gpus_per_node" if is_stated else key,
            f"{f.config.rollout.backend} + {f.config.actor.backend} need {needed} GPUs, but "
            f"{'the cluster' if is_stated else 'this machine'} has {offered}",
            "set rollout.backend: auto and actor.backend: auto, or smaller sizes",
        )


@rule
def engine_flags_refused(f: Facts) -> Iterator[Finding]:
    engine, options = f.external_sampler, flags_of(f.config)
    if engine is None:
        return
    try:
        engine_flags.flags(engine, options, f.actor.path)
        engine_flags.environment_of(engine, options)
        engine_flags.url_of(engine, options, 0, layout_of(f.config, f.num_gpus).num_samplers)
    except ConfigError as error:
        yield f.error(engine, str(error), f"write every flag below {engine} by the engine's own name for it")


@error("rollout.max_head_offpolicyness", "set rollout.max_head_offpolicyness: 0")
def sampling_ahead_on_a_shared_gpu(f: Facts) -> str | None:
    if f.external_sampler and layout_of(f.config, f.num_gpus).is_colocated and f.max_staleness > 0:
        return "trainer and engine share one GPU: the engine sleeps while the trainer works, so it cannot sample ahead"


@error("rollout.sampler_precision", "set rollout.backend: local, or rollout.sampler_precision: none")
def rounded_weights_on_servers(f: Facts) -> str | None:
    rounded = f.config.rollout.sampler_precision
    if rounded != "none" and not f.in_process:
        return f"{rounded} rounds the weights of the in-process sampler, but this config samples with servers"


@error("actor.weight_update_mode", "set actor.weight_update_mode: disk or auto")
def broadcast_to_an_engine_that_reads_files(f: Facts) -> str | None:
    is_users_own = flags_of(f.config).get("url") is not None
    if f.actor.weight_update_mode == "broadcast" and (is_users_own or not f.engine.takes_broadcast):
        return (
            f"{f.engine.name}{', if you start it yourself,' * f.engine.takes_broadcast} only loads weights from files"
        )


@rule
def missing_loggers(f: Facts) -> Iterator[Finding]:
    stats = f.config.stats_logger
    requested = (
        ("stats_logger.wandb.mode", stats.wandb.mode != "disabled", "wandb", "disabled"),
        ("stats_logger.tensorboard", stats.tensorboard, "tensorboard", "false"),
        ("stats_logger.trackio", stats.trackio, "trackio", "false"),
    )
    for key, is_requested, package, off in requested:
        if is_requested and importlib.util.find_spec(package) is None:
            yield f.error(key, f"{package} is not installed", f"{install_command(package)}, or set {key}: {off}")
