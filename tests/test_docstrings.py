"""The examples in docstrings give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import gspo

SOURCE = Path(gspo.__file__).parent
ROOT = SOURCE.parents[1]
FILES = [
    file
    for folder in (SOURCE, ROOT / "lab", ROOT / "examples" / "registries")
    for file in sorted(folder.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def test_there_are_examples():
    assert len(FILES) > 80


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_examples_of_a_file_are_right(file):
    top = next(top for top in (SOURCE.parent, ROOT / "examples", ROOT) if file.is_relative_to(top))
    parts = file.relative_to(top).with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
