"""A loaded config, the defaults of its algorithm for keys that are unset, and the objective that results.

Precedence: set by the user > importance_sampling_level > algorithm > default. null counts as unset if the key leaves
the decision to gspo. Values that depend on the device (`auto`) are left to the trainer.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from gspo.algorithms import ALGORITHMS, CORRECTIONS, GATES, LEVEL_DEFAULTS, Algorithm, algorithm_of, is_function
from gspo.config.backends import SAMPLERS, TRAINERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.schema import ENVIRONMENT_ROWS, Config, Correction, EvalGeneration, Norm, RewardNorm, Section
from gspo.config.yaml_tree import AREAL, COMMAND_LINE, escape
from gspo.errors import ConfigError
from gspo.system import number, read_json, visible_gpus


@dataclass(frozen=True)
class Origin:
    """Who decided a key: the user (file or command line), the algorithm, the level, another key, or a default (of the
    schema, or AReaL's for a file of AReaL's).

    >>> str(Origin("file", "run.yaml:7")), str(Origin("algorithm", "gspo")), str(Origin("default"))
    ('run.yaml:7', 'algorithm gspo', 'default')
    """

    kind: Literal["file", "command line", "algorithm", "level", "derived", "default", "areal"]
    detail: str = ""

    def __str__(self) -> str:
        if self.kind in ("file", "derived", "areal"):
            return self.detail
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def by_user(self) -> bool:
        return self.kind in ("file", "command line")


def origin_of(place: str) -> Origin:
    if place == AREAL:
        return Origin("areal", place)
    return Origin("command line") if place == COMMAND_LINE else Origin("file", place)


def write_origins(origins: Mapping[str, Origin]) -> str:
    """The text of a run's origins.json: key → {"kind", "detail"}."""
    return json.dumps({key: asdict(origin) for key, origin in origins.items()}, indent=1, ensure_ascii=False) + "\n"


def read_origins(run: Path) -> dict[str, Origin]:
    """The origins that a run wrote; empty where it wrote none."""
    with contextlib.suppress(ConfigError, TypeError):
        written = read_json(run / "origins.json", ConfigError)
        return {key: Origin(**origin) for key, origin in written.items()}
    return {}


@dataclass(frozen=True)
class Loaded:
    """A resolved config. `origins` has every key that holds a value, and sections that are null.

    `messages` has one line for each foreign key that was translated or dropped, and for `backend: auto`.
    """

    config: Config
    origins: Mapping[str, Origin]
    messages: list[str]
    path: Path | None = None
    # What `lint.check` found, by the number of GPUs: a config is linted once. A copy by `replace` starts without it.
    findings: dict[int | None, list[Any]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def origin(self, key: str) -> Origin:
        """Who decided a key; of a section: the user where any of its keys is set."""
        if key in self.origins:
            return self.origins[key]
        inside = [origin for name, origin in self.origins.items() if name.startswith(key + ".")]
        if not inside:
            raise KeyError(key)
        return next((origin for origin in inside if origin.by_user), inside[0])

    def is_set(self, key: str) -> bool:
        """Whether the user set this key, or any key of this section; null where null means "decide for me" is unset."""
        try:
            return self.origin(key).by_user
        except KeyError:
            return False


def dump(loaded: Loaded) -> str:
    """The resolved config with every key and the origin of its value; `load` of it gives an equal config."""
    lines = ["# The resolved config: every key, and the origin of its value."]
    lines += _dump_section(loaded.config, "", "", loaded)
    return "\n".join(lines) + "\n"


def _dump_section(section: Any, prefix: str, indent: str, loaded: Loaded) -> Iterable[str]:
    for name, value in section:
        key = prefix + name
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _dump_section(value, key + ".", indent + "  ", loaded)
        else:
            origin = re.sub(r"[^\x20-\x7e\xa1-\ufefe]", "?", str(loaded.origins[key]))
            yield f"{indent}{name}: {written(value)}  # {origin}"


def written(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str):
        # Quotes are left out only where YAML reads the text as the same string.
        plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS
        return value if plain else _quoted(escape(value))
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(name))}: {written(child)}" for name, child in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _quoted(text: str) -> str:
    """Double quotes keep every text, line breaks and lone surrogates included."""

    def character(c: str) -> str:
        if c in '"\\':
            return "\\" + c
        return c if c.isprintable() else f"\\U{ord(c):08x}"

    return '"' + "".join(map(character, text)) + '"'


_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def config_fingerprint(config: Config) -> str:
    """A fingerprint of every value, whatever file or spelling it came from.

    >>> [config_fingerprint(Config(seed=seed)) == config_fingerprint(Config()) for seed in (1, 2)]
    [True, False]
    """
    return hashlib.sha256(json.dumps(config.model_dump(), sort_keys=True).encode()).hexdigest()


