"""Keys that the user set and that have no effect in this config. `gspo doctor` lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gspo.algorithms import GATES
from gspo.config import EXTERNAL, TRAINERS, Loaded, is_supervised, known_keys, parse_backend, value_of
from gspo.lint.facts import Facts, facts_of

# (key or section, why it has no effect)
Unused = tuple[str, str]


def ineffective(loaded: Loaded, num_gpus: int | None = None) -> list[tuple[str, str]]:
    """(key, reason) for every key that the user set and that has no effect, in the order of the schema."""
    facts = facts_of(loaded, num_gpus)
    # First collect keys without effect in this config, then report those that the user set.
    idle = [
        pair
        for rule in (_supervised, _objective, _policies, _rewards, _engines, _sampling, _rest)
        for pair in rule(facts)
    ]
    found: dict[str, str] = {}
    for key in _chosen(loaded):
        for name, why in idle:
            if key == name or key.startswith(name + "."):
                found.setdefault(key, why)
    return list(found.items())


def _chosen(loaded: Loaded) -> list[str]:
    """The keys that the user chose. In a run's config.yaml, which sets every key: those off their default."""
    given = [key for key in loaded.origins if loaded.is_set(key)]
    # A config.yaml of a run sets every key, so `is_set` does not show what its user chose.
    if len(given) < len(loaded.origins) / 2:
        return given
    defaults = {key: known_keys()[key].default for key in given}
    return [key for key in given if defaults[key] is not None and value_of(loaded.config, key) != defaults[key]]


def _supervised(f: Facts) -> Iterator[Unused]:
    if not is_supervised(f.config):
        return
    for key in ("importance_sampling_level", "use_decoupled_loss", "rejection_sampling", "prox_logp_method"):
        yield f"actor.{key}", "supervised fine-tuning has no importance ratio"
    for key in ("reward_norm", "adv_norm", "reward_bias", "reward_scaling", "reward_clip", "overlong_reward_penalty"):
        yield f"actor.{key}", "supervised fine-tuning has no rewards; an evaluation does not change them"
    for key in ("max_head_offpolicyness", "dynamic_filter_fn"):
        yield f"rollout.{key}", "supervised fine-tuning samples nothing for training"


def _objective(f: Facts) -> Iterator[Unused]:
    actor, own = f.actor, GATES[f.objective["gate"]]
    # A function of the user may ask for any key.
    for gate in () if f.objective["of_user"] else GATES.values():
        keys = [setting.key for setting in gate.settings.values() if setting.key] if gate is not own else []
        for key in keys:
            if not (key == "eps_clip" and actor.eps_clip == "auto"):  # auto without clipping is an error already
                yield f"actor.{key}", gate.unused.format(name=f.objective["name"])
    if actor.zero_variance_groups != "refill" and f.config.rollout.dynamic_filter_fn is None:
        yield "actor.max_refills", f"actor.zero_variance_groups is {actor.zero_variance_groups}, not refill"


def _policies(f: Facts) -> Iterator[Unused]:
    actor = f.actor
    if not f.objective["corrected"]:
        yield "actor.rejection_sampling", "the loss is not multiplied by π_old/μ (actor.use_decoupled_loss is false)"
    elif actor.rejection_sampling is not None and actor.rejection_sampling.level == "token":
        yield "actor.rejection_sampling.agg", "nothing is aggregated at level token"
    if f.objective["proximal"] != "rollout":
        why = f"π_old does not come from the sampler (actor.prox_logp_method is {actor.prox_logp_method})"
        yield "actor.prox_logp_force", why
    if f.num_updates == 1 and actor.routing_replay == "proximal":
        yield (
            "actor.routing_replay",
            "with one update per batch no pass follows that of π_old (actor.ppo_n_minibatches is 1)",
        )
    if not f.truncations:
        yield "actor.sampling_mask_replay", "gconfig.top_p, top_k and min_p keep the whole vocabulary"
    if actor.kl_loss_coef == 0 and actor.kl_ctl == 0:
        yield "actor.kl_estimator", "no KL is used (kl_loss_coef and kl_ctl are 0)"
        yield "ref", "no KL is used (kl_loss_coef and kl_ctl are 0), so the reference is not needed"
    if f.objective["advantage"] != "gae":
        for key in ("actor.gae_lambda", "critic"):
            yield key, f"{f.objective['name']} does not use GAE"


