"""What a reward is made of, as a value: a tuple of weighted parts, each a built-in name or a user's function.

Nothing is imported here; names of functions are resolved inside the workers (`call.py`).
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, RewardError
from gspo.rewards.functions.builtin import BUILTIN, INLINE
from gspo.rewards.functions.scorer import SCORERS, settings_of
from gspo.types import Outcome, Score


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One term of the weighted sum: a built-in, a scorer, `module:function` or `path/to/file.py:function`.

    >>> RewardPart("final", weight=1.0, kwargs={"marker": ">"}).label
    'final'
    """

    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # its name in Score.parts and in the metrics

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.rpartition(":")[2])

    @property
    def inline(self) -> bool:
        return self.name in INLINE

    @property
    def is_scorer(self) -> bool:
        return self.name in SCORERS


@dataclass(frozen=True, slots=True)
class RewardItem:
    """What is scored at once: one prompt and the completions of its group.

    >>> RewardItem("2+2=", ("4", "5"), data={"answer": "4"}).completions
    ('4', '5')
    """

    prompt: str
    completions: tuple[str, ...]
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[Sequence[int]] = ()  # also the token counts of length shaping
    data: Mapping[str, Any] = field(default_factory=dict)  # the row's columns
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt before it was rendered, for judges and reward models
    source: str = ""  # the data set it came from, where a mixture's sources have rewards of their own
    given: Sequence[Outcome | None] = ()  # what environments have said of the completions (`given.py`)


Reward = str | Callable[..., Any] | Mapping[str, Any] | RewardPart
RewardSpec = tuple[RewardPart, ...]


def reward_spec(
    value: Reward | Sequence[Reward],
    *,
    weights: Sequence[float] = (),
    format_regex: str | None = None,
    key: str = "reward",
) -> RewardSpec:
    """Read a spec from what a config or a caller gives: a name, a function, a mapping, or a list of these.

    In a mapping `name`, `weight` and `label` are ours; every other entry is handed to the function. `weights`, if any,
    has one number per entry; `format_regex` makes the entry `format` a search for that pattern.

    >>> [(p.label, p.weight, dict(p.kwargs)) for p in reward_spec(["math", {"name": "final", "marker": "="}])]
    [('math', 1.0, {}), ('final', 1.0, {'marker': '='})]
    """
    entries = [value] if isinstance(value, str | Mapping | RewardPart) or callable(value) else list(value)
    if not entries:
        raise ConfigError(f"{key} is empty: without a reward there is nothing to learn; name one, for example `math`")
    if weights and len(weights) != len(entries):
        raise ConfigError(f"{key}: {len(entries)} functions but {len(weights)} weights; give one weight for each")
    if format_regex is not None:
        if "format" not in entries:
            raise ConfigError(
                f"{key}: a format_regex is set, but no function is `format`; add it, or unset the pattern"
            )
        pattern = {"name": "regex", "pattern": format_regex, "label": "format"}
        entries = [pattern if entry == "format" else entry for entry in entries]
    parts: list[RewardPart] = []
    labels: set[str] = set()
    for index, entry in enumerate(entries):
        part = _part(entry, f"{key}[{index}]" if len(entries) > 1 else key)
        label, copies = part.label, 2
        while label in labels:
            label, copies = f"{part.label}#{copies}", copies + 1
        labels.add(label)
        weight = weights[index] if weights else part.weight
        _check_weight(weight, key)
        parts.append(RewardPart(part.name, weight, part.kwargs, label))
    return tuple(parts)


def function_name(function: Callable[..., Any], key: str = "reward") -> str:
    """The name by which a worker process can find a function again: `module:function` or `file.py:function`."""
    qualified = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not qualified or not module or "<" in qualified:
        raise ConfigError(
            f"{key}: got {function!r}, which a reward worker cannot import (lambda, local or bound object); "
            f"define it at the top level of a module and give `module:function`"
        )
    if module != "__main__":
        return f"{module}:{qualified}"
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise ConfigError(
            f"{key}: {qualified} lives in an interactive session; put it in a file, for example reward.py"
        )
    return f"{Path(path).resolve()}:{qualified}"


