"""What the pages quote of the quick-start, and its pictures, are of the one run in lab/results/front_page.json."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("front_page", ROOT / "lab" / "front_page.py")
front_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(front_page)
RESULT = front_page.read_result()
PAGES = list(dict.fromkeys(place.page for place in front_page.PLACES))
ADVICE = "run `make pictures`, or `lab/front_page.py --pages` if the result is right and the page is not"
# Where a page speaks of the quick-start; the rest of it may quote other runs.
ABOUT = {
    "README.md": r"^make train[^\n]*|`make train` downloads.*?\n\n",
    "docs/index.md": r".*",
    "docs/quickstart.md": r".*",
    "docs/gallery.md": r"\| \[quick-start\][^\n]*|^## Quick-start.*?(?=^## )",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_quotes_the_figures_of_the_recorded_run(name):
    assert front_page.differences(name, (ROOT / name).read_text(), RESULT) == [], ADVICE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_quotes_no_other_accuracy_or_time_of_the_quick_start(name):
    page = (ROOT / name).read_text()
    for place in front_page.PLACES:
        if place.page == name:
            page = page.replace(front_page.figures_of(place, page)[0], " ")
    about = "\n".join(re.findall(ABOUT[name], page, re.DOTALL | re.MULTILINE))
    assert len(about) > 100
    assert re.findall(r"\d+\.\d ?%|\b\d+ s\b|minute", about) == []


@pytest.mark.parametrize("name", front_page.PICTURES)
def test_a_picture_is_of_the_recorded_run(name):
    assert front_page.sha256(ROOT / name) == RESULT["pictures"][name], ADVICE


def test_a_figure_that_differs_is_found_and_rewritten():
    other = {**RESULT, "run": {**RESULT["run"], "train_s": 12345.0, "accuracy_after": [0.123, 0.1, 0.2]}}
    for name in PAGES:
        page = (ROOT / name).read_text()
        found = front_page.differences(name, page, other)
        assert any("'12345'" in each for each in found), name
        changed = front_page.rewritten(name, page, other)
        assert front_page.differences(name, changed, other) == []
        assert front_page.rewritten(name, changed, RESULT) == page


def test_the_lines_and_the_interval_are_of_the_same_run():
    run = RESULT["run"]
    accuracy = f"{100 * run['accuracy_after'][0]:.1f}%"
    assert f"held-out {accuracy}" in run["lines"][str(run["steps"])]
    assert (
        f"→ {accuracy} ({front_page.interval(RESULT)})  on {run['problems']} problems"
        in run["summary"]["held-out accuracy"]
    )
    assert RESULT["made"]["command"] == "gspo train quickstart"
    assert {"processor", "instructions", "cores", "commit", "date"} <= RESULT["made"].keys()
