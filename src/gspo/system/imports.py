"""Functions by name: `package.module:function` or `path/to/file.py:function`, as a config names them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def find_function(name: str) -> Callable[..., Any]:
    """Import the module or file and return its function or class; ValueError with a message for the user.

    >>> find_function("math:sqrt")(9.0)
    3.0
    """
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            path = Path(where)
            if not path.is_file():
                raise ValueError(f"{name}: there is no file {where} (looked in {Path.cwd()})")
            spec = importlib.util.spec_from_file_location(f"gspo_user_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise ValueError(f"{name}: {where} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ValueError:
        raise
    # The user's module may raise anything on import, SystemExit included.
    except BaseException as error:
        raise ValueError(f"{name}: importing {where} failed: {type(error).__name__}: {error}") from error
    function: Any = module
    # The attribute may be nested, as in `Class.method`.
    for step in attribute.split("."):
        function = getattr(function, step, None)
    if not callable(function):
        raise ValueError(f"{name}: {where} has no function {attribute}")
    return function
