"""Functions of other packages without importing the packages, which may need GPUs, Ray or Megatron.

A function or class is taken from its file by its name, without its decorators, and executed in a namespace that has
only what it uses. Nothing is copied: the file is read when the check runs.
"""

from __future__ import annotations

import ast
import importlib.metadata
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gspo.errors import ConfigError


class Stub(SimpleNamespace):
    """Stands in for a config or a trainer: what was not set is None, which is how their options are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)


def same(x: Any, *_: Any, **__: Any) -> Any:
    """In place of collectives, on one rank."""
    return x


@dataclass
class Package:
    """Where the files of a package are."""

    name: str  # of the distribution
    folder: Path | None = None  # None: as installed

    def file(self, path: str) -> Path:
        if self.folder is None:
            top, _, below = path.partition("/")
            spec = PathFinder.find_spec(top)
            if spec is None:
                raise ConfigError(
                    f"{self.name} is not installed; install it, or pass --source with a folder of its files"
                )
            return Path((spec.submodule_search_locations or [""])[0]) / below
        below = path.partition("/")[2]
        # A clone, a clone with src/, an unpacked wheel, or the package's own folder.
        tries = [self.folder / path, self.folder / "src" / path, *self.folder.glob(f"*.data/purelib/{path}")]
        found = next((file for file in (*tries, self.folder / below) if file.is_file()), None)
        if found is None:
            raise ConfigError(f"{self.folder} has no {path}; --source takes the folder that contains it")
        return found

    @property
    def version(self) -> str:
        if self.folder is None:
            return importlib.metadata.version(self.name)
        for file in self.folder.glob("*.dist-info/METADATA"):
            return re.findall(r"^Version: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)[0]
        return ""

    def take(self, path: str, *names: str, **namespace: Any) -> SimpleNamespace:
        """Top-level definitions of a file, or `Class.method`, with the names that they use in `namespace`."""
        file = self.file(path)
        found = {}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for child in ast.iter_child_nodes(node):
                own = getattr(child, "name", None)
                if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                    own = child.targets[0].id
                wanted = f"{node.name}.{own}" if isinstance(node, ast.ClassDef) else own
                if own and wanted in names and wanted not in found:
                    found[wanted] = child
        if missing := set(names) - found.keys():
            raise ConfigError(f"{file} has no {', '.join(sorted(missing))}: this version of {self.name} is not known")
        for node in found.values():
            if not isinstance(node, ast.Assign):
                node.decorator_list = []
        body = [found[name] for name in names]
        # Annotations stay text (the flag of `from __future__ import annotations`), so their names need no namespace.
        code = compile(ast.Module(body, []), str(file), "exec", flags=annotations.compiler_flag, dont_inherit=True)
        basics = {"torch": torch, "nn": nn, "F": functional, "math": math, "defaultdict": defaultdict}
        space = {"__name__": f"conformance.{self.name}", **basics, **namespace}
        exec(code, space)
        return SimpleNamespace(**{name.rpartition(".")[2]: space[name.rpartition(".")[2]] for name in names})
