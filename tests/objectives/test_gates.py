"""GATES is the only place that knows a gate by its name."""

import ast
import string
from pathlib import Path

import pytest

import gspo
from gspo.algorithms import GATES
from gspo.config import known_keys
from gspo.system import by_name

SOURCE = Path(gspo.__file__).parent
# The table itself; and the losses of other trainers, of which some have the same names.
NOT_OURS = ("algorithms.py", "audit/", "migrate/", "conformance/", "trl/")
# Words such as "clip" and "log" also name other things: for these the other side of the comparison must name a gate.
DISTINCT = {"cispo", "sapo", "gmpo"}


def comparisons(file: Path) -> list[str]:
    """Comparisons of a gate with a name: `gate == "clip"`, `gate in ("log", …)`, `match gate: case "clip"`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        names = {n.value for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)} & GATES.keys()
        others = " ".join(ast.unparse(side) for side in sides if not isinstance(side, ast.Constant))
        if names & DISTINCT or (names and "gate" in others):
            found.append(f"{file.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_outside_the_table_compares_with_a_gates_name():
    files = [f for f in SOURCE.rglob("*.py") if not f.relative_to(SOURCE).as_posix().startswith(NOT_OURS)]
    assert [line for file in files for line in comparisons(file)] == []


@pytest.mark.parametrize(
    "code",
    [
        "gate == 'clip'",
        "f.objective['gate'] in ('log', 'none')",
        "x = name == 'sapo'",
        "match gate:\n case 'log': pass",
    ],
)
def test_the_search_finds_a_comparison(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "a.py").write_text(code)
    assert len(comparisons(tmp_path / "a.py")) == 1


@pytest.mark.parametrize("name", GATES)
def test_an_entry_names_its_function_its_settings_and_keys_that_exist(name: str):
    gate, keys = GATES[name], known_keys()
    assert callable(by_name(gate.function))
    parts = [gate.short, gate.words, gate.formula, *(s.formula + s.words for s in gate.settings.values())]
    fields = {field for part in parts for _, field, _, _ in string.Formatter().parse(part) if field}
    assert fields <= {*gate.settings, "ratio", "A"}
    for setting in gate.settings.values():
        if setting.key:
            key = keys[f"actor.{setting.key}"]
            assert key.above == setting.above
            assert key.default in (setting.default, None)  # null: the algorithm's default
            assert gate.unused, "why the key has no effect with another gate"
