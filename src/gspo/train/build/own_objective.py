"""An objective of the user (`algorithm: file.py:function`): found, given its keys, and called once before training."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.algorithms import CLIP_RANGE, EPS_KEYS, GATES
from gspo.config import Loaded, Section, effective_objective, load
from gspo.errors import ConfigError
from gspo.objectives import own
from gspo.rewards import import_name
from gspo.system import find_function


@dataclass(frozen=True)
class OwnObjective:
    """A function of the user that has been called on small tensors: it can be trained."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]  # of the whole objective, its own parameters included
    skips_zero: bool  # a sequence with advantage 0 has no gradient


def load_with(config: Any, overrides: Sequence[str], objective: Any) -> Loaded:
    """The config of a run, with a function that the caller gives as its `algorithm`."""
    if not callable(objective):
        raise ConfigError(
            f"objective must be a function, got {objective!r:.80}; a name is set by algorithm: file.py:function"
        )
    if isinstance(config, Loaded):
        raise ConfigError(
            "objective=… decides defaults of the config, so pass Trainer a YAML path or a dict with overrides=…, not a "
            "config that is loaded already"
        )
    named = overrides if isinstance(overrides, str | Mapping) else [*overrides, f"algorithm={_named(objective)}"]
    return load(config, named)


def _named(objective: Callable[..., Any]) -> str:
    """`module:function` or `file.py:function`, quoted as a YAML value; `session:name` for what cannot be imported."""
    return json.dumps(import_name(objective) or f"session:{getattr(objective, '__name__', 'objective').strip('<>')}")


def find_objective(loaded: Loaded, given: Callable[..., Any] | None = None) -> OwnObjective:
    """The objective of the caller or of the config; ConfigError if it cannot be trained."""
    name = str(loaded.config.algorithm)
    if given is None and name.startswith("session:"):
        raise ConfigError(
            f"algorithm: {name} was defined in a Python session and cannot be imported; pass it to "
            "Trainer(objective=…), or write it to a file and set algorithm: file.py:function"
        )
    try:
        function = given or find_function(name)
        settings = _own_settings(loaded, function)
        return OwnObjective(function, settings, own.probe(function, settings))
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from error


def _own_settings(loaded: Loaded, function: Callable[..., Any]) -> dict[str, Any]:
    """What surrounds the function, and the keys of `actor` that its parameters name."""
    actor, objective = loaded.config.actor, effective_objective(loaded)
    whole = objective["settings"]
    name, asked = own.name_of(function), own.signature_of(function).settings
    # An ε that a range adjusts, and those around it, come in pairs.
    eps = {key: whole[name] for key, name in zip(EPS_KEYS, CLIP_RANGE, strict=True)}
    keys = {key: value for key, value in actor if not isinstance(value, Section)} | eps
    for parameter, is_required in asked.items():
        if is_required and keys.get(parameter) is None and parameter not in whole:
            if parameter in keys:
                raise ValueError(f"{name} asks for {parameter}, but actor.{parameter} is null; set it")
            near = difflib.get_close_matches(parameter, [*own.INPUTS, *keys], n=1)
            raise ValueError(
                f"{name} asks for {parameter}, which is neither a key of actor nor one of {', '.join(own.INPUTS)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    if actor.eps_clip == "auto" and not asked.keys() & eps.keys():
        raise ValueError(f"{name} does not ask for eps_clip, which actor.eps_clip: auto adjusts; remove the key")
    own_keys = {key: keys[key] for key in asked if keys.get(key) is not None}
    around = {key: value for key, value in whole.items() if key not in GATES[objective["gate"]].settings}
    return around | own_keys | (eps if asked.keys() & eps.keys() else {})
