"""All objectives in one torch-free table.

Config, doctor, docs and `gspo.objectives` read this table; an algorithm's defaults and formula are defined nowhere
else. objective = ratio level x gate x advantage x aggregation (x correction, KL).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

Level = Literal["token", "sequence", "sequence_token"]
Advantage = Literal["group_std", "group_mean", "leave_one_out", "batch", "gae", "one", "teacher"]
Aggregation = Literal["sequence_mean", "sequence_sum", "token_mean", "token_sum"]

LEVELS: tuple[str, ...] = get_args(Level)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
CLIP_RANGE = ("clip_low", "clip_high")  # the settings that `actor.eps_clip: auto` adjusts


@dataclass(frozen=True)
class Setting:
    """One number of a gate: its default, the key of `actor` that sets it, and the numbers that it may be."""

    default: float | None  # None: off
    symbol: str  # in formulas without numbers
    key: str = ""  # of `actor`; "": no key sets it
    above: float = 0.0
    at_most: float = math.inf
    formula: str = ""  # added to the gate's formula if the setting is not off
    words: str = ""  # the same for its words


@dataclass(frozen=True)
class Gate:
    """How a ratio enters an objective. Texts are templates of the settings; formulas also of `ratio` and `A`.

    >>> GATES["sapo"].defaults
    {'tau_pos': 1.0, 'tau_neg': 1.05}
    """

    function: str  # module:function of (Ratio, **settings), which returns (g, clipped)
    short: str  # in the table of all objectives
    words: str  # in `gspo doctor`
    formula: str  # of one term of the sum
    settings: Mapping[str, Setting] = field(default_factory=dict)
    unused: str = ""  # why its keys have no effect with another gate; `name` is that algorithm
    level: str | None = None  # the only ratio level that it has; None: all
    by_token: bool = False  # it uses log π of each token, so that it is per token at every ratio level

    @property
    def defaults(self) -> dict[str, float | None]:
        return {name: setting.default for name, setting in self.settings.items()}

    @property
    def has_range(self) -> bool:
        """Whether it has a clip range, which `actor.eps_clip` sets and `auto` adjusts."""
        return CLIP_RANGE[0] in self.settings


# A gate is one entry here, and its function. Config, doctor, docs and `objectives.loss` read what it is from here.
GATES: Mapping[str, Gate] = MappingProxyType(
    {
        "clip": Gate(
            "gspo.objectives.surrogate:clip_gate",
            short="clip {clip_low}/{clip_high}",
            words="clipped to [1 − {clip_low}, 1 + {clip_high}]",
            formula="min( {ratio} {A} , clip({ratio}, 1−{clip_low}, 1+{clip_high}) {A} )",
            settings={
                # Ratios are positive, so 1 − ε_low is at least 0.
                "clip_low": Setting(0.2, "ε_low", "eps_clip", at_most=1.0),
                "clip_high": Setting(0.2, "ε_high", "eps_clip_higher"),
                # Below 1, the dual clip would remove the gradient at ratio 1, before the policy has moved.
                "dual_clip": Setting(
                    None,
                    "c",
                    "c_clip",
                    above=1.0,
                    formula=", for A < 0 not below {dual_clip} {A}",
                    words="; for A < 0 the ratio is at most {dual_clip} (dual clip)",
                ),
            },
            unused="{name} does not clip the ratio",
        ),
        "cispo": Gate(
            "gspo.objectives.surrogate:cispo_gate",
            short="weight ≤ {weight_max}",
            words="used as a constant weight of at most {weight_max}; every token keeps its gradient",
            formula="sg[min({ratio}, {weight_max})] {A} log π_θ(yᵢₜ)",
            settings={"weight_max": Setting(5.0, "w_max")},
            by_token=True,
        ),
        "sapo": Gate(
            "gspo.objectives.surrogate:sapo_gate",
            short="soft, τ {tau_pos}/{tau_neg}",
            words="through a soft gate, τ {tau_pos} for A > 0, else {tau_neg}",
            formula="(4/τ) σ(τ({ratio}−1)) {A}",
            settings={
                "tau_pos": Setting(1.0, "τ_pos", "sapo_tau_pos"),
                "tau_neg": Setting(1.05, "τ_neg", "sapo_tau_neg"),
            },
            unused="the algorithm is {name}, not sapo",
        ),
        "gmpo": Gate(
            "gspo.objectives.surrogate:gmpo_gate",
            short="band exp(±{log_clip_high})",
            words="each token's log-ratio is bounded at +{log_clip_high} for A > 0 and at −{log_clip_low} for A < 0",
            formula="Aᵢ exp( (1/|yᵢ|) Σₜ dᵢₜ ),   dᵢₜ = min(log wᵢₜ, {log_clip_high}) for A > 0, "
            "max(log wᵢₜ, −{log_clip_low}) for A < 0",
            settings={"log_clip_low": Setting(0.4, "c_low"), "log_clip_high": Setting(0.4, "c_high")},
            level="sequence",
        ),
        "none": Gate("gspo.objectives.surrogate:plain", short="none", words="not clipped", formula="{ratio} {A}"),
        "log": Gate(
            "gspo.objectives.surrogate:log_likelihood",
            short="log π",
            words="not used",
            formula="log π_θ(yᵢₜ),   yᵢ from the data set",
            by_token=True,
        ),
    }
)

EPS_KEYS = tuple(GATES["clip"].settings[name].key for name in CLIP_RANGE)  # of `actor`

# Settings of every objective.
COMMON_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0, "correction": None}
)

# Behavior corrections (`objectives/correction.py`) in canonical form. `only_negative` restricts a mask to A < 0.
CORRECTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tis": {"level": "token", "action": "clamp", "metric": "ratio", "upper": 2.0},
        "mis": {"level": "token", "action": "mask", "metric": "ratio", "upper": 2.0},
        # The whole sequence's importance weight, the product of its token ratios, truncated.
        "seq_tis": {"level": "sequence", "action": "clamp", "metric": "ratio", "agg": "product", "upper": 2.0},
        "icepop": {"level": "token", "action": "mask", "metric": "ratio", "lower": 0.5, "upper": 5.0},
        # Drop A < 0 where the mean of log(mu/pi) exceeds 0.05: the mean ratio pi/mu is below exp(-0.05).
        "sequence_mask": {
            "level": "sequence",
            "action": "mask",
            "metric": "ratio",
            "agg": "mean",
            "lower": 0.951229424500714,
            "upper": None,
            "only_negative": True,
        },
        "geometric": {
            "level": "sequence",
            "action": "mask",
            "metric": "ratio",
            "agg": "mean",
            "lower": 0.99,
            "upper": 1.001,
        },
    }
)

# Defaults that follow `actor.importance_sampling_level`, for keys that the user did not set.
LEVEL_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "token": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence_mean"},
        "sequence": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
        "sequence_token": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One objective. The defaults are those of GRPO.

    >>> ALGORITHMS["gspo"].settings["clip_high"]
    0.0004
    """

    name: str
    title: str
    level: Level = "token"
    gate: str  # of GATES
    advantage: Advantage = "group_std"
    aggregation: Aggregation = "sequence_mean"
    settings: Mapping[str, float | None]
    formula: str
    paper: str
    note: str = ""
    minibatches: int = 4
    zero_variance_groups: Literal["count", "drop", "refill"] = "count"
    overlong_penalty: bool = False
    supervised: bool = False  # the completions are those of the data set; nothing is sampled or rewarded
    of_user: bool = False  # a function of the user; its level, gate and settings are GSPO's defaults around it


