"""GSPOConfig: TRL's GRPOConfig with GSPO's defaults; and what is replaced in a plain GRPOConfig."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gspo.algorithms import ALGORITHMS, CLIP_RANGE, GATES, Algorithm
from gspo.errors import ConfigError
from trl import GRPOConfig  # pyright: ignore[reportPrivateImportUsage]

DEFAULTS = {each.name: each.default for each in fields(GRPOConfig)}
CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")  # loss types whose ratio is clipped to 1 ± ε
SAMPLERS = ("trl", "gspo")
LEVELS = ("token", "sequence", "sequence_token")
# What TRL's own loss adds and ours does not have.
ONLY_TRL = {
    "delta": None, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}  # fmt: skip


def _set(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class GSPOConfig(GRPOConfig):
    """TRL's GRPOConfig with sequence ratios, and what GSPOTrainer has beside TRL.

    importance_sampling_level, epsilon, epsilon_high and loss_type have GSPO's values (arXiv 2507.18071) unless they are
    set: "sequence", 3e-4, 4e-4 and "grpo". With importance_sampling_level="token" the last three are TRL's.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "objective_settings"]  # noqa: RUF012 - as in TRL

    importance_sampling_level: str = _set("sequence", "What has one ratio: sequence, token, or sequence_token.")
    # None until __post_init__, so that a value that is set to TRL's default is known to be set.
    epsilon: float = _set(None, "Lower ε. Default: 3e-4 for sequence ratios, else TRL's.")
    epsilon_high: float | None = _set(None, "Upper ε. Default: 4e-4 for sequence ratios if epsilon is not set.")
    loss_type: str = _set(None, "TRL's loss. Default: grpo for sequence ratios, else TRL's.")
    objective: str | None = _set(None, "An objective of gspo in place of loss_type: a name of `gspo objectives`, or "
                                       "file.py:function.")  # fmt: skip
    objective_settings: dict[str, Any] | str | None = _set(None, "Settings of the objective.")  # noqa: RUF009
    correction: str | None = _set(None, "Correction for the sampler's log-probs: tis, mis, seq_tis, icepop, …")
    per_turn: bool = _set(False, "One ratio per turn: a run of trained tokens between the tokens of tools.")
    sampler: str = _set("trl", "What generates completions: trl, or gspo (on a CPU).")
    run_dir: str | None = _set("auto", "Folder for gspo report, watch and compare. Default: OUTPUT_DIR/gspo; none: no "
                                       "folder.")  # fmt: skip

    def __post_init__(self) -> None:
        _one_of("importance_sampling_level", self.importance_sampling_level, LEVELS)
        _one_of("sampler", self.sampler, SAMPLERS)
        self.objective = self.objective or self._implied()
        preset = ALGORITHMS.get(self.objective or ("gspo" if self.importance_sampling_level != "token" else ""))
        eps = _eps(preset) if self.objective or self.loss_type in (None, *CLIPPED) else None
        is_token = self.importance_sampling_level == "token"
        low, high = eps or (DEFAULTS["epsilon"], DEFAULTS["epsilon_high"])
        chosen: dict[str, Any] = {"loss_type": DEFAULTS["loss_type"] if is_token else "grpo"}
        if self.epsilon is None:
            chosen |= {"epsilon": low, "epsilon_high": high}
        for name, value in chosen.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()
        self._check_objective(preset)

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.objective_settings is None else dict(self.objective_settings)  # pyright: ignore

    def _implied(self) -> str | None:
        """The objective that other fields need."""
        if self.importance_sampling_level == "sequence_token":
            return "gspo_token"
        if self.correction or self.per_turn or self.objective_settings:
            return "gspo" if self.importance_sampling_level == "sequence" else "grpo"
        return None

    def _check_objective(self, preset: Algorithm | None) -> None:
        if self.objective is None:
            return
        if preset is None and ":" not in self.objective:
            raise ConfigError(f"objective must be file.py:function or one of {', '.join(usable())}, got "
                              f"{self.objective!r}")  # fmt: skip
        if preset is not None and preset.name not in usable():
            raise ConfigError(f"objective={preset.name!r} needs advantages by {preset.advantage!r}, which TRL does not "
                              f"compute; use one of {', '.join(usable())}")  # fmt: skip
        theirs = [name for name, off in ONLY_TRL.items() if getattr(self, name) != off]
        if theirs:
            raise ConfigError(
                f"{', '.join(theirs)}: TRL's loss has it, objective={self.objective!r} does not; unset it, or set "
                "objective=None"
            )


def usable() -> list[str]:
    """The presets that need nothing but a reward."""
    return [name for name, each in ALGORITHMS.items() if each.advantage not in ("gae", "one", "teacher")]


def _eps(preset: Algorithm | None) -> tuple[float, float] | None:
    if preset is None or not GATES[preset.gate].has_range:
        return None
    low, high = (preset.settings[name] for name in CLIP_RANGE)
    return float(low), float(high)  # pyright: ignore[reportArgumentType]


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def settled(args: GRPOConfig, say: Callable[[str], None]) -> GRPOConfig:
    """The config that is used: a copy with GSPO's ε and loss where sequence ratios meet TRL's defaults for tokens.

    TRL's default ε of 0.2 is for token ratios: a sequence ratio, a mean over tokens, never reaches it. A value that was
    set to TRL's default cannot be told from one that was not set; GSPOConfig keeps both.
    """
    if isinstance(args, GSPOConfig) or args.importance_sampling_level != "sequence" or args.loss_type not in CLIPPED:
        return args
    low, high = ALGORITHMS["gspo"].settings["clip_low"], ALGORITHMS["gspo"].settings["clip_high"]
    new: dict[str, Any] = {}
    if (args.epsilon, args.epsilon_high) == (DEFAULTS["epsilon"], DEFAULTS["epsilon_high"]):
        new |= {"epsilon": low, "epsilon_high": high}
    if args.loss_type == DEFAULTS["loss_type"]:
        new["loss_type"] = "grpo"
    if not new:
        return args
    theirs = _words({name: DEFAULTS[name] for name in new})
    say(f"{_words(new)} (GSPO's) in place of {theirs}, TRL's defaults for token ratios; to use those with sequence "
        "ratios, set them in a gspo.trl.GSPOConfig")  # fmt: skip
    args = copy.copy(args)
    for name, value in new.items():
        setattr(args, name, value)
    return args


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
