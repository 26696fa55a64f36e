"""Find an environment by its name in a config: built-in, of another system (`kind:name`), or a user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo.envs.adapters.trl import is_trl_class
from gspo.envs.builtin.self_correct import SelfCorrect
from gspo.envs.builtin.tools import Tools
from gspo.errors import ConfigError
from gspo.system import find_function

ENVIRONMENTS: Mapping[str, Callable[..., Any]] = {"tools": Tools, "self_correct": SelfCorrect}
# `env.path: kind:what` is ADAPTERS[kind](what, **options). Imported when it is used: each needs other packages.
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "gspo.envs.adapters.gymnasium:Gymnasium",
    "openenv": "gspo.envs.adapters.openenv:OpenEnv",
    "trl": "gspo.envs.adapters.trl:TrlEnvironment",
    "verifiers": "gspo.envs.adapters.verifiers:Verifiers",
}


def find_environment(given: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The environment `async (client, data)`, from a name or an object; raises ConfigError.

    `options` are arguments of a class's constructor, or keyword arguments of each call of a function.
    """
    options = dict(options or {})
    found: Any = given
    # A name: of another system, built-in, or a user's module or file.
    if isinstance(given, str) and (kind := given.partition(":")[0]) in ADAPTERS:
        return _adapt(kind, given.partition(":")[2], options)
    if is_trl_class(given):
        return _adapt("trl", given, options)
    if isinstance(given, str):
        if given not in ENVIRONMENTS and ":" not in given:
            raise ConfigError(
                f"env.path: there is no environment {given!r}; built-in: {', '.join(ENVIRONMENTS)}; of other systems: "
                f"{', '.join(f'{kind}:…' for kind in ADAPTERS)}; write your own as module:function or file.py:function"
            )
        try:
            found = ENVIRONMENTS[given] if given in ENVIRONMENTS else find_function(given)
        except ValueError as error:
            raise ConfigError(f"env.path: {error}") from error
        if is_trl_class(found):
            raise ConfigError(f"env.path: {given} has reset and no __call__; a class for TRL is env.path: trl:{given}")
    name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    # A class gets the options in its constructor, and its instance is the environment.
    if inspect.isclass(found):
        try:
            inspect.signature(found).bind(**options)
        except TypeError as error:
            raise ConfigError(f"env.options do not fit {name}: {error}") from error
        found, options = found(**options), {}
    # Calls are awaited by the driver, so the function, or the instance's __call__, must be async.
    if not (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))):  # noqa: B004
        raise ConfigError(f"env.path: {name} must be `async def {name}(client, data)`, or a class with such a __call__")
    # Check the arguments now: otherwise every episode would fail.
    try:
        inspect.signature(found).bind(None, {}, **options)
    except TypeError as error:
        raise ConfigError(f"env.options do not fit {name}(client, data, …): {error}") from error
    return partial(found, **options) if options else found


def _adapt(kind: str, what: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    adapter = find_function(ADAPTERS[kind])
    try:
        inspect.signature(adapter).bind(what, **options)
    except TypeError as error:
        raise ConfigError(f"env.options do not fit env.path: {kind}:…: {error}") from error
    return adapter(what, **options)
