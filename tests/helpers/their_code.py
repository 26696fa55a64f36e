"""The real code of other systems, from PyPI: downloaded at test time, imported without its dependencies.

A dependency that is not installed is replaced by an empty module while the package is imported; what is compared
(advantages and losses) needs torch only.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import pytest


@functools.cache
def wheel(package: str) -> Path:
    """The folder of a package's wheel, unpacked; the test is skipped where PyPI cannot be reached."""
    folder = Path(tempfile.mkdtemp(prefix=f"gspo-{package}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder)]
    # wait: 120 s, its timeout
    done = subprocess.run([*command, package], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


class _Anything:
    """Stands for every class and function of a module that is not installed."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __call__(self, *args, **_kwargs):
        return args[0] if args and callable(args[0]) else self  # as a decorator it changes nothing

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __class_getitem__(cls, _item):
        return cls

    def __mro_entries__(self, _bases):
        return ()

    def __getitem__(self, _item):
        return self

    def __iter__(self):
        return iter(())

    def __or__(self, _other):
        return self

    __ror__ = __or__


class _Empty(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Bare(_Empty):
    """A package without its `__init__`."""


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder):
        self.folder = str(folder)

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        # An optional import of an installed package fails as it always does.
        is_theirs = frame.f_code.co_filename.startswith(self.folder)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def without_dependencies(folder: Path):
    """Imports find the packages of `folder`, and an empty module for what is not installed."""
    before, missing = set(sys.modules), _Missing(folder)
    sys.path.insert(0, str(folder))
    sys.meta_path.append(missing)
    try:
        yield
    finally:
        sys.meta_path.remove(missing)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if type(sys.modules[name]) is _Empty:
                del sys.modules[name]


def imported(package: str, *modules: str, empty: tuple[str, ...] = ()) -> list[types.ModuleType]:
    """Modules of a package, without the `__init__` of the packages above them, which import far more than we compare.

    empty: modules of the package that are replaced by empty ones, because importing them changes the process.
    """
    folder = wheel(package)
    with without_dependencies(folder):
        sys.modules.update({name: _Bare(name) for name in empty})
        for name in modules:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                above = ".".join(parts[:depth])
                if above not in sys.modules:
                    bare = sys.modules[above] = _Bare(above)
                    bare.__path__ = [str(folder.joinpath(*parts[:depth]))]
        return [importlib.import_module(name) for name in modules]
