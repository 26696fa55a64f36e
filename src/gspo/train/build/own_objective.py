"""An objective of the user (`algorithm: file.py:function`): found, given its keys, and called once before training."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.algorithms import CLIP_RANGE, GATES
from gspo.config import Loaded, effective_objective
from gspo.config.schema import Section
from gspo.errors import ConfigError
from gspo.objectives import own
from gspo.system.imports import find_function


@dataclass(frozen=True)
class OwnObjective:
    """A function of the user that has been called on small tensors: it can be trained."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]  # of the whole objective, its own parameters included
    skips_zero: bool  # a sequence with advantage 0 has no gradient


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
    actor, whole = loaded.config.actor, effective_objective(loaded)["settings"]
    name, asked = own.name_of(function), own.signature_of(function).settings
    # An ε that a range adjusts, and those around it, come in pairs.
    eps = {GATES["clip"].settings[each].key: whole[each] for each in CLIP_RANGE}
    keys = {key: value for key, value in actor if not isinstance(value, Section)} | eps
    for parameter, is_required in asked.items():
        if is_required and keys.get(parameter) is None and parameter not in whole:
            near = difflib.get_close_matches(parameter, [*own.INPUTS, *keys], n=1)
            raise ValueError(
                f"{name} asks for {parameter}, "
                + (f"but actor.{parameter} is null; set it" if parameter in keys else "which no key of actor is called")
                + (f"; did you mean {near[0]}?" if near and parameter not in keys else "")
                + f" An objective may ask for {', '.join(own.INPUTS)} and keys of actor, such as eps_clip"
            )
    if actor.eps_clip == "auto" and not asked.keys() & eps.keys():
        raise ValueError(f"{name} does not ask for eps_clip, which actor.eps_clip: auto adjusts; remove the key")
    own_keys = {key: keys[key] for key in asked if keys.get(key) is not None}
    around = {key: value for key, value in whole.items() if key not in GATES["clip"].settings}
    return around | own_keys | (eps if asked.keys() & eps.keys() else {})
