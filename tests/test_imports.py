"""The design's import directions, and the commands that start without torch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import gspo

SOURCE = Path(gspo.__file__).parent
HEAVY = ("torch", "transformers", "ray", "vllm", "pandas", "datasets")

# A folder may import folders of lower floors, and neighbours on its own floor as long as no two import each other in a
# circle. `report` reads run directories: it knows types, errors, stats and system alone.
FLOORS = {
    name: floor
    for floor, names in enumerate(
        (
            ("types", "errors", "algorithms", "rng", "faults", "stats", "diagnosis", "shipped", "system"),
            ("config",),
            ("objectives",),
            ("models", "data", "rewards"),
            ("sampling",),
            ("envs",),
            ("rollout", "learner"),
            ("runs", "monitor"),
            ("train",),
            ("launcher", "lint", "migrate"),
            ("doctor", "report", "studies", "audit", "planner", "trl"),
            ("cli",),
            ("__main__",),
        )
    )
    for name in names
}
REPORT_MAY_IMPORT = {"types", "errors", "stats", "diagnosis", "system", "report"}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(tree: ast.AST, module: str, is_package: bool):
    """Every `gspo` module imported anywhere in the file, functions included: a lazy import is an import."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin, node.lineno
            # `from gspo import config` names the room only in its alias.
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names if origin == "gspo")


def violations(module: str, tree: ast.AST, is_package: bool = False) -> list[str]:
    room = room_of(module)
    found = []
    for target, line in imports_of(tree, module, is_package):
        target_room = room_of(target)
        if target.split(".")[0] != "gspo" or target_room in ("", "__version__", room):
            continue
        if target_room not in FLOORS:
            found.append(f"{module}:{line} imports {target}, a room this test does not know")
        elif room == "report" and target_room not in REPORT_MAY_IMPORT:
            found.append(f"{module}:{line}: report may not import {target_room}")
        elif FLOORS[target_room] > FLOORS[room]:
            found.append(f"{module}:{line}: {room} may not import {target_room}")
    return found


@functools.cache
def modules() -> list[tuple[str, ast.Module, bool]]:
    """Name, syntax tree and whether it is a package, of every file."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append((".".join(parts[:-1] if is_package else parts), ast.parse(file.read_text()), is_package))
    return found


def test_every_room_has_a_floor():
    unknown = {module for module, _, _ in modules() if room_of(module) and room_of(module) not in FLOORS}
    assert not unknown, f"give these a place in the design's table: {unknown}"


def test_imports_point_one_way():
    found = [
        problem
        for module, tree, is_package in modules()
        if room_of(module)
        for problem in violations(module, tree, is_package)
    ]
    assert not found, "\n".join(found)


def test_nothing_in_the_package_imports_the_laboratory():
    assert [m for m, tree, is_package in modules() for to, _ in imports_of(tree, m, is_package) if is_lab(to)] == []
    assert is_lab("lab.studies.pages")


def is_lab(module: str) -> bool:
    return module.split(".")[0] == "lab"


def circle(rooms: dict[str, set[str]]) -> list[str] | None:
    """A circle of rooms that import each other, if there is one."""

    def visit(room: str, trail: list[str]) -> list[str] | None:
        if room in trail:
            return [*trail[trail.index(room) :], room]
        return next((found for to in sorted(rooms.get(room, ())) if (found := visit(to, [*trail, room]))), None)

    return next((found for room in sorted(rooms) if (found := visit(room, []))), None)


def test_no_rooms_import_each_other_in_a_circle():
    rooms: dict[str, set[str]] = {}
    for module, tree, is_package in modules():
        for target, _ in imports_of(tree, module, is_package):
            if (
                target.startswith("gspo.")
                and room_of(module)
                and room_of(target) not in ("__version__", room_of(module))
            ):
                rooms.setdefault(room_of(module), set()).add(room_of(target))
    assert circle(rooms) is None
    assert circle({"data": {"models"}, "models": {"data"}}) == ["data", "models", "data"]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("gspo.objectives.surrogate", "from gspo.train import loop"),
        ("gspo.objectives.surrogate", "def f():\n    import gspo.models.embedded"),
        ("gspo.config.loading", "from gspo import objectives"),
        ("gspo.sampling.api", "from ..train.loop import run"),
        ("gspo.data.files", "from gspo.sampling import api"),
        ("gspo.report.html", "from gspo.config import load"),
        ("gspo.types", "from gspo.config import schema"),
    ],
)
def test_a_wrong_import_is_found(module, code):
    assert violations(module, ast.parse(code))


def test_right_imports_are_let_through():
    code = "import json\nfrom gspo.types import Sample\nfrom gspo.config import load\nfrom gspo.sampling import api"
    assert not violations("gspo.train.loop", ast.parse(code))


MAX_STATEMENT_LINES = 72


def long_functions(tree: ast.AST) -> list[str]:
    """Functions with more lines than a reader sees at once; the docstring is not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
            if (node.end_lineno or 0) - first.lineno >= MAX_STATEMENT_LINES:
                found.append(node.name)
    return found


def test_a_function_has_fits_on_a_screen():
    assert [(module, long) for module, tree, _ in modules() if (long := long_functions(tree))] == []
    body = "\n".join(["    x = 1"] * (MAX_STATEMENT_LINES + 1))
    assert long_functions(ast.parse(f'def f():\n    """One\n\n    line."""\n{body}')) == ["f"]


def heavy_modules_after(code: str, *args: str) -> list[str]:
    script = (
        f"import sys\nsys.argv = ['gspo', *{list(args)!r}]\ntry:\n    exec({code!r})\nexcept SystemExit:\n    pass\n"
        f"print('\\nHEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.rpartition("HEAVY ")[2])


@pytest.mark.run
@pytest.mark.parametrize("module", ["gspo", "gspo.config.loading", "gspo.lint", "gspo.doctor.explanation", "gspo.cli"])
def test_import_leaves_torch_out(module):
    assert heavy_modules_after(f"import {module}") == []


@pytest.mark.run
def test_a_wrong_config_is_refused_before_torch_is_imported():
    code = """
from gspo import Trainer
Trainer("quickstart")
try:
    Trainer("quickstart", overrides=["actor.esp_clip=1"])
except Exception as error:
    print(error)
"""
    assert heavy_modules_after(code) == []


@pytest.mark.run
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["objectives"], ["objectives", "gspo"], ["doctor", "-h"]])
def test_light_commands_leave_torch_out(args):
    assert heavy_modules_after("from gspo.cli.main import main; sys.exit(main())", *args) == []


@pytest.mark.run
@pytest.mark.parametrize("verb", [["doctor", "--quick"], ["config"]])
def test_config_verbs_leave_torch_out(verb, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: gspo\n")
    assert heavy_modules_after("from gspo.cli.main import main; sys.exit(main())", *verb, str(file)) == []


@pytest.mark.run
def test_the_probe_sees_a_heavy_import():
    assert heavy_modules_after("import torch") == ["torch"]
