"""The design's import directions, and the commands that start without torch."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run, step_row
from processes import HEAVY, heavy_modules_after

import gspo
from gspo.launcher import LAUNCHERS

SOURCE = Path(gspo.__file__).parent

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
            ("doctor", "report", "studies", "audit", "conformance", "trl"),
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


def test_a_function_fits_on_a_screen():
    assert [(module, long) for module, tree, _ in modules() if (long := long_functions(tree))] == []
    body = "\n".join(["    x = 1"] * (MAX_STATEMENT_LINES + 1))
    assert long_functions(ast.parse(f'def f():\n    """One\n\n    line."""\n{body}')) == ["f"]


@pytest.mark.run
def test_the_probe_sees_a_heavy_import():
    assert heavy_modules_after("import torch") == ["torch"]


LIGHT_MODULES = (
    "gspo", "gspo.config", "gspo.lint", "gspo.cli", "gspo.rewards.workers.supervisor", "gspo.report.read",
    "gspo.report.summary", "gspo.report.plot", "gspo.report.terminal", "gspo.report.comparison",
    "gspo.report.comparison_page", "gspo.doctor.explanation", "gspo.data.columns", "gspo.data.dataset",
)  # fmt: skip
SHIPPED = "gsm8k_gspo cluster.n_gpus_per_node=8"
# Commands that need no model: the exit code, and what is said on stderr.
LIGHT_COMMANDS = {
    **dict.fromkeys(("--help", "--version", "objectives", "objectives gspo", "doctor -h", "models"), (0, "")),
    **{f"{words} RUN/config.yaml": (0, "") for words in ("doctor --quick", "config")},
    **{f"train {SHIPPED} --dry-run --on {on}": (0, "") for on in LAUNCHERS},
    "report RUN": (0, ""),
    "train gsm8k_gspo gconfig.n_samples=1": (2, "gconfig.n_samples"),
    "eval": (2, "nothing to evaluate"),
    "eval valid_dataset.path=a.jsonl": (2, "nothing to evaluate"),
    "eval embedded:tiny": (2, "no problems given"),
    "eval no/such/run": (2, "is not a run directory"),
    "eval nosuch": (2, "no model of that name was found. Runs here: "),
    "eval embedded:tiny --data embedded:arithmetic --greedy --samples 2": (2, "--greedy"),
    "eval embedded:tiny --data embedded:arithmetic --samples many": (2, "eval_gconfig.n_samples"),
}
LIGHT = """
import contextlib, importlib, io, json, sys
modules, commands = map(json.loads, sys.argv[1:])
for module in modules:
    importlib.import_module(module)
    print(json.dumps([name for name in HEAVY if name in sys.modules]))
from gspo.cli.main import main
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(words.split())
        except SystemExit as ended:  # after -h
            code = ended.code
    print(json.dumps([code, said.getvalue(), [name for name in HEAVY if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """What came of each module and command, one after the other in one process: a heavy module is the first one's."""
    folder = make_run(tmp_path_factory.mktemp("light") / "run", [step_row(1)])
    commands = [words.replace("RUN", str(folder)) for words in LIGHT_COMMANDS]
    words = [sys.executable, "-c", f"HEAVY = {HEAVY!r}\n{LIGHT}", json.dumps(LIGHT_MODULES), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return dict(zip([*LIGHT_MODULES, *LIGHT_COMMANDS], map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.run
@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_leaves_torch_out(light, module):
    assert light[module] == []


@pytest.mark.run
@pytest.mark.parametrize("words", LIGHT_COMMANDS)
def test_light_commands_leave_torch_out(light, words):
    code, said, heavy = light[words]
    assert (code, heavy) == (LIGHT_COMMANDS[words][0], [])
    assert LIGHT_COMMANDS[words][1] in said


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
