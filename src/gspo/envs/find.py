"""Find an environment by its name in a config: a built-in one, or a user's class or function. No base class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo.envs.builtin.self_correct import SelfCorrect
from gspo.envs.builtin.tools import Tools
from gspo.errors import ConfigError
from gspo.system.imports import find_function

ENVIRONMENTS: Mapping[str, Callable[..., Any]] = {"tools": Tools, "self_correct": SelfCorrect}


def find_environment(given: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The environment `async (client, data)`, from a name or an object; raises ConfigError.

    `options` are arguments of a class's constructor, or keyword arguments of each call of a function.
    """
    options = dict(options or {})
    found: Any = given
    # A name: built-in, or a user's module or file.
    if isinstance(given, str):
        if given not in ENVIRONMENTS and ":" not in given:
            raise ConfigError(
                f"env.path: there is no environment {given!r}; built-in: {', '.join(ENVIRONMENTS)}; write your own "
                "as module:function or file.py:function"
            )
        try:
            found = ENVIRONMENTS[given] if given in ENVIRONMENTS else find_function(given)
        except ValueError as error:
            raise ConfigError(f"env.path: {error}") from error
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
