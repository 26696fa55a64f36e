"""Lint rules for GPUs, sampler servers and their engines, and packages that must be installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from gspo.config import engine_flags
from gspo.config.backends import TRAINERS, parse_backend
from gspo.config.layout import flags_of, layout_of
from gspo.errors import ConfigError
from gspo.lint.facts import Facts, Finding, rule
from gspo.system.imports import install_command


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


@rule
def sampling_ahead_on_a_shared_gpu(f: Facts) -> Iterator[Finding]:
    if f.external_sampler and layout_of(f.config, f.num_gpus).is_colocated and f.max_staleness > 0:
        yield f.error(
            "rollout.max_head_offpolicyness",
            "trainer and engine share one GPU: the engine sleeps while the trainer works, so it cannot sample ahead",
            "set rollout.max_head_offpolicyness: 0",
        )


@rule
def rounded_weights_on_servers(f: Facts) -> Iterator[Finding]:
    rounded = f.config.rollout.sampler_precision
    if rounded != "none" and not f.in_process:
        yield f.error(
            "rollout.sampler_precision",
            f"{rounded} rounds the weights of the in-process sampler, but this config samples with servers",
            "set rollout.backend: local, or rollout.sampler_precision: none",
        )


@rule
def broadcast_to_an_engine_that_reads_files(f: Facts) -> Iterator[Finding]:
    is_users_own = flags_of(f.config).get("url") is not None
    if f.actor.weight_update_mode == "broadcast" and (is_users_own or not f.engine.takes_broadcast):
        yield f.error(
            "actor.weight_update_mode",
            f"{f.engine.name}{', if you start it yourself,' * f.engine.takes_broadcast} only loads weights from files",
            "set actor.weight_update_mode: disk or auto",
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
