"""The input and the output of a lint rule: facts about a loaded config, and findings. Torch-free."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gspo.algorithms import GATES
from gspo.config import (
    Actor,
    Config,
    Engine,
    Generation,
    Loaded,
    ObjectiveSettings,
    effective_objective,
    engine_of,
    layout_of,
)
from gspo.system import visible_gpus


@dataclass(frozen=True)
class Finding:
    """One error or warning about a config.

    >>> print(Finding("error", "gconfig.n_samples", "run.yaml:3", "the advantage is always 0", "set it to 8"))
    gconfig.n_samples (run.yaml:3): the advantage is always 0. Remedy: set it to 8.
    """

    severity: Literal["warning", "error"]
    key: str
    where: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} ({self.where}): {self.message}. Remedy: {self.remedy}."


@dataclass(frozen=True)
class Facts:
    """A loaded config and values that several rules need."""

    loaded: Loaded
    objective: ObjectiveSettings
    num_gpus: int
    context: int | None = None  # tokens of the model's context, if it is known

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def actor(self) -> Actor:
        return self.loaded.config.actor

    @property
    def num_prompts(self) -> int:
        return self.config.train_dataset.batch_size

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.config.gconfig.n_samples

    @property
    def num_minibatches(self) -> int:
        return self.actor.ppo_n_minibatches or 1

    @property
    def num_updates(self) -> int:
        """Optimizer updates per rollout batch."""
        return self.num_minibatches * self.actor.ppo_epochs

    @property
    def max_staleness(self) -> int:
        """Weight versions that a sample may be behind the trainer."""
        return self.config.rollout.max_head_offpolicyness

    @property
    def sequence_level(self) -> bool:
        return self.objective["level"] != "token"

    @property
    def clips(self) -> tuple[float, float] | None:
        """(ε_low, ε_high) if they are fixed numbers; None without clipping and with eps_clip: auto.

        None for a function of the user, too: what it does with ε is not known.
        """
        objective = self.objective
        if not GATES[objective["gate"]].has_range or objective["eps_auto"] or objective["of_user"]:
            return None
        return self.objective["settings"]["clip_low"], self.objective["settings"]["clip_high"]

    @property
    def usual_eps(self) -> str:
        """ε of sequence ratios for completions of this length: the settings of docs/when_to_use.md."""
        longest = self.config.gconfig.max_new_tokens
        return "0.02" if longest <= 32 else "2e-3 … 2e-2" if longest <= 500 else "3e-4 and 4e-4"

    @property
    def truncations(self) -> list[str]:
        """The keys of gconfig that keep only a part of the vocabulary."""
        return truncations(self.config.gconfig)

    @property
    def replays_kept(self) -> bool:
        """Whether the trainer's log-probs are over the tokens that truncated sampling keeps."""
        return bool(self.truncations) and self.actor.sampling_mask_replay and self.engine.returns_kept

    @property
    def code_rewards(self) -> list[dict[str, Any]]:
        """The settings of every reward `code`, which runs model-written programs."""
        valid = self.config.valid_dataset
        sources = [*self.config.train_dataset.mixture, *(valid.mixture if valid else ())]
        entries = [*self.config.reward.functions, *(entry for source in sources for entry in source.reward)]
        named = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
        return [entry for entry in named if entry.get("name") == "code"]

    @property
    def on_cpu(self) -> bool:
        """Whether the run would train on this machine's CPU."""
        gpus = self.num_gpus if self.config.cluster.n_gpus_per_node is None else self.config.cluster.n_gpus_per_node
        return gpus == 0 and self.config.scheduler.type in (None, "local")

    @property
    def engine(self) -> Engine:
        """The engine of `rollout.backend`."""
        return engine_of(self.config)

    @property
    def external_sampler(self) -> str | None:
        """The name of the engine if it is not gspo's own."""
        return self.engine.name if self.engine.is_external else None

    @property
    def in_process(self) -> bool:
        """Whether the sampler runs in the trainer's process; with several GPUs `auto` starts servers instead."""
        return layout_of(self.config, self.num_gpus).sampler is None

    @property
    def dtype(self) -> str:
        if self.actor.dtype != "auto":
            return self.actor.dtype
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def longest(self) -> int | None:
        """Tokens of the longest possible sequence; None if the length of prompts is not limited."""
        generation, prompt = self.config.gconfig, self.config.train_dataset.max_length
        if generation.max_tokens is not None:
            return min(generation.max_tokens, (prompt or generation.max_tokens) + generation.max_new_tokens)
        return None if prompt is None else prompt + generation.max_new_tokens

    def error(self, key: str, message: str, remedy: str) -> Finding:
        return Finding("error", key, self.where(key), message, remedy)

    def warn(self, key: str, message: str, remedy: str) -> Finding:
        return Finding("warning", key, self.where(key), message, remedy)

    def where(self, key: str) -> str:
        try:
            return str(self.loaded.origin(key))
        except KeyError:
            return "default"


def truncations(gconfig: Generation) -> list[str]:
    cuts = {"top_p": gconfig.top_p < 1, "top_k": gconfig.top_k > 0, "min_p": gconfig.min_p > 0}
    return [key for key, is_on in cuts.items() if is_on]


def facts_of(loaded: Loaded, num_gpus: int | None = None, context: int | None = None) -> Facts:
    return Facts(loaded, effective_objective(loaded), visible_gpus() if num_gpus is None else num_gpus, context)


Rule = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, list[Rule]] = defaultdict(list)  # by module, in the order of definition


def rule(function: Rule) -> Rule:
    """Make a function a rule: `lint` calls it. Its file must be a subject of `lint`."""
    RULES[function.__module__].append(function)
    return function


Simple = Callable[[Facts], str | None]  # a rule about one key, with one remedy: what is wrong, or None


def error(key: str, remedy: str) -> Callable[[Simple], Rule]:
    """Make a function a rule that finds a contradiction."""
    return functools.partial(_rule_of, "error", key, remedy)


def warning(key: str, remedy: str) -> Callable[[Simple], Rule]:
    """Make a function a rule that finds a suspicious setting."""
    return functools.partial(_rule_of, "warning", key, remedy)


def _rule_of(severity: Literal["warning", "error"], key: str, remedy: str, function: Simple) -> Rule:
    @functools.wraps(function)
    def findings(f: Facts) -> Iterator[Finding]:
        if message := function(f):
            yield Finding(severity, key, f.where(key), message, remedy)

    return rule(findings)