class ProximalPolicy(NamedTuple):
    """Where π_old comes from, and whether the loss is multiplied by π_old/μ."""

    method: str  # auto, recompute, rollout or loglinear
    corrected: bool


def proximal_policy(use_decoupled_loss: bool, prox_logp_method: str | None) -> ProximalPolicy:
    """The table of docs/config.md.

    >>> proximal_policy(use_decoupled_loss=True, prox_logp_method=None)
    ProximalPolicy(method='recompute', corrected=True)
    """
    if prox_logp_method in (None, "auto"):
        return ProximalPolicy("recompute" if use_decoupled_loss else "auto", use_decoupled_loss)
    # With π_old from the sampler π_old is μ, so the weight is 1.
    return ProximalPolicy(str(prox_logp_method), use_decoupled_loss and prox_logp_method != "rollout")


class ObjectiveSettings(TypedDict):
    """The objective of a run; `gspo.objectives.loss(name, …, **settings)` accepts name and settings as they are."""

    name: str
    level: str  # token, sequence or sequence_token
    gate: str
    advantage: str  # the algorithm's, or what the norms compute: a name of _advantage, "reward_norm" if it has none
    aggregation: str
    settings: dict[str, Any]
    eps_auto: bool  # eps_clip: auto; the run replaces clip_low and clip_high in every step
    proximal: str  # auto, recompute, rollout or loglinear
    corrected: bool  # the loss is multiplied by π_old/μ
    of_user: bool  # name is a function; level, gate and their settings are defaults that it may not use


def effective_objective(loaded: Loaded) -> ObjectiveSettings:
    """The objective of a resolved config.

    >>> from gspo.config import load
    >>> effective_objective(load(None, ["algorithm=gspo"]))["settings"]["clip_high"]
    0.0004
    """
    config, actor = loaded.config, loaded.config.actor
    algorithm = algorithm_in(config)
    gate = GATES[algorithm.gate]
    level = level_of(algorithm, actor.importance_sampling_level)
    settings: dict[str, Any] = {"level": level, "aggregation": actor.loss_aggregation}
    low, high = default_clip_range(algorithm, level)
    # Each gate has its own settings; the loss function accepts only those of its gate.
    auto = gate.has_range and actor.eps_clip == "auto"
    adjusted = {"clip_low": low, "clip_high": high} if auto else {}
    for name, setting in gate.settings.items():
        own = getattr(actor, setting.key) if setting.key else setting.default
        settings[name] = adjusted.get(name, own)
    proximal = proximal_policy(actor.use_decoupled_loss, actor.prox_logp_method)
    settings["kl_coef"] = actor.kl_loss_coef
    settings["kl_estimator"] = actor.kl_estimator or "k3"
    settings["entropy_coef"] = actor.entropy_coef
    # Without π_old/μ in the loss there is nothing to limit.
    settings["correction"] = _correction_settings(actor.rejection_sampling, level) if proximal.corrected else None
    if actor.loss_aggregation == "token_sum":
        settings["max_new_tokens"] = config.gconfig.max_new_tokens
    return ObjectiveSettings(
        name=algorithm.name,
        level=level,
        gate=algorithm.gate,
        advantage=_advantage(algorithm, actor.reward_norm, actor.adv_norm),
        aggregation=str(actor.loss_aggregation),
        settings=settings,
        eps_auto=auto,
        proximal=proximal.method,
        corrected=proximal.corrected,
        of_user=algorithm.of_user,
    )


def same_as(objective: ObjectiveSettings) -> str | None:
    """The preset with exactly these parts: grpo with level sequence is gspo."""
    return None if objective["of_user"] else _preset_of(objective, "level", "gate", "advantage", "aggregation")


def _preset_of(objective: ObjectiveSettings, *parts: str) -> str | None:
    same = (a.name for a in ALGORITHMS.values() if all(getattr(a, part) == objective[part] for part in parts))
    return next(same, None)


