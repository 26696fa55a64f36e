"""From what was written to what will run: algorithm-aware defaults, π_old, and the effective objective.

Precedence: set by the user > importance_sampling_level > algorithm > default. A null that means "decide for me"
counts as unset. What depends on the device (`auto`) is left to the trainer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from gspo.algorithms import ALGORITHMS, CORRECTIONS, LEVEL_DEFAULTS, Algorithm
from gspo.config.backends import SAMPLERS, TRAINERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.loaded import Loaded, Origin
from gspo.config.schema import Config, Correction, Generation, Norm
from gspo.system.gpus import visible_gpus

DEFAULT = Origin("default")


class ProximalPolicy(NamedTuple):
    """Where π_old comes from, whether π_old/μ weighs the loss, and what the user should hear about it."""

    method: str  # auto, recompute, rollout or loglinear
    corrected: bool
    note: str = ""


def proximal_policy(
    recompute_logprob: bool | None, use_decoupled_loss: bool, prox_logp_method: str | None
) -> ProximalPolicy:
    """The truth table of docs/config.md.

    >>> proximal_policy(recompute_logprob=False, use_decoupled_loss=False, prox_logp_method=None)
    ProximalPolicy(method='rollout', corrected=False, note='')
    """
    if prox_logp_method in (None, "auto"):
        # AReaL recomputes for the decoupled loss whatever the switch says.
        if use_decoupled_loss or recompute_logprob:
            return ProximalPolicy("recompute", use_decoupled_loss)
        return ProximalPolicy("auto" if recompute_logprob is None else "rollout", False)
    note = ""
    if recompute_logprob is not None and prox_logp_method == ("rollout" if recompute_logprob else "recompute"):
        note = f"actor.recompute_logprob has no effect: actor.prox_logp_method {prox_logp_method} decides"
    if prox_logp_method == "rollout":
        if use_decoupled_loss:
            note = "actor.use_decoupled_loss has no effect: with prox_logp_method rollout π_old is μ, the weight is 1"
        return ProximalPolicy("rollout", False, note)
    return ProximalPolicy(prox_logp_method, use_decoupled_loss, note)


class Objective(TypedDict):
    """The objective that will run; `gspo.objectives.loss(name, …, **settings)` takes name and settings as they are."""

    name: str
    level: str  # token, sequence or sequence_token
    gate: str
    advantage: str  # the algorithm's, or what actor.reward_norm amounts to; "reward_norm" where that has no name
    aggregation: str
    settings: dict[str, Any]
    eps_auto: bool  # clip_low and clip_high are only where eps_clip: auto starts
    proximal: str  # auto, recompute, rollout or loglinear
    corrected: bool  # π_old/μ weighs the loss


def effective_objective(loaded: Loaded) -> Objective:
    """The objective of a resolved config.

    >>> from gspo.config import load
    >>> effective_objective(load(None, ["algorithm=gspo"]))["settings"]["clip_high"]
    0.0004
    """
    config, actor = loaded.config, loaded.config.actor
    algorithm = ALGORITHMS[str(config.algorithm)]
    level = _level(algorithm, actor.importance_sampling_level)
    settings: dict[str, Any] = {"level": level, "aggregation": actor.loss_aggregation}
    low, high = _clip(algorithm, level)
    if algorithm.gate == "clip":
        auto = actor.eps_clip == "auto"
        settings["clip_low"] = low if auto else actor.eps_clip
        settings["clip_high"] = high if auto else actor.eps_clip_higher
        settings["dual_clip"] = actor.c_clip
    elif algorithm.gate == "cispo":
        settings["weight_max"] = actor.cispo_weight_max
    elif algorithm.gate == "sapo":
        settings |= {"tau_pos": actor.sapo_tau_pos, "tau_neg": actor.sapo_tau_neg}
    elif algorithm.gate == "gmpo":
        settings |= {"log_clip_low": actor.gmpo_log_clip, "log_clip_high": actor.gmpo_log_clip}
    proximal = proximal_policy(actor.recompute_logprob, actor.use_decoupled_loss, actor.prox_logp_method)
    settings["kl_coef"] = actor.kl_loss_coef
    settings["kl_estimator"] = actor.kl_estimator or "k3"
    settings["correction"] = _correction_form(actor.rejection_sampling, level) if proximal.corrected else None
    if actor.loss_aggregation == "token_sum":
        settings["max_new_tokens"] = actor.max_new_tokens
    return Objective(
        name=algorithm.name,
        level=level,
        gate=algorithm.gate,
        advantage=_advantage(algorithm, actor.reward_norm),
        aggregation=str(actor.loss_aggregation),
        settings=settings,
        eps_auto=algorithm.gate == "clip" and actor.eps_clip == "auto",
        proximal=proximal.method,
        corrected=proximal.corrected,
    )


def _level(algorithm: Algorithm, chosen: str | None) -> str:
    """The ratio level; gspo_token's own counts as `sequence` in the key, which has only two values.

    On top of GAE, `sequence` is GSPO-token's form: a ratio per sequence that keeps the advantage of each token.
    """
    own = "token" if algorithm.level == "token" else "sequence"
    if chosen in (None, own):
        return algorithm.level
    return "sequence_token" if chosen == "sequence" and algorithm.advantage == "gae" else str(chosen)


def _clip(algorithm: Algorithm, level: str) -> tuple[float | None, float | None]:
    source = algorithm.settings if level == algorithm.level else LEVEL_DEFAULTS[level]
    return source.get("clip_low"), source.get("clip_high")


def _correction_form(correction: Correction | None, level: str) -> dict[str, Any]:
    # Without bounds the weight π_old/μ itself: a truncation that never bites. Of a sequence it is the geometric mean
    # over tokens, as its ratio is: a product collapses with length.
    own = "token" if level == "token" else "sequence"
    form = correction if correction is not None else Correction(level=own, action="clamp", upper=None)
    return form.model_dump(exclude={"preset"})  # its values are in the other keys by now


_NAMED_NORMS = {
    "group_std": {"mean_level": "group", "mean_leave1out": False, "std_level": "group"},
    "group_mean": {"mean_level": "group", "mean_leave1out": False, "std_level": None},
    "leave_one_out": {"mean_level": "group", "mean_leave1out": True, "std_level": None},
    "batch": {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch"},
}


def _advantage(algorithm: Algorithm, norm: Norm | None) -> str:
    if norm is None or algorithm.advantage == "gae":
        return algorithm.advantage
    if norm.eps == 0 and (norm.std_unbiased or norm.std_level is None):
        shape = {name: getattr(norm, name) for name in ("mean_level", "mean_leave1out", "std_level")}
        for name, named in _NAMED_NORMS.items():
            if shape == named:
                return name
    return "reward_norm"


def resolve(config: Config, origins: dict[str, Origin], problems: list[str], messages: list[str]) -> None:
    """Make a checked config concrete, in place; `origins` follows."""
    if config.algorithm is not None and config.algorithm not in ALGORITHMS:
        near = difflib.get_close_matches(config.algorithm, ALGORITHMS, n=1)
        problems.append(
            f"{origins['algorithm']}: algorithm must be one of {', '.join(ALGORITHMS)}, got {config.algorithm!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
        return
    work = _Resolver(config, origins, problems, messages)
    work.names()
    work.objective()
    work.proximal()
    work.actor()
    work.sections()
    work.backends()


@dataclass
class _Resolver:
    config: Config
    origins: dict[str, Origin]
    problems: list[str]
    messages: list[str]

    def fill(self, key: str, value: Any, origin: Origin) -> None:
        """Give a key that is null its value."""
        owner, name = _owner(self.config, key)
        if getattr(owner, name) is None and value is not None:
            self.override(key, value, origin)

    def override(self, key: str, value: Any, origin: Origin) -> None:
        owner, name = _owner(self.config, key)
        object.__setattr__(owner, name, value)  # no one else has this config yet
        self.origins[key] = origin

    def fill_from(self, key: str, source: str) -> None:
        owner, name = _owner(self.config, source)
        self.fill(key, getattr(owner, name), Origin("derived", f"from {source}"))

    def is_set(self, key: str) -> bool:
        return key in self.origins and self.origins[key].by_user

    def place(self, key: str) -> str:
        return str(self.origins[key])

    def names(self) -> None:
        for key in ("experiment_name", "trial_name"):
            name = getattr(self.config, key)
            if not re.fullmatch(r"[^/\\\x00-\x1f]+", name) or name in (".", "..") or len(name) > 200:
                self.problems.append(
                    f"{self.place(key)}: {key} must be usable as one folder name, got {name[:80]!r}; "
                    "use letters, digits, - and _"
                )

    def objective(self) -> None:
        config, actor = self.config, self.config.actor
        if config.algorithm is None:
            why = Origin("derived", "from critic") if config.critic is not None else DEFAULT
            self.fill("algorithm", "ppo" if config.critic is not None else "grpo", why)
        algorithm = ALGORITHMS[str(config.algorithm)]
        by_algorithm = Origin("algorithm", algorithm.name)
        level = _level(algorithm, actor.importance_sampling_level)
        changed = level != algorithm.level
        if algorithm.gate == "gmpo" and changed:
            self.problems.append(
                f"{self.place('actor.importance_sampling_level')}: actor.importance_sampling_level must be sequence "
                f"with algorithm gmpo, a geometric mean over the sequence, got {level}; remove it, or choose grpo"
            )
        self.fill("actor.importance_sampling_level", "token" if level == "token" else "sequence", by_algorithm)
        by_level = Origin("level", level) if changed else by_algorithm
        aggregation = LEVEL_DEFAULTS[level]["aggregation"] if changed else algorithm.aggregation
        self.fill("actor.loss_aggregation", aggregation, by_level)
        if algorithm.gate == "clip":
            low, high = _clip(algorithm, level)
            if actor.eps_clip == "auto":
                if actor.eps_clip_higher is not None:
                    self.problems.append(
                        f"{self.place('actor.eps_clip_higher')}: actor.eps_clip_higher cannot be set with "
                        "actor.eps_clip: auto, which steers both; set actor.eps_clip_auto.high_over_low instead"
                    )
            elif actor.eps_clip is not None:
                self.fill_from("actor.eps_clip_higher", "actor.eps_clip")
            else:
                self.fill("actor.eps_clip", low, by_level)
                self.fill("actor.eps_clip_higher", high, by_level)
        self.fill("actor.ppo_n_minibatches", algorithm.minibatches, by_algorithm)
        self.fill("actor.zero_variance_groups", algorithm.zero_variance_groups, by_algorithm)
        self.fill("actor.overlong_reward_penalty", algorithm.overlong_penalty, by_algorithm)
        self.override("actor.use_sapo_loss", algorithm.name == "sapo", Origin("derived", "from algorithm"))
        self.override("actor.use_cispo_loss", algorithm.name == "cispo", Origin("derived", "from algorithm"))
        self.fill("actor.fp32_lm_head", level != "token", Origin("derived", "from actor.importance_sampling_level"))

    def proximal(self) -> None:
        actor = self.config.actor
        if actor.rejection_sampling is not None:
            self.correction(actor.rejection_sampling)
            if not actor.use_decoupled_loss and not self.is_set("actor.use_decoupled_loss"):
                self.override("actor.use_decoupled_loss", True, Origin("derived", "from actor.rejection_sampling"))
                self.messages.append(
                    "actor.use_decoupled_loss is true because actor.rejection_sampling bounds its weight"
                )
            elif not actor.use_decoupled_loss:
                self.messages.append(
                    f"{self.place('actor.use_decoupled_loss')}: actor.rejection_sampling has no effect, "
                    "because actor.use_decoupled_loss is false"
                )
        chosen = proximal_policy(actor.recompute_logprob, actor.use_decoupled_loss, actor.prox_logp_method)
        if chosen.note:
            self.messages.append(chosen.note)
        source = "actor.use_decoupled_loss" if actor.use_decoupled_loss else "actor.recompute_logprob"
        origin = Origin("derived", f"from {source}") if self.is_set(source) else DEFAULT
        if chosen.method == "auto" and self.config.rollout.max_head_offpolicyness > 0:
            # The noise of stale samples is drift, not noise: it cannot say whether the sampler may serve as π_old.
            chosen = chosen._replace(method="recompute")
            origin = Origin("derived", "from rollout.max_head_offpolicyness")
        if chosen.method == "auto" and actor.routing_replay == "proximal":
            # What is replayed are the routes of π_old's own forward: there must be one.
            chosen = chosen._replace(method="recompute")
            origin = Origin("derived", "from actor.routing_replay")
        if actor.prox_logp_method in (None, "auto") and actor.prox_logp_method != chosen.method:
            self.override("actor.prox_logp_method", chosen.method, origin)
        if chosen.method != "auto" and actor.recompute_logprob != (chosen.method == "recompute"):
            origin = Origin("derived", "from actor.prox_logp_method")
            self.override("actor.recompute_logprob", chosen.method == "recompute", origin)

    def correction(self, correction: Correction) -> None:
        prefix = "actor.rejection_sampling."
        for name, value in CORRECTIONS.get(correction.preset or "", {}).items():
            if not self.is_set(prefix + name):
                self.override(prefix + name, value, Origin("derived", f"preset {correction.preset}"))
        if correction.action == "clamp" and correction.metric != "ratio":
            self.problems.append(
                f"{self.place(prefix + 'action')}: {prefix}action clamp truncates the ratio and cannot use metric "
                f"{correction.metric}; set action: mask, or metric: ratio"
            )
        low, high = correction.lower, correction.upper
        if low is not None and high is not None and low > high:
            self.problems.append(
                f"{self.place(prefix + 'lower')}: {prefix}lower {low:g} is above {prefix}upper {high:g}; swap them"
            )
        if correction.metric == "ratio" and ((low is not None and low > 1) or (high is not None and high < 1)):
            self.problems.append(
                f"{self.place(prefix + 'upper')}: {prefix}lower and upper must enclose 1, the ratio of equal policies, "
                f"got [{low}, {high}]; otherwise on-policy samples are dropped"
            )

    def actor(self) -> None:
        config, actor = self.config, self.config.actor
        self.fill_from("actor.temperature", "gconfig.temperature")
        self.fill_from("actor.max_new_tokens", "gconfig.max_new_tokens")
        fifth = max(1, config.gconfig.max_new_tokens // 5)
        self.fill("actor.overlong_tokens", fifth, Origin("derived", "from gconfig.max_new_tokens"))
        lora = Origin("derived", "from actor.use_lora")
        self.fill("actor.optimizer.lr", 1e-5 if actor.use_lora else 1e-6, lora if actor.use_lora else DEFAULT)
        for name in ("reward_norm", "adv_norm"):
            norm: Norm | None = getattr(actor, name)
            if norm is None or norm.group_size in (None, config.gconfig.n_samples):
                continue
            where, key = self.place(f"actor.{name}.group_size"), f"actor.{name}.group_size"
            if "group" in (norm.mean_level, norm.std_level):
                self.problems.append(
                    f"{where}: {key} is {norm.group_size} but gconfig.n_samples is {config.gconfig.n_samples}; a group "
                    "is one prompt's samples: remove it, or set both to the same number"
                )
            else:
                self.messages.append(f"{where}: {key} has no effect without a group level in actor.{name}")

    def sections(self) -> None:
        config = self.config
        self.fill_from("tokenizer_path", "actor.path")
        self.fill_from("rollout.consumer_batch_size", "train_dataset.batch_size")
        ahead = (config.rollout.max_head_offpolicyness + 1) * (config.rollout.consumer_batch_size or 1)
        self.fill("rollout.queue_size", ahead, Origin("derived", "from rollout.max_head_offpolicyness"))
        self.fill("scheduler.type", "local", DEFAULT)
        self.fill("train_dataset.split", "train", DEFAULT)
        self.fill_from("stats_logger.wandb.project", "experiment_name")
        if config.valid_dataset is not None:
            self.fill("valid_dataset.split", "test", DEFAULT)
        if config.ref is not None:
            self.fill_from("ref.path", "actor.path")
        if config.critic is not None:
            self.fill_from("critic.path", "actor.path")
            self.fill_from("critic.ppo_n_minibatches", "actor.ppo_n_minibatches")
            self.fill("critic.optimizer.lr", 1e-5, DEFAULT)
        self.evaluation()

    def evaluation(self) -> None:
        """Evaluation samples once and greedily unless its section says how; lengths and stops as in training."""
        config = self.config
        given = {name for name in Generation.model_fields if self.is_set(f"eval_gconfig.{name}")}
        greedy = not given & {"n_samples", "temperature", "top_p", "top_k"}
        usual = config.gconfig.model_dump() | {"n_samples": 1, "greedy": greedy}
        if config.eval_gconfig is None:
            object.__setattr__(config, "eval_gconfig", Generation())
            self.origins.pop("eval_gconfig", None)
        for name, value in usual.items():
            if name not in given:
                source = "default" if name in ("n_samples", "greedy") else f"from gconfig.{name}"
                self.override(
                    f"eval_gconfig.{name}", value, DEFAULT if source == "default" else Origin("derived", source)
                )

    def backends(self) -> None:
        for key, names in (("rollout.backend", SAMPLERS), ("actor.backend", TRAINERS)):
            owner, name = _owner(self.config, key)
            try:
                parse_backend(getattr(owner, name), names)
            except ValueError as error:
                self.problems.append(f"{self.place(key)}: {key}: {error}")
        auto = [
            key
            for key, text in (
                ("rollout.backend", self.config.rollout.backend),
                ("actor.backend", self.config.actor.backend),
            )
            if text == "auto"
        ]
        if auto and not self.problems:
            layout = layout_of(self.config, visible_gpus())
            where = "on the first CUDA device, in bfloat16" if visible_gpus() else "on this CPU, in float32"
            one = f"is one process here, sampling and training {where}"
            self.messages.append(f"{' and '.join(auto)}: auto {one if layout.is_one_process else f'means {layout}'}")


def _owner(config: Config, key: str) -> tuple[Any, str]:
    section, _, name = key.rpartition(".")
    owner: Any = config
    for part in section.split(".") if section else ():
        owner = getattr(owner, part)
    return owner, name


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; None below a null section.

    >>> value_of(Config(), "gconfig.n_samples"), value_of(Config(), "ref.path")
    (8, None)
    """
    value: Any = config
    for part in key.split("."):
        if value is None:
            return None
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value