def combine(spec: RewardSpec, values: Sequence[float]) -> Score:
    """The weighted sum, with each part as it was before weighting."""
    total = math.fsum(part.weight * value for part, value in zip(spec, values, strict=True))
    return Score(total, {part.label: value for part, value in zip(spec, values, strict=True)})


def count_failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many outcomes are failures of each kind, for metrics and for the threshold that stops a run.

    >>> count_failures([Score(1.0)])
    {'timeout': 0, 'crash': 0, 'infra': 0}
    """
    counts = {"timeout": 0, "crash": 0, "infra": 0}
    for outcome in outcomes:
        if not isinstance(outcome, Score):
            counts[outcome.kind] += 1
    return counts


def check_failures(outcomes: Sequence[Outcome], max_fraction: float, key: str = "reward") -> None:
    """RewardError if more than `max_fraction` of the outcomes are failures, or all of them; the first message is shown.

    >>> check_failures([Score(1.0)], max_fraction=0.5)
    """
    failures = [outcome for outcome in outcomes if not isinstance(outcome, Score)]
    if failures and (len(failures) > max_fraction * len(outcomes) or len(failures) == len(outcomes)):
        counts = ", ".join(f"{count} {kind}" for kind, count in count_failures(outcomes).items() if count)
        raise RewardError(
            f"{len(failures)} of {len(outcomes)} rewards failed ({counts}), more than {key}.max_failure_fraction "
            f"({max_fraction:g}) allows; the first: {failures[0].message}"
        )


def _part(entry: Any, key: str) -> RewardPart:
    if isinstance(entry, RewardPart):
        part = entry
    elif isinstance(entry, Mapping):
        options = dict(entry)
        name, weight, label = options.pop("name", None), options.pop("weight", 1.0), options.pop("label", "")
        if callable(name):
            name = function_name(name, key)
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}.name must name a reward, got {name!r}: one of {', '.join((*BUILTIN, *SCORERS))}, or module:f"
            )
        part = RewardPart(name, weight, options, label)
    elif callable(entry):
        part = RewardPart(function_name(entry, key))
    elif isinstance(entry, str):
        part = RewardPart(entry)
    else:
        raise ConfigError(f"{key} must be a name, a function or a mapping with `name`, got {entry!r}")
    known = (*BUILTIN, *SCORERS)
    if ":" not in part.name and part.name not in known:
        near = get_close_matches(part.name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key}: no reward is called {part.name!r}; {hint}built in are {', '.join(known)}; "
            f"your own function is written `module:function`"
        )
    if part.name in known:
        _check_arguments(part, key)
    return part


def _check_weight(weight: Any, key: str) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{key}: a weight must be a finite number, got {weight!r}")


def _check_arguments(part: RewardPart, key: str) -> None:
    """Every argument given to a built-in is used, and every one it needs beyond the row's columns is given."""
    if part.is_scorer:
        own = settings_of(part.name)
    else:
        parameters = inspect.signature(BUILTIN[part.name]).parameters.values()
        own = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("answer", "entry", "num_tokens")]
    if unknown := set(part.kwargs) - {p.name for p in own}:
        takes = ", ".join(p.name for p in own) or "no arguments"
        raise ConfigError(f"{key}: {part.name} does not know {', '.join(sorted(unknown))}; it takes {takes}")
    if missing := [p.name for p in own if p.default is p.empty and p.name not in part.kwargs]:
        raise ConfigError(f"{key}: {part.name} needs {', '.join(missing)}")
    if part.name == "regex":
        try:
            re.compile(part.kwargs["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(f"{key}.pattern {part.kwargs['pattern']!r} is no regular expression: {error}") from None
