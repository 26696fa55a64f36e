"""Functions by name: this package's own, and the user's (`module:function`, `file.py:function`) with their errors.

Also: the commands that install optional packages.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError


def face(package: str) -> Callable[[str], Any]:
    """`__getattr__` of a room: it imports a name from its module in the room whenever the name is asked for.

    The names are those that the room's `__init__` imports below `if TYPE_CHECKING:`, so type checkers and this function
    read one list. It becomes `__all__`.
    """
    module: Any = sys.modules[package]
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    imports = [node for block in body if isinstance(block, ast.If) for node in block.body]
    imports = [node for node in imports if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}
    module.__all__ = sorted(homes)

    def of_this_room(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, attribute = homes[name]
        if home != package:
            found = importlib.import_module(home)
            if hasattr(found, attribute):
                return getattr(found, attribute)
        return importlib.import_module(f"{home}.{attribute}")  # a module of the room, as a namespace

    return of_this_room


def by_name(name: str) -> Any:
    """What an entry of one of this package's tables names, `module:attribute` or a module; imports the module.

    The core reaches everything outside the core in this way (ARCHITECTURE.md), so a run imports what it uses.

    >>> by_name("gspo.stats:wilson").__name__
    'wilson'
    """
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


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
        raise ValueError(f"{name}: importing {where} failed: {described(error)}") from error
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
    root = clone()
    if root is None:
        return f"pip install 'gspo[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


def clone() -> Path | None:
    """The folder of the repository that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    try:
        distribution = importlib.metadata.distribution("gspo")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        is_clone = bool(origin.get("dir_info", {}).get("editable"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        is_clone = True
    return root if is_clone and (root / "pyproject.toml").is_file() else None


def laboratory() -> Path | None:
    """The folder `lab/` of a clone; None for an installed wheel, which does not contain it."""
    root = clone()
    return root / "lab" if root is not None and (root / "lab" / "__init__.py").is_file() else None


def in_lab(name: str) -> Any:
    """What `lab.module:attribute` names; ConfigError without a clone."""
    folder = laboratory()
    if folder is None:
        raise ConfigError(NO_LAB)
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))  # last: no folder of the clone hides a module of the user
    return by_name(name)


NO_LAB = "this needs the folder lab/ of gspo's repository, which an installed package does not have: use a clone"


def source_file(given: Any) -> Path | None:
    """The file that defines a function, a class or an object, or what a name stands for; None if there is none.

    A name is looked up without importing its module.

    >>> source_file("json.decoder:JSONDecoder").name, source_file("final")
    ('decoder.py', None)
    """
    if not isinstance(given, str):
        while isinstance(given, functools.partial):
            given = given.func
        with contextlib.suppress(TypeError, OSError):
            found = inspect.getsourcefile(inspect.unwrap(given) if inspect.isroutine(given) else given)
            return None if found is None else Path(found)
        return source_file(type(given)) if not isinstance(given, type) else None
    where = given.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    spec, folders = None, None
    for part in filter(None, where.split(".")):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


def described(error: BaseException) -> str:
    """An error of user code: its type, its message, and the lines of the user's code that it came from."""
    try:
        message = str(error)
    except BaseException:  # an exception class of the user may fail here, too
        message = "(its message cannot be shown)"
    lines = ""
    with contextlib.suppress(Exception):  # so may its traceback
        lines = user_lines(error)
    return f"{type(error).__name__}: {message[:_LONGEST_MESSAGE]}{lines}"


def user_lines(error: BaseException) -> str:
    """Files, lines and source of the frames of user code, each in a new line; "" if the error is not from user code.

    The frames of this package, and of asyncio around it, come first in a traceback and are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_NOT_USER)), len(frames))
    shown = frames[first:]
    if len(shown) > _MAX_FRAMES:
        shown = [*shown[: _MAX_FRAMES // 2], *shown[-_MAX_FRAMES // 2 :]]
    lines = [f'\n  File "{f.filename}", line {f.lineno}, in {f.name}' + f"\n    {f.line}" * bool(f.line) for f in shown]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f'\n  File "{error.filename}", line {error.lineno}' + f"\n    {(error.text or '').strip()}")
    return "".join(lines)


_LONGEST_MESSAGE = 800
_MAX_FRAMES = 6
# Frames between our code and the user's: this package, asyncio, threads, imports.
_NOT_USER = (
    str(Path(__file__).parents[1]),
    str(Path(threading.__file__).with_name("asyncio")),  # not imported here: it is slow
    threading.__file__,
    importlib.__file__,
    functools.__file__,
    "<frozen ",
)