_TOKEN_CLIP = "min( wᵢₜ Aᵢ , clip(wᵢₜ, 1−ε_low, 1+ε_high) Aᵢ )"
_TOKEN_RATIO = "wᵢₜ = π_θ(yᵢₜ)/π_old(yᵢₜ)"
_SEQ_RATIO = "sᵢ = exp( (1/|yᵢ|) Σₜ log π_θ(yᵢₜ)/π_old(yᵢₜ) )"


def _algorithm(name: str, gate: str = "clip", *, clip: tuple[float, float] | None = None, **fields: Any) -> Algorithm:
    settings = GATES[gate].defaults
    if clip is not None:
        settings["clip_low"], settings["clip_high"] = clip
    return Algorithm(name=name, gate=gate, settings=MappingProxyType(settings), **fields)


_TABLE = (
    _algorithm(
        "gspo",
        clip=(3e-4, 4e-4),
        title="Group Sequence Policy Optimization",
        level="sequence",
        formula=f"J = E (1/G) Σᵢ min( sᵢ Aᵢ , clip(sᵢ, 1−ε_low, 1+ε_high) Aᵢ ),   {_SEQ_RATIO}",
        paper="arXiv 2507.18071, eq. 5–7",
        note="One ratio per completion, clipped and rewarded per completion.",
    ),
    _algorithm(
        "gspo_token",
        clip=(3e-4, 4e-4),
        title="GSPO with token-level advantages",
        level="sequence_token",
        formula="J = E (1/G) Σᵢ (1/|yᵢ|) Σₜ min( sᵢₜ Aᵢₜ , clip(sᵢₜ, 1−ε_low, 1+ε_high) Aᵢₜ ),   "
        "sᵢₜ = sg[sᵢ] · π_θ(yᵢₜ)/sg[π_θ(yᵢₜ)]",
        paper="arXiv 2507.18071, eq. 13–17",
        note="Equal to gspo in value, clipping and gradient where Aᵢₜ = Aᵢ.",
    ),
    _algorithm(
        "grpo",
        title="Group Relative Policy Optimization",
        formula=f"J = E (1/G) Σᵢ (1/|yᵢ|) Σₜ {_TOKEN_CLIP},   {_TOKEN_RATIO}",
        paper="arXiv 2402.03300, eq. 3",
    ),
    _algorithm(
        "ppo",
        title="Proximal Policy Optimization",
        advantage="gae",
        aggregation="token_mean",
        formula=f"J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ {_TOKEN_CLIP.replace('Aᵢ', 'Aᵢₜ')},   {_TOKEN_RATIO},   Aᵢₜ by GAE",
        paper="arXiv 1707.06347, eq. 7",
        note="Needs a critic.",
    ),
    _algorithm(
        "dr_grpo",
        title="GRPO done right",
        advantage="group_mean",
        aggregation="token_sum",
        formula=f"J = E (1/(G·L)) Σᵢ Σₜ {_TOKEN_CLIP},   {_TOKEN_RATIO},   L = max_new_tokens",
        paper="arXiv 2503.20783, §3",
        note="No division by the group's std or the completion's length.",
    ),
    _algorithm(
        "dapo",
        clip=(0.2, 0.28),
        title="Decoupled clip and dynamic sampling",
        aggregation="token_mean",
        formula=f"J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ {_TOKEN_CLIP},   {_TOKEN_RATIO}",
        paper="arXiv 2503.14476, eq. 8",
        note="Groups of equal rewards are resampled; overlong completions are penalised.",
        zero_variance_groups="refill",
        overlong_penalty=True,
    ),
    _algorithm(
        "rloo",
        title="REINFORCE leave-one-out",
        advantage="leave_one_out",
        formula=f"J = E (1/G) Σᵢ (1/|yᵢ|) Σₜ {_TOKEN_CLIP},   {_TOKEN_RATIO},   Aᵢ = rᵢ − mean of the others",
        paper="arXiv 2402.14740, eq. 7",
    ),
    _algorithm(
        "reinforce_pp",
        title="REINFORCE++",
        advantage="batch",
        aggregation="token_mean",
        formula=f"J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ {_TOKEN_CLIP},   {_TOKEN_RATIO},   Aᵢ normalised over the batch",
        paper="arXiv 2501.03262",
    ),
    _algorithm(
        "luspo",
        clip=(2e-3, 2.5e-3),
        title="Length-unbiased sequence policy optimization",
        level="sequence",
        aggregation="sequence_sum",
        formula=f"J = E (1/G) Σᵢ |yᵢ| · min( sᵢ Aᵢ , clip(sᵢ, 1−ε_low, 1+ε_high) Aᵢ ),   {_SEQ_RATIO}",
        paper="arXiv 2602.05261",
        note="GSPO without the 1/|y| in the gradient.",
        minibatches=8,
    ),
    _algorithm(
        "gmpo",
        "gmpo",
        title="Geometric-mean policy optimization",
        level="sequence",
        formula="J = E (1/G) Σᵢ Aᵢ exp( (1/|yᵢ|) Σₜ dᵢₜ ),   dᵢₜ = min(log wᵢₜ, c_high) for A > 0, "
        "max(log wᵢₜ, −c_low) for A < 0",
        paper="arXiv 2507.20673, eq. 3",
        note="Each token's log-ratio is bounded on the side the sign of A allows.",
    ),
    _algorithm(
        "cispo",
        "cispo",
        title="Clipped importance-sampling policy optimization",
        aggregation="token_mean",
        formula=f"J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ sg[min(wᵢₜ, w_max)] Aᵢ log π_θ(yᵢₜ),   {_TOKEN_RATIO}",
        paper="arXiv 2506.13585, eq. 4",
        note="The weight is bounded, no token loses its gradient.",
    ),
    _algorithm(
        "sapo",
        "sapo",
        title="Soft adaptive policy optimization",
        formula=f"J = E (1/G) Σᵢ (1/|yᵢ|) Σₜ (4/τ) σ(τ(wᵢₜ−1)) Aᵢ,   {_TOKEN_RATIO},   τ = τ_pos for A > 0, else τ_neg",
        paper="arXiv 2511.20347",
    ),
    _algorithm(
        "distill",
        title="On-policy distillation",
        advantage="teacher",
        aggregation="token_mean",
        formula=f"J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ {_TOKEN_CLIP.replace('Aᵢ', 'Aᵢₜ')},   {_TOKEN_RATIO},   "
        "Aᵢₜ = log π_teacher(yᵢₜ) − log π_old(yᵢₜ)",
        paper="arXiv 2306.13649",
        note="The student samples, a teacher scores its tokens. Needs teacher.path (docs/sft.md).",
    ),
    _algorithm(
        "sft",
        "log",
        title="Supervised fine-tuning",
        advantage="one",
        aggregation="token_mean",
        formula="J = E (1/Σᵢ|yᵢ|) Σᵢ Σₜ log π_θ(yᵢₜ),   yᵢ from the data set",
        paper="maximum likelihood",
        note="No sampling, no reward; a batch is rows of the data set (docs/sft.md).",
        minibatches=1,
        supervised=True,
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({algorithm.name: algorithm for algorithm in _TABLE})


def is_function(name: str | None) -> bool:
    """Whether an `algorithm` names a function of the user: `file.py:function`, `package.module:function`."""
    return name is not None and re.fullmatch(r".+:[^\W\d]\w*(\.\w+)*", name) is not None


def algorithm_of(name: str | None, *, has_critic: bool = False) -> Algorithm:
    """The preset; for a function of the user what GSPO has around its ratio and gate, and GAE if there is a critic.

    >>> algorithm_of("my_loss.py:objective").aggregation, algorithm_of("grpo").of_user
    ('sequence_mean', False)
    """
    if not is_function(name):
        return ALGORITHMS[str(name)]
    advantage: Advantage = "gae" if has_critic else "group_std"
    about = {"title": "an objective of your own", "formula": "", "paper": "", "note": ""}
    return replace(ALGORITHMS["gspo"], name=str(name), advantage=advantage, of_user=True, **about)


def clip_range_of(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of ε_low and ε_high in an objective's settings; a function of the user has the names of the keys."""
    return next(((low, high) for low, high in (CLIP_RANGE, EPS_KEYS) if low in settings), None)
