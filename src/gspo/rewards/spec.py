"""The specification of a reward: a tuple of parts, each a built-in reward or a user's function.

The reward is the weighted sum of the parts; a part with `gate: true` is not in the sum but multiplies it.
User functions are not imported here; the workers import them by name (`call.py`).
"""

from __future__ import annotations

import ast
import base64
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError
from gspo.rewards.functions.builtin import BUILTIN, FROM_ROW, INLINE, SCORERS, TEXT, builtin
from gspo.system import by_name
from gspo.types import Failure, Outcome, Score


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One term of the weighted sum, or a gate: a built-in, a scorer, `module:function` or `path/to/file.py:function`.

    >>> RewardPart("final", weight=1.0, kwargs={"marker": ">"}).label
    'final'
    """

    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""  # the name in Score.parts and in the metrics; default: the function's name
    code: str = ""  # base64 of the pickled function, for one that a worker cannot import (a notebook, a lambda)
    gate: bool = False  # its value, 0…1, multiplies the sum of the other parts

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.rpartition(":")[2])

    @property
    def inline(self) -> bool:
        return self.name in INLINE

    @property
    def is_scorer(self) -> bool:
        return self.name in SCORERS


Reward = str | Callable[..., Any] | Mapping[str, Any] | RewardPart
RewardSpec = tuple[RewardPart, ...]


def reward_spec(
    value: Reward | Sequence[Reward],
    *,
    weights: Sequence[float] = (),
    key: str = "reward",
) -> RewardSpec:
    """Make a spec from a name, a function, a mapping, or a list of these.

    In a mapping, all entries but `name`, `weight`, `label` and `gate` are arguments of the function. `weights`, if
    given, has one number per entry.

    >>> [(p.label, p.weight, dict(p.kwargs)) for p in reward_spec(["math", {"name": "final", "marker": "="}])]
    [('math', 1.0, {}), ('final', 1.0, {'marker': '='})]
    """
    entries = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not entries:
        raise ConfigError(f"{key} is empty; name at least one reward, for example `math`")
    if weights and len(weights) != len(entries):
        raise ConfigError(f"{key}: {len(entries)} functions but {len(weights)} weights; give one weight per function")
    parts: list[RewardPart] = []
    labels: set[str] = set()
    for index, entry in enumerate(entries):
        part = _part(entry, f"{key}[{index}]" if len(entries) > 1 else key)
        label, copies = part.label, 2
        # Labels are keys of Score.parts, so they must be distinct.
        while label in labels:
            label, copies = f"{part.label}#{copies}", copies + 1
        labels.add(label)
        weight = weights[index] if weights else part.weight
        _check_weight(weight, key)
        if part.gate and weight != 1:
            raise ConfigError(
                f"{key}: {part.label} is a gate with weight {weight:g}; a gate multiplies the sum and has no weight: "
                "remove one of the two"
            )
        parts.append(RewardPart(part.name, weight, part.kwargs, label, part.code, part.gate))
    # Evaluation takes the first function for the one that knows the right answer (train/evaluate.py).
    if parts[0].gate:
        raise ConfigError(
            f"{key}: the first entry, {parts[0].label}, is a gate; put the reward that it multiplies before it"
        )
    return tuple(parts)


def function_name(function: Callable[..., Any], key: str = "reward") -> tuple[str, str]:
    """The name by which a worker imports a function (`module:function`, `file.py:function`), and its code.

    The code is empty if the function can be imported. A lambda, a closure, an object with `__call__`, a function of a
    notebook cell and one that a script defines below `if __name__ == "__main__":` cannot be: they are pickled by value,
    with what they use of the session.
    """
    name = import_name(function)
    if name is not None:
        return name, ""
    qualified = getattr(function, "__qualname__", type(function).__name__)
    return f"session:{qualified.rpartition('.')[2]}", _pickled(function, qualified, key)


def import_name(function: Callable[..., Any]) -> str | None:
    """The name by which another process can import a function; None if it cannot."""
    qualified = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    # In a worker `__main__` is another program, so the script's file is named instead; a notebook has none.
    path = getattr(sys.modules["__main__"], "__file__", None)
    # "<lambda>" and "<locals>" mark functions that cannot be found by name.
    is_named = hasattr(function, "__qualname__") and "<" not in qualified and not hasattr(function, "__self__")
    if is_named and module and module != "__main__":
        return f"{module}:{qualified}"
    if is_named and module == "__main__" and path is not None and not _is_guarded(Path(path), qualified):
        return f"{Path(path).resolve()}:{qualified}"
    return None


_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")


def _is_guarded(script: Path, qualified: str) -> bool:
    """Whether a script binds a name only below `if __name__ == "__main__":`, which an import does not run."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    guards = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) in _MAIN]
    below = [statement for guard in guards for statement in guard.body]
    name = qualified.partition(".")[0]
    return name in _bound(below) and name not in _bound([node for node in body if node not in guards])


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the functions, classes and variables of statements, without those inside functions and classes."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            found |= _bound(ast.iter_child_nodes(node))
    return found