def _rewards(f: Facts) -> Iterator[Unused]:
    actor, reward = f.actor, f.config.reward
    if not actor.overlong_reward_penalty:
        yield "actor.overlong_tokens", "actor.overlong_reward_penalty is off"
    if reward.functions:
        for key, data in (("train_dataset", f.config.train_dataset), ("valid_dataset", f.config.valid_dataset)):
            if data is not None and any(source.reward for source in data.mixture):
                yield (
                    f"{key}.mixture",
                    "the rewards of its sources are not used: reward.functions overrides them for all rows",
                )
    if not reward.functions:
        yield "reward.weights", "reward.functions is empty, so the reward of the task is used"
    sources = [source.reward for source in f.config.train_dataset.mixture]
    if not actor.overlong_reward_penalty and max(map(len, [reward.functions, *sources])) < 2:
        yield "reward.normalize", "there is one reward, so its sum is the reward itself"
    elif f.objective["advantage"] in ("group_mean", "leave_one_out"):
        yield "reward.normalize", "this advantage is not divided by a std, so that it is the same for the sum"
    if not f.code_rewards:
        yield "reward.allow_unsandboxed_code", "no reward runs model-written code (`code`)"


def _engines(f: Facts) -> Iterator[Unused]:
    actor, config = f.actor, f.config
    if not actor.use_lora:
        yield from (
            (f"actor.{key}", "actor.use_lora is false") for key in ("lora_rank", "lora_alpha", "target_modules")
        )
    trainer = parse_backend(actor.backend, TRAINERS)
    alone = f.num_gpus * config.cluster.n_nodes <= 1 if trainer.name == "auto" else trainer.world == 1
    if alone and os.environ.get("WORLD_SIZE", "1") == "1":
        yield "actor.fsdp", "there is only one rank, which computes in actor.dtype"
    if actor.optimizer.type == "sgd":
        for name in ("beta1", "beta2", "eps", "offload"):
            yield f"actor.optimizer.{name}", "actor.optimizer.type is sgd"
    elif f.on_cpu:
        yield "actor.optimizer.offload", "the weights are in the host's memory already"
    for engine in EXTERNAL:
        if f.external_sampler != engine:
            yield engine, f"rollout.backend is {config.rollout.backend}, not {engine}"
    if f.in_process:
        yield "actor.weight_update_mode", "the sampler runs in the trainer's process"
    if (on := config.scheduler.type) != "slurm":
        yield "scheduler.slurm", f"scheduler.type is {on}, not slurm"
    if on == "local" and f.in_process:
        yield "scheduler.restarts", "the local launcher restarts sampler servers only, and there are none"


def _sampling(f: Facts) -> Iterator[Unused]:
    for section, values in (("gconfig", f.config.gconfig), ("eval_gconfig", f.config.eval_gconfig)):
        if values is not None and values.temperature == 0:
            why = f"{section}.temperature is 0, which takes the most likely token"
            yield from ((f"{section}.{key}", why) for key in ("top_p", "top_k", "min_p"))
    g = f.config.gconfig
    if g.min_new_tokens == g.max_new_tokens:
        idle = ("ignore_eos",) if any(isinstance(stop, str) for stop in g.stop) else ("ignore_eos", "stop")
        why = "min_new_tokens equals max_new_tokens, so no token ends a completion"
        yield from ((f"gconfig.{key}", why) for key in idle)


def _rest(f: Facts) -> Iterator[Unused]:
    config = f.config
    if config.total_train_steps is not None:
        yield "total_train_epochs", "total_train_steps is set"
    if config.train_dataset.mixture:
        for key in ("path", "size", "columns", "options"):
            yield f"train_dataset.{key}", "the sources of train_dataset.mixture replace it"
    if config.valid_dataset is not None and config.valid_dataset.mixture:
        yield "valid_dataset.path", "the sources of valid_dataset.mixture replace it"
    if not (config.env.path or config.env.agent):
        for key in ("env.options", "env.max_turns", "env.timeout", "env.turn_discount", "actor.sequence_unit"):
            yield key, "the config has no environment (env.path); only Trainer(env=…) would use it"
    if not f.sequence_level:
        yield "actor.sequence_unit", "every token has its own ratio"
    if isinstance(config.env.agent, list):
        yield "env.options", "a command receives the row only"
    if config.evaluator.freq_steps == 0:
        for key in ("evaluator.at_start", "evaluator.size", "evaluator.best"):
            yield key, "evaluation is switched off (evaluator.freq_steps is 0)"
