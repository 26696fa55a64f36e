"""The wall: what a run needs is core, and the core reaches everything else by a name (`system.imports.by_name`).

A file is core if the trainer imports it at module level. The quick-start executes core files only, besides the checks
before its first step (AT_START). ARCHITECTURE.md has the rule.
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
from gspo.system import by_name

SOURCE = Path(gspo.__file__).parent
ROOTS = (
    "gspo.train.trainer",
    "gspo.train.opening",
    "gspo.train.loop",
)  # the front door, and what `train` imports first

# A ratchet: these numbers only fall. Lower them when the core shrinks.
MAX_LINES, MAX_FILES = 23_600, 108

# Checks and translations of a config, which run once before the first step.
AT_START = ("lint/", "migrate/", "rewards/check.py", "sampling/native/")


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
    """The modules of this package that importing `module` imports, packages on the way included.

    A name of a room's face is imported from the file that the face names for it.
    """
    names: set[str] = set()
    for node in module_level(ast.parse(files()[module].read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {origin_of(f"{node.module}.{alias.name}") for alias in node.names}
    steps = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return steps & files().keys() - {module}


@functools.cache
def faces() -> dict[str, dict[str, str]]:
    """What each room's `__init__` exports: name → module.name."""
    found = {}
    for room, file in files().items():
        if room.count(".") == 1 and file.name == "__init__.py":
            blocks = ast.parse(file.read_text()).body
            nodes = [node for block in blocks for node in (block.body if isinstance(block, ast.If) else [block])]
            imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and f"{n.module}.".startswith(f"{room}.")]
            found[room] = {a.asname or a.name: f"{n.module}.{a.name}" for n in imports for a in n.names}
    return found


def origin_of(name: str) -> str:
    """`gspo.learner.Plan` → `gspo.learner.step.Plan`; other names stay."""
    room, _, attribute = name.rpartition(".")
    return faces().get(room, {}).get(attribute, name)


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
    assert any(file.startswith("lint/") for file in executed), "AT_START is executed"


NO_FACE = {"gspo.cli"}  # the top: its files are the verbs, and nothing but `__main__` imports them


def foreign_imports(file: Path, own: str) -> Iterable[str]:
    """Imports of a file that reach below the face of a room that is not its own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("gspo."):
            room = ".".join(node.module.split(".")[:2])
            below = node.module != room or any(alias.name not in faces().get(room, {}) for alias in node.names)
            if below and room in faces() and room != f"gspo.{own}" and room not in NO_FACE:
                yield f"{file}:{node.lineno}: {ast.unparse(node)}"


def sources() -> Iterable[tuple[Path, str]]:
    """The Python files of package, tests and laboratory, each with the room it belongs to."""
    for module, file in files().items():
        yield file, module.split(".")[1] if "." in module else ""
    root = SOURCE.parents[1]
    for folder in (root / "tests", root / "lab", root / "examples"):
        for file in sorted(folder.rglob("*.py")):
            yield file, file.relative_to(folder).parts[0] if folder.name == "tests" else ""


def test_a_room_is_imported_by_its_face():
    found = [problem for file, own in sources() for problem in foreign_imports(file, own)]
    assert not found, "import from the room, and list the name in its __init__.py:\n" + "\n".join(found)


def test_an_import_below_a_face_is_found(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "from gspo.learner.step import Plan\nfrom gspo.learner import Plan\nfrom gspo.learner import nothing\n"
    )
    assert [problem.rpartition(": ")[2] for problem in foreign_imports(file, "train")] == [
        "from gspo.learner.step import Plan",
        "from gspo.learner import nothing",
    ]
    assert not list(foreign_imports(file, "learner"))


def test_a_face_lists_what_others_use():
    used: dict[str, set[str]] = {}
    for file, _ in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in faces():
                used.setdefault(node.module, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # `objectives.loss`, of a room
                used.setdefault(f"gspo.{node.value.id}", set()).add(node.attr)
    for room, names in faces().items():
        unused = names.keys() - used.get(room, set())
        assert room in PUBLIC or not unused, f"{room} exports what nobody outside it imports: {sorted(unused)}"


PUBLIC = {"gspo.objectives", "gspo.train", "gspo.report"}  # user code imports from these


def test_no_name_of_a_face_is_hidden_by_a_module():
    """`from gspo.room import name` would be the module `gspo/room/name.py` once that is imported."""
    for room, names in faces().items():
        if room != "gspo.objectives":  # its face imports at once, so the function `loss` stands before the module
            hidden = {
                name for name, origin in names.items() if f"{room}.{name}" in files() and origin != f"{room}.{name}"
            }
            assert not hidden, f"{room}: rename {hidden}"


@pytest.mark.run
def test_every_name_of_a_face_is_there():
    for room, names in faces().items():
        for name in names:
            assert getattr(by_name(room), name) is not None