def _pickled(function: Callable[..., Any], name: str, key: str) -> str:
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(function)).decode("ascii")
    except Exception as error:  # whatever an object's own pickling raises
        raise ConfigError(
            f"{key}: {name} cannot be sent to a reward worker ({type(error).__name__}: {error}); write it to a file "
            f"(in a notebook: %%writefile reward.py) and pass reward='reward.py:{name.rpartition('.')[2]}'"
        ) from error


def combine(spec: RewardSpec, values: Sequence[float]) -> Outcome:
    """The weighted sum, multiplied by the gates; `parts` holds the values before weighting.

    A sum that is not finite is a failure, and so is a gate outside 0…1, which could turn a penalty into a reward.
    """
    parts = {part.label: value for part, value in zip(spec, values, strict=True)}
    gates = {part.label: parts[part.label] for part in spec if part.gate}
    if wrong := [label for label, value in gates.items() if not 0 <= value <= 1]:
        return Failure("crash", f"{wrong[0]} is a gate and gave {gates[wrong[0]]:g}; a gate must give 0 to 1")
    try:
        # fsum: the sum does not depend on the order of the parts.
        total = math.fsum(part.weight * parts[part.label] for part in spec if not part.gate) * math.prod(gates.values())
    except (OverflowError, ValueError):  # the sum overflows, or is inf − inf
        total = math.nan
    if not math.isfinite(total):
        terms = " + ".join(f"{part.weight:g} × {parts[part.label]:g} ({part.label})" for part in spec if not part.gate)
        return Failure("crash", f"the sum of the rewards is not finite: {terms}")
    return Score(total, parts, {part.label: part.weight for part in spec if part.weight != 1})


def _part(entry: Any, key: str) -> RewardPart:
    if isinstance(entry, RewardPart):
        part = entry
    elif isinstance(entry, Mapping):
        options = dict(entry)
        name, weight, label = options.pop("name", None), options.pop("weight", 1.0), options.pop("label", "")
        code, gate = "", options.pop("gate", False)
        if not isinstance(gate, bool):
            raise ConfigError(f"{key}.gate must be true or false, got {gate!r}")
        if callable(name):
            name, code = function_name(name, key)
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}.name must be one of {', '.join((*BUILTIN, *SCORERS))}, or module:function; got {name!r}"
            )
        part = RewardPart(name, weight, options, label, code, gate)
    elif callable(entry):
        name, code = function_name(entry, key)
        part = RewardPart(name, code=code)
    elif isinstance(entry, str):
        part = RewardPart(entry)
    else:
        raise ConfigError(f"{key} must be a name, a function or a mapping with `name`, got {entry!r}")
    known = (*BUILTIN, *SCORERS)
    if ":" not in part.name and part.name not in known:
        near = get_close_matches(part.name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key}: there is no reward {part.name!r}; {hint}built-in rewards are {', '.join(known)}; "
            f"write your own function as `module:function`"
        )
    if part.name in known:
        _check_arguments(part, key)
    return part


def _check_weight(weight: Any, key: str) -> None:
    # A float's range also for integers: 10**400 has no float.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= sys.float_info.max:
        raise ConfigError(f"{key}: a weight must be a finite number, got {weight!r}")


def _check_arguments(part: RewardPart, key: str) -> None:
    """ConfigError for an unknown or a missing argument of a built-in; columns of the row are passed by the workers."""
    if part.is_scorer:
        parameters = inspect.signature(by_name(SCORERS[part.name])).parameters.values()
        own = [p for p in parameters if p.name != "key"]  # the config section named in its messages
    else:
        parameters = inspect.signature(builtin(part.name)).parameters.values()
        own = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in FROM_ROW]
    if unknown := set(part.kwargs) - {p.name for p in own}:
        takes = ", ".join(p.name for p in own) or "no arguments"
        raise ConfigError(f"{key}: {part.name} has no argument {', '.join(sorted(unknown))}; it takes {takes}")
    if missing := [p.name for p in own if p.default is p.empty and p.name not in part.kwargs]:
        raise ConfigError(f"{key}: {part.name} needs {', '.join(missing)}")
    if part.name in TEXT:
        problem = by_name("gspo.rewards.functions.text:invalid_setting")(part.name, part.kwargs)
        if problem:
            raise ConfigError(f"{key}: {part.name}: {problem}")
    if part.name == "regex":
        try:
            re.compile(part.kwargs["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{key}.pattern {part.kwargs['pattern']!r} is not a valid regular expression: {error}"
            ) from None
