"""A config of another trainer in our keys, for an explanation and not for training: trl.py and verl.py fill it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.lint import Finding
from gspo.migrate import foreign_keys

System = Literal["TRL", "verl", "ms-swift"]

# Our keys that take the value of the other system's key as it is, where the table of docs/migrating.md has no note.
COPIED = frozenset(
    {
        *(f"gconfig.{name}" for name in ("n_samples", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")),
        *(f"actor.{name}" for name in ("eps_clip", "eps_clip_higher", "sapo_tau_pos", "sapo_tau_neg")),
        *(f"actor.{name}" for name in ("path", "discount", "gae_lambda", "entropy_coef", "optimizer.lr")),
        "actor.optimizer.gradient_clipping",
    }
)


@dataclass
class Draft:
    """The translation of one config.

    >>> draft = Draft("TRL", "training_args.bin", {"epsilon": 0.2})
    >>> draft.copy()
    >>> draft.keys, draft.origins
    ({'actor.eps_clip': 0.2}, {'actor.eps_clip': 'epsilon (training_args.bin)'})
    """

    system: System
    file: str  # where the values come from
    values: Mapping[str, Any]  # theirs; sections are dotted names
    keys: dict[str, Any] = field(default_factory=dict)  # ours
    origins: dict[str, str] = field(default_factory=dict)  # our key → their key, and the file
    findings: list[Finding] = field(default_factory=list)  # about settings that our lint rules do not know
    notes: list[str] = field(default_factory=list)  # settings that change training and have no counterpart here
    num_updates: int = 1  # optimizer updates per rollout batch
    pi_old: str = ""  # where π_old comes from, in words
    unexplained: str = ""  # why the objective cannot be explained

    def get(self, name: str, default: Any = None) -> Any:
        """A value; numbers that YAML reads as text (1e-6) are numbers, and references (`${…}`) are not resolved."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            return default if value is None else value
        if "${" in value:
            return default
        try:
            return float(value)
        except ValueError:
            return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        return default if isinstance(value, bool) or not isinstance(value, int | float) else value

    def count(self, name: str, default: int) -> int:
        return int(self.number(name, default))

    def copy(self, names_of: System | None = None) -> None:
        """Take over every value whose key means the same here. `names_of`: the system whose names are used."""
        for (system, name), row in foreign_keys().items():
            value = self.get(name)
            if system == (names_of or self.system) and row.ours in COPIED and not row.note and value is not None:
                self.set(row.ours, value, name)

    def set(self, key: str, value: Any, theirs: str) -> None:
        self.keys[key] = value
        self.origins[key] = f"{theirs} ({self.file})"

    def unset(self, *keys: str) -> None:
        for key in keys:
            self.keys.pop(key, None)
            self.origins.pop(key, None)

    def warn(self, key: str, message: str, remedy: str) -> None:
        self.findings.append(Finding("warning", key, self.file, message, remedy))

    def note(self, name: str, harmless: tuple[Any, ...]) -> None:
        """Record a setting that is part of their training and not of the explanation."""
        value = self.values.get(name)
        if value is not None and value not in harmless:
            self.notes.append(f"{name}={value} is part of {self.system}'s training and not of this explanation")

    def normalise(self, mean: str | None, std: str | None, theirs: str) -> None:
        """The advantage as `actor.reward_norm`."""
        self.set("actor.reward_norm.mean_level", mean, theirs)
        self.set("actor.reward_norm.std_level", std, theirs)

    def whiten(self, theirs: str) -> None:
        """Advantages normalised over the batch's tokens."""
        self.set("actor.adv_norm.mean_level", "batch", theirs)
        self.set("actor.adv_norm.std_level", "batch", theirs)

    def correct(self, level: str, action: str, upper: float, theirs: str) -> None:
        """The weight π_old/μ as `actor.rejection_sampling`; for a sequence these systems multiply its token ratios."""
        self.set("actor.use_decoupled_loss", True, theirs)
        section = {"level": level, "action": action, "metric": "ratio", "upper": upper}
        for name, value in (section | ({"agg": "product"} if level == "sequence" else {})).items():
            self.set(f"actor.rejection_sampling.{name}", value, theirs)

    def truncate(self) -> None:
        """These systems differentiate the full distribution, whatever part of it they sample from."""
        if self.keys.get("gconfig.top_p", 1.0) < 1 or self.keys.get("gconfig.top_k") or self.keys.get("gconfig.min_p"):
            self.set("actor.sampling_mask_replay", False, f"{self.system} has no such replay")

    def batches(self, num_prompts: int, num_minibatches: int, num_epochs: int, theirs: tuple[str, str, str]) -> None:
        self.num_updates = num_minibatches * num_epochs
        self.set("train_dataset.batch_size", num_prompts, theirs[0])
        self.set("actor.ppo_n_minibatches", num_minibatches, theirs[1])
        self.set("actor.ppo_epochs", num_epochs, theirs[2])
