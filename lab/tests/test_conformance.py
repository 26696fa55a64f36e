"""The vectors are what their script writes; our objective agrees compiled and on two ranks; the page is up to date."""

import json

import pytest
import torch

from gspo.conformance import VECTORS, load
from lab.conformance import make, ours, page


def test_the_files_are_those_that_the_script_writes(tmp_path):
    make.main(tmp_path)
    assert (tmp_path / "suite.json").read_text() == (VECTORS / "suite.json").read_text()
    for made, shipped in zip(load(tmp_path), load(), strict=True):
        assert made.inputs.keys() == shipped.inputs.keys()
        for name, x in shipped.inputs.items():
            assert torch.equal(made.inputs[name].nan_to_num(7), x.nan_to_num(7))
        for answer, other in zip(made.answers, shipped.answers, strict=True):
            assert all(torch.equal(x, other.arrays[name]) for name, x in answer.arrays.items())


def recorded():
    return json.loads(page.RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_recorded_table_and_every_case():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, recorded()) == text
    assert len(recorded()) >= 8
    for row in recorded():
        assert row["cells"].keys() == {case.name for case in load()}


@pytest.mark.run
def test_our_objective_agrees_on_two_gloo_ranks():
    found = ours.on_two_ranks()
    assert {case["status"] for case in found["cases"]} == {"agrees", "open"}
    first = {case.name: case.answers[0].name for case in load() if not case.decided}
    assert {case["case"]: case["answer"] for case in found["cases"] if case["status"] == "open"} == first


@pytest.mark.full
def test_the_whole_page_is_what_was_recorded(tmp_path):
    """Rows of the same version have the same cells; a new release of a package may change them and is not an error."""
    old = {row["name"]: row for row in recorded()}
    found = list(page.tested({}, tmp_path))
    assert {row["name"] for row in found} >= {"gspo", "gspo, compiled", "gspo, two ranks", *page.PYPI}
    for row in found:
        if row["version"] == old[row["name"]]["version"]:
            assert row["cells"] == old[row["name"]]["cells"], row["name"]
