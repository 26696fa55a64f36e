"""The wall: what a run needs is core, and the core reaches everything else by a name (`system.imports.by_name`).

A file is core if the trainer imports it at module level. The quick-start executes core files only, besides the checks
before its first step (AT_START). CONTRIBUTING.md has the rule.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import gspo
from gspo.system.imports import by_name

SOURCE = Path(gspo.__file__).parent
ROOTS = (
    "gspo.train.trainer",
    "gspo.train.opening",
    "gspo.train.loop",
)  # the front door, and what `train` imports first

# A ratchet: these numbers only fall. Lower them when the core shrinks.
MAX_LINES, MAX_FILES = 23_610, 162

# Checks and translations of a config, which run once before the first step.
AT_START = ("config/lint/", "config/migrate/", "rewards/check.py", "sampling/native/")


@functools.cache
def files() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def module_level(statements: Iterable[ast.stmt]) -> Iterable[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported: not those in functions or for type checkers."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            is_typing = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from module_level(node.orelse if is_typing else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from module_level([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from module_level(node.body)


def imported(module: str) -> set[str]:
    """The modules of this package that importing `module` imports, packages on the way included."""
    is_package = files()[module].name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    names: set[str] = set()
    for node in module_level(ast.parse(files()[module].read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    steps = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return steps & files().keys() - {module}


@functools.cache
def core() -> frozenset[str]:
    """The import closure of training."""
    found, waiting = set[str](), [*ROOTS]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imported(module)
    return frozenset(found)


def test_the_core_only_shrinks():
    sizes = [len(files()[module].read_text().splitlines()) for module in core()]
    num_lines, num_files = sum(sizes), sum(size > 0 for size in sizes)
    assert num_lines <= MAX_LINES, f"{num_lines} lines: reach what a run may not need by a name"
    assert num_files <= MAX_FILES, f"{num_files} files: reach what a run may not need by a name"
    assert num_lines > MAX_LINES - 1000, f"the core has {num_lines} lines now: lower MAX_LINES"
    assert num_files > MAX_FILES - 12, f"the core has {num_files} files now: lower MAX_FILES"


def test_module_level_imports_are_found_and_others_are_not():
    code = """
from a import b
if TYPE_CHECKING:
    import c
try:
    import d
except ImportError:
    import e
def f():
    import g
"""
    found = [ast.unparse(node) for node in module_level(ast.parse(code).body)]
    assert found == ["from a import b", "import d", "import e"]


def names_in(file: Path) -> Iterable[str]:
    """Strings of the form of `by_name`: this package's modules, with or without an attribute."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"gspo(\.\w+)+:\w+", node.value)
        ):
            yield node.value


@pytest.mark.run
def test_every_name_of_a_table_is_there():
    found = {name for file in files().values() for name in names_in(file)}
    assert len(found) > 20
    for name in sorted(found):
        assert by_name(name) is not None, name


TRACED = """
import json, sys, threading
from pathlib import Path

executed = set()

def trace(frame, event, _):
    # CO_OPTIMIZED: functions, not the bodies of modules and classes.
    if event == "call" and frame.f_code.co_flags & 1:
        executed.add(frame.f_code.co_filename)

sys.setprofile(trace)
threading.setprofile(trace)
from gspo.train import Trainer

scratch, source = sys.argv[1:]
overrides = ["total_train_steps=2", "evaluator.size=32", "threads=1", f"cluster.fileroot={scratch}"]
Trainer("quickstart", overrides=overrides).train(report=False)
sys.setprofile(None)
inside = [Path(file) for file in executed if file.startswith(source)]
print("\\n" + json.dumps([file.relative_to(source).as_posix() for file in inside]))
"""


@pytest.mark.run
def test_the_quick_start_executes_the_core_alone(tmp_path):
    command = [sys.executable, "-c", TRACED, str(tmp_path), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    executed = set(json.loads(done.stdout.splitlines()[-1]))
    inside = {files()[module].relative_to(SOURCE).as_posix() for module in core()}
    assert {"train/loop.py", "learner/step.py", "sampling/local/engine.py", "objectives/loss.py"} <= executed
    outside = {file for file in executed - inside if not file.startswith(AT_START)}
    assert not outside, "core by use: the trainer may import these at module level"
    assert any(file.startswith("config/lint/") for file in executed), "AT_START is executed"