def objective_words(loaded: Loaded) -> str:
    """The objective in one line, for the first line of a run.

    >>> from gspo.config import load
    >>> objective_words(load(None, ["algorithm=gspo", "actor.ppo_n_minibatches=2"]))
    'GSPO (one ratio per completion), clip 3e-4/4e-4, 2 updates per batch'
    """
    objective, actor = effective_objective(loaded), loaded.config.actor
    settings, name = objective["settings"], same_as(objective) or objective["name"]
    # Files of AReaL's have token_mean. That is DAPO's loss, but DAPO also samples groups again.
    is_other = same_as(objective) is None or name.upper() == "DAPO" != objective["name"].upper()
    near = _preset_of(objective, "level", "gate", "advantage") if is_other else None
    shown = f"{near.upper()} with {objective['aggregation']}" if near else name.upper()
    ratio = "one ratio per token" if objective["level"] == "token" else "one ratio per completion"
    parts = [f"{shown} ({ratio})"]
    if is_supervised(loaded.config):
        parts = [f"{shown} (likelihood of the data's completions)"]
    elif objective["of_user"]:
        parts = [f"{name} (an objective of your own)"]
    elif objective["eps_auto"]:
        parts.append("automatic clip range")
    elif GATES[objective["gate"]].has_range:
        parts.append(f"clip {number(settings['clip_low'])}/{number(settings['clip_high'])}")
    updates = (actor.ppo_n_minibatches or 1) * actor.ppo_epochs
    return ", ".join([*parts, f"{updates} update{'s' * (updates > 1)} per batch"])


def algorithm_in(config: Config) -> Algorithm:
    """The algorithm of a resolved config."""
    return algorithm_of(config.algorithm, has_critic=config.critic is not None)


def is_supervised(config: Config) -> bool:
    """Whether completions come from the data set; nothing is sampled for training."""
    return algorithm_in(config).supervised


def level_of(algorithm: Algorithm, chosen: str | None) -> str:
    """The ratio level of an algorithm with `actor.importance_sampling_level`.

    The key has two values; `sequence` does not change the level sequence_token of gspo_token. With GAE and a teacher,
    `sequence` means sequence_token: a ratio per sequence that keeps the advantage of each token.
    """
    own = "token" if algorithm.level == "token" else "sequence"
    if chosen in (None, own):
        return algorithm.level
    by_token = algorithm.advantage in ("gae", "teacher")
    return "sequence_token" if chosen == "sequence" and by_token else str(chosen)


def default_clip_range(algorithm: Algorithm, level: str) -> tuple[float | None, float | None]:
    """The default (ε_low, ε_high) of an algorithm at a level."""
    source = algorithm.settings if level == algorithm.level else LEVEL_DEFAULTS[level]
    return source.get("clip_low"), source.get("clip_high")


def _correction_settings(correction: Correction | None, level: str) -> dict[str, Any]:
    # Without actor.rejection_sampling the weight is π_old/μ without bounds. At sequence level it is the geometric mean
    # over tokens, like the ratio; a product of token ratios shrinks with length.
    own = "token" if level == "token" else "sequence"
    form = correction if correction is not None else Correction(level=own, action="clamp", upper=None)
    # resolve has copied the values of a preset to the keys; `only_negative` is not a key.
    only_negative = CORRECTIONS.get(form.preset or "", {}).get("only_negative", False)
    return {**form.model_dump(exclude={"preset"}), "only_negative": only_negative}


_NAMED_NORMS = {
    "group_std": {"mean_level": "group", "std_level": "group"},
    "group_mean": {"mean_level": "group", "std_level": None},
    "leave_one_out": {"mean_level": "leave1out", "std_level": None},
}
OVER_THE_BATCH = {"mean_level": "batch", "std_level": "batch"}  # actor.adv_norm of the advantage `batch`


def _advantage(algorithm: Algorithm, norm: RewardNorm | None, adv_norm: Norm | None) -> str:
    if norm is None or algorithm.advantage in ("gae", "teacher"):
        return algorithm.advantage
    # A known norm is shown by its name. The reward itself, normalised over the batch's tokens, is REINFORCE++.
    if norm == RewardNorm() and adv_norm is not None and adv_norm.model_dump() == OVER_THE_BATCH:
        return "batch"
    return next((name for name, named in _NAMED_NORMS.items() if norm.model_dump() == named), "reward_norm")


DEFAULT = Origin("default")


def default_algorithm(level: str | None, has_critic: bool) -> tuple[str, str]:
    """(algorithm, the key that decides it or "") of a config that sets none."""
    if has_critic:
        return "ppo", "critic"
    return ("grpo", "actor.importance_sampling_level") if level == "token" else ("gspo", "")


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
        name, cause = default_algorithm(self.get("actor.importance_sampling_level"), has_critic)
        self.fill("algorithm", name, Origin("derived", f"from {cause}") if cause else DEFAULT)
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
        if algorithm.advantage == "batch" and self.config.actor.adv_norm is None:
            self.values["actor.adv_norm"] = Norm()
            self.origins.pop("actor.adv_norm", None)
            for name, value in OVER_THE_BATCH.items():
                self.put(f"actor.adv_norm.{name}", value, by_algorithm)
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
