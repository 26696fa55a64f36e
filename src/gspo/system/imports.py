"""Functions by name, as a config names them: `package.module:function` or `file.py:function`; packages to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
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


def install_command(extra: str) -> str:
    """The pip command that installs an optional dependency (`extra`), for a wheel and for a clone of the repository.

    In a clone `pip install 'gspo[…]'` would look for a package of that name in the registry.
    """
    root = Path(__file__).resolve().parents[3]
    try:
        distribution = importlib.metadata.distribution("gspo")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        is_clone = bool(origin.get("dir_info", {}).get("editable"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        is_clone = True
    if is_clone and (root / "pyproject.toml").is_file():
        here = "." if root == Path.cwd() else str(root)
        return f"pip install -e '{here}[{extra}]'"
    return f"pip install 'gspo[{extra}]'"
