"""What a config can say and this version cannot do. A key is used, idle and named, or refused here; none is ignored.

`gspo doctor` shows these as errors and `gspo train` stops at them. A key leaves this list when its part is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.schema import Config


def unbuilt(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, what is missing, what to set instead) for everything this config asks for in vain."""
    actor, rollout = config.actor, config.rollout
    asked = (
        ("actor.prox_logp_method", actor.prox_logp_method == "loglinear", "loglinear", "set it to recompute"),
        ("actor.attn_impl", actor.attn_impl not in ("auto", "sdpa"), "a choice of attention kernel", "set it to auto"),
        ("actor.disable_dropout", not actor.disable_dropout, "dropout in training", "set it to true"),
        ("actor.mb_spec.granularity", actor.mb_spec.granularity != 1, "granularity of micro-batches", "set it to 1"),
        (
            "actor.mb_spec.packing_algorithm",
            actor.mb_spec.packing_algorithm != "ffd",
            "another packing algorithm",
            "set it to ffd",
        ),
        ("rollout.max_head_offpolicyness", rollout.max_head_offpolicyness > 0, "asynchronous training", "set it to 0"),
        ("rollout.backend", rollout.backend not in ("auto", "local", "local:d1"), "sampler servers", "set it to auto"),
        (
            "actor.backend",
            actor.backend not in ("auto", "fsdp", "fsdp:d1"),
            "training on several ranks",
            "set it to auto",
        ),
        ("cluster.n_nodes", config.cluster.n_nodes > 1, "training on several machines", "set it to 1"),
        ("scheduler.type", config.scheduler.type in ("ray", "slurm"), "the ray and slurm launchers", "set it to local"),
        (
            "stats_logger.wandb.mode",
            config.stats_logger.wandb.mode != "disabled",
            "Weights & Biases",
            "set it to disabled",
        ),
        ("stats_logger.tensorboard", config.stats_logger.tensorboard, "TensorBoard", "set it to false"),
    )
    for key, is_asked, what, instead in asked:
        if is_asked:
            yield key, what, instead
