"""Fill in what the user left unset: defaults of the algorithm, of the ratio level, and values of other keys.

Precedence: set by the user > importance_sampling_level > algorithm > default. null counts as unset if the key leaves
the decision to gspo. Values that depend on the device (`auto`) are left to the trainer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.algorithms import ALGORITHMS, CORRECTIONS, GATES, LEVEL_DEFAULTS, algorithm_of, is_function
from gspo.config.backends import SAMPLERS, TRAINERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.loaded import Origin
from gspo.config.objective import default_clip_range, level_of, proximal_policy
from gspo.config.schema import Config, Correction, EvalGeneration, Section
from gspo.config.schema.dataset import ENVIRONMENT_ROWS
from gspo.system.gpus import visible_gpus

DEFAULT = Origin("default")
WITH_ROWS = ("gymnasium:", "openenv:", "verifiers:")  # environments that bring their own problems


def resolve(config: Config, origins: dict[str, Origin], problems: list[str], messages: list[str]) -> Config:
    """The config with all unset keys filled in; `origins` is updated in place."""
    if config.algorithm is not None and not (config.algorithm in ALGORITHMS or is_function(config.algorithm)):
        # Nearly all defaults depend on the algorithm, so nothing can be filled in without it.
        near = difflib.get_close_matches(config.algorithm, ALGORITHMS, n=1)
        problems.append(
            f"{origins['algorithm']}: algorithm must be one of {', '.join(ALGORITHMS)}, or a function of yours "
            f"(file.py:function), got {config.algorithm!r}" + (f"; did you mean {near[0]}?" if near else "")
        )
        return config
    work = _Resolver(config, origins, problems, messages)
    # The objective first: later sections copy values that it fills in (for example actor.ppo_n_minibatches).
    work.check_names()
    work.fill_objective()
    work.fill_proximal()
    work.fill_actor()
    work.fill_sections()
    work.fill_evaluation()
    work.check_backends()
    return _updated(config, work.values)


def _updated(section: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a section with other values, by dotted key."""
    # Keys of this section, then those of its subsections, each updated recursively.
    own = {key: value for key, value in values.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(head, {})[rest] = value
    own |= {head: _updated(own.get(head, getattr(section, head)), below) for head, below in inner.items()}
    return section.model_copy(update=own)


@dataclass
class _Resolver:
    """Collects the values that replace unset ones; the config that was loaded stays as it is."""

    config: Config
    origins: dict[str, Origin]
    problems: list[str]
    messages: list[str]
    values: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else value_of(self.config, key)

    def put(self, key: str, value: Any, origin: Origin) -> None:
        self.values[key] = value
        self.origins[key] = origin

    def fill(self, key: str, value: Any, origin: Origin) -> None:
        """Give a key that is null a value."""
        if self.get(key) is None and value is not None:
            self.put(key, value, origin)

    def fill_from(self, key: str, source: str) -> None:
        self.fill(key, self.get(source), Origin("derived", f"from {source}"))

    def is_set(self, key: str) -> bool:
        return key in self.origins and self.origins[key].by_user

    def place(self, key: str) -> str:
        return str(self.origins[key])

    def check_names(self) -> None:
        for key in ("experiment_name", "trial_name"):
            name = self.get(key)
            if not re.fullmatch(r"[^/\\\x00-\x1f]+", name) or name in (".", "..") or len(name) > 200:
                self.problems.append(
                    f"{self.place(key)}: {key} must be usable as one folder name, got {name[:80]!r}; "
                    "use letters, digits, - and _"
                )

    def fill_objective(self) -> None:
        has_critic = self.config.critic is not None
        by_critic = Origin("derived", "from critic") if has_critic else DEFAULT
        self.fill("algorithm", "ppo" if has_critic else "grpo", by_critic)
        # The defaults of the algorithm hold for its own ratio level. If the user chose another level, the clip range
        # and the aggregation come from that level, because ε of a token ratio and of a sequence ratio differ by orders
        # of magnitude.
        algorithm = algorithm_of(self.get("algorithm"), has_critic=has_critic)
        by_algorithm = Origin("algorithm", algorithm.name)
        level = level_of(algorithm, self.get("actor.importance_sampling_level"))
        is_other_level = level != algorithm.level
        if GATES[algorithm.gate].level not in (None, level):
            self.problems.append(
                f"{self.place('actor.importance_sampling_level')}: actor.importance_sampling_level must be "
                f"{GATES[algorithm.gate].level} with algorithm {algorithm.name}, which takes a mean over the sequence "
                f"inside its gate, got {level}; remove it, or choose algorithm: grpo"
            )
        by_level = Origin("level", level) if is_other_level else by_algorithm
        aggregation = LEVEL_DEFAULTS[level]["aggregation"] if is_other_level else algorithm.aggregation
        self.fill("actor.importance_sampling_level", "token" if level == "token" else "sequence", by_algorithm)
        self.fill("actor.loss_aggregation", aggregation, by_level)
        if GATES[algorithm.gate].has_range:
            self.fill_clip_range(*default_clip_range(algorithm, level), by_level)
        self.fill("actor.ppo_n_minibatches", algorithm.minibatches, by_algorithm)
        self.fill("actor.zero_variance_groups", algorithm.zero_variance_groups, by_algorithm)
        self.fill("actor.overlong_reward_penalty", algorithm.overlong_penalty, by_algorithm)
        if algorithm.supervised:
            # A row has one completion, and no π_old is needed, so no pass computes it.
            if not self.is_set("gconfig.n_samples"):
                self.put("gconfig.n_samples", 1, by_algorithm)
            self.fill("actor.prox_logp_method", "rollout", by_algorithm)
        # Sequence ratios are clipped within a very narrow range, which rounding of the logits could exceed.
        self.fill("actor.fp32_lm_head", level != "token", Origin("derived", "from actor.importance_sampling_level"))

    def fill_clip_range(self, low: float | None, high: float | None, origin: Origin) -> None:
        eps = self.get("actor.eps_clip")
        if eps == "auto":
            if self.get("actor.eps_clip_higher") is not None:
                self.problems.append(
                    f"{self.place('actor.eps_clip_higher')}: actor.eps_clip_higher cannot be set with actor.eps_clip: "
                    "auto, which adjusts both; remove one of them"
                )
        # The user set one ε only: the range is symmetric, and the algorithm's upper ε does not apply.
        elif eps is not None:
            self.fill_from("actor.eps_clip_higher", "actor.eps_clip")
        else:
            self.fill("actor.eps_clip", low, origin)
            self.fill("actor.eps_clip_higher", high, origin)

    def fill_proximal(self) -> None:
        actor = self.config.actor
        is_decoupled = actor.use_decoupled_loss
        if actor.rejection_sampling is not None:
            self.fill_correction(actor.rejection_sampling)
            if not is_decoupled and not self.is_set("actor.use_decoupled_loss"):
                is_decoupled = True
                self.put("actor.use_decoupled_loss", True, Origin("derived", "from actor.rejection_sampling"))
                self.messages.append("actor.use_decoupled_loss is true because actor.rejection_sampling is set")
            elif not is_decoupled:
                self.messages.append(
                    f"{self.place('actor.use_decoupled_loss')}: actor.rejection_sampling has no effect, "
                    "because actor.use_decoupled_loss is false"
                )
        if is_decoupled and actor.prox_logp_method == "rollout":
            self.messages.append(
                "actor.use_decoupled_loss has no effect: with prox_logp_method rollout π_old is μ and the weight is 1"
            )
        if self.values.get("actor.prox_logp_method") is not None:  # decided by the algorithm
            return
        method = proximal_policy(is_decoupled, actor.prox_logp_method).method
        # Only an `auto` or unset method is replaced below; a method that the user chose stays.
        by_loss = self.is_set("actor.use_decoupled_loss")
        origin = Origin("derived", "from actor.use_decoupled_loss") if by_loss else DEFAULT
        if method == "auto" and self.config.rollout.max_head_offpolicyness > 0:
            # Log-probs of stale samples differ by policy updates, so their difference does not measure sampler noise.
            method, origin = "recompute", Origin("derived", "from rollout.max_head_offpolicyness")
        if method == "auto" and actor.routing_replay == "proximal":
            # The expert routes of the trainer's π_old forward pass are replayed, so this pass must exist.
            method, origin = "recompute", Origin("derived", "from actor.routing_replay")
        if actor.prox_logp_method in (None, "auto") and actor.prox_logp_method != method:
            self.put("actor.prox_logp_method", method, origin)

    def fill_correction(self, correction: Correction) -> None:
        prefix = "actor.rejection_sampling."
        # The preset fills in only what the user did not set.
        for name, value in CORRECTIONS.get(correction.preset or "", {}).items():
            if name in Correction.model_fields and not self.is_set(prefix + name):
                self.put(prefix + name, value, Origin("derived", f"preset {correction.preset}"))
        action, metric, low, high = (self.get(prefix + name) for name in ("action", "metric", "lower", "upper"))
        # Then check the combination of preset and user values.
        if action == "clamp" and metric != "ratio":
            self.problems.append(
                f"{self.place(prefix + 'action')}: {prefix}action clamp truncates the ratio and cannot use metric "
                f"{metric}; set action: mask, or metric: ratio"
            )
        if low is not None and high is not None and low > high:
            self.problems.append(
                f"{self.place(prefix + 'lower')}: {prefix}lower {low:g} is above {prefix}upper {high:g}; swap them"
            )
        if metric == "ratio" and ((low is not None and low > 1) or (high is not None and high < 1)):
            self.problems.append(
                f"{self.place(prefix + 'upper')}: {prefix}lower and upper must enclose 1, the ratio of equal policies, "
                f"got [{low}, {high}]; otherwise on-policy samples are dropped"
            )

    def fill_actor(self) -> None:
        use_lora, algorithm = self.config.actor.use_lora, algorithm_of(self.get("algorithm"))
        fifth = max(1, self.config.gconfig.max_new_tokens // 5)
        self.fill("actor.overlong_tokens", fifth, Origin("derived", "from gconfig.max_new_tokens"))
        by_lora = Origin("derived", "from actor.use_lora") if use_lora else DEFAULT
        if algorithm.supervised:
            # Targets are known and do not move, so larger steps are stable.
            self.fill("actor.optimizer.lr", 1e-4 if use_lora else 1e-5, Origin("algorithm", algorithm.name))
        self.fill("actor.optimizer.lr", 1e-5 if use_lora else 1e-6, by_lora)

    def fill_sections(self) -> None:
        config = self.config
        self.fill_from("tokenizer_path", "actor.path")
        self.fill("scheduler.type", "local", DEFAULT)
        self.fill("train_dataset.split", "train", DEFAULT)
        if (config.env.path or "").startswith(WITH_ROWS) and not self.is_set("train_dataset.path"):
            self.put("train_dataset.path", ENVIRONMENT_ROWS, Origin("derived", "from env.path"))
        if config.valid_dataset is not None:
            self.fill("valid_dataset.split", "test", DEFAULT)
        if config.ref is not None:
            self.fill_from("ref.path", "actor.path")
        if config.critic is not None:
            self.fill_from("critic.path", "actor.path")
            self.fill("critic.optimizer.lr", 1e-5, DEFAULT)

    def fill_evaluation(self) -> None:
        """Evaluation takes one greedy sample unless eval_gconfig sets how to sample; lengths are those of training."""
        names = EvalGeneration.model_fields
        given = {name for name in names if self.is_set(f"eval_gconfig.{name}")}
        if self.config.eval_gconfig is None:
            self.values["eval_gconfig"] = EvalGeneration()
            self.origins.pop("eval_gconfig", None)
        # A user who sets any sampling parameter wants sampling; otherwise decoding is greedy.
        own = {"n_samples": 1} | ({} if given & {"n_samples", "top_p", "top_k", "min_p"} else {"temperature": 0.0})
        for name in names:
            if name in given:
                continue
            if name in own:
                self.put(f"eval_gconfig.{name}", own[name], DEFAULT)
            else:
                origin = Origin("derived", f"from gconfig.{name}")
                self.put(f"eval_gconfig.{name}", self.get(f"gconfig.{name}"), origin)

    def check_backends(self) -> None:
        for key, names in (("rollout.backend", SAMPLERS), ("actor.backend", TRAINERS)):
            try:
                parse_backend(self.get(key), names)
            except ValueError as error:
                self.problems.append(f"{self.place(key)}: {key}: {error}")
        auto = [key for key in ("rollout.backend", "actor.backend") if self.get(key) == "auto"]
        # `layout_of` needs valid backends.
        if auto and not self.problems:
            layout = layout_of(self.config, visible_gpus())
            device = "the first CUDA device, in bfloat16" if visible_gpus() else "this CPU, in float32"
            one = f"one process samples and trains on {device}"
            self.messages.append(f"{' and '.join(auto)}: auto; {one if layout.is_one_process else layout}")


def value_of(config: Section, key: str) -> Any:
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
