"""The figure of docs/gspo.md in a real browser: its shares follow the sliders as the formulas say."""

import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = '<meta charset="utf-8"><link rel="stylesheet" href="{css}"><div class="ratios" data-figure="ratios"></div>'


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """A function that opens the figure at a width and returns its page and a function that moves a slider."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'gspo[test]'")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    file = tmp_path_factory.mktemp("figure") / "index.html"
    script = f'<script src="{(DOCS / "ratios.js").as_uri()}"></script>'
    file.write_text(PAGE.format(css=(DOCS / "site.css").as_uri()) + script)
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def visit(width):
            page = browser.new_page(viewport={"width": width, "height": 800})
            problems = []
            page.on("pageerror", lambda problem: problems.append(str(problem)))
            page.goto(file.as_uri())
            assert not problems
            return page

        yield visit
        browser.close()


def move(page, slider, position):
    """Set a slider between 0 and 1; returns the shares of tokens with a gradient."""
    page.evaluate(
        "([id, at]) => { const s = document.getElementById(id); s.value = at; s.dispatchEvent(new Event('input')); }",
        [f"ratios-{slider}", position],
    )
    return [float(text.strip(" %")) for text in page.locator(".ratios-share").all_inner_texts()]


@pytest.mark.run
def test_the_shares_of_the_figure_follow_drift_length_and_epsilon(figure):
    page = figure(1280)
    assert page.locator(".ratios-panels svg").count() == 2
    assert page.locator(".ratios-panels svg").nth(1).locator("circle").count() == 4  # answers with A > 0
    assert move(page, "eps", 1)[1] == 100.0  # ε 0.2 clips no answer of 300 tokens
    narrow = [move(page, "eps", at)[1] for at in (0.6, 0.4, 0.2, 0)]
    assert narrow == sorted(narrow, reverse=True)
    assert narrow[-1] < 60
    assert page.locator(".ratios-panels svg").nth(1).locator('[fill="#D55E00"]').count() == round(
        8 * (1 - narrow[-1] / 100)
    )
    move(page, "eps", 0.5)
    assert move(page, "length", 1)[1] >= move(page, "length", 0)[1]  # log s is a mean: longer answers stay nearer to 1
    assert (
        move(page, "drift", 1)[0] < 90 < move(page, "drift", 0)[0] == 100.0
    )  # token ratios leave 1 ± 0.2 by drift alone


@pytest.mark.run
def test_the_figure_fits_a_phone(figure):
    page = figure(390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    tops = [page.locator(".ratios-panels svg").nth(i).bounding_box()["y"] for i in (0, 1)]
    assert tops[1] > tops[0] + 200  # one below the other


def test_the_figure_is_short_and_loads_nothing():
    text = (DOCS / "ratios.js").read_text()
    assert len(text.splitlines()) <= 200
    assert "http://www.w3.org/2000/svg" in text
    assert text.count("http") == 1
    assert "import" not in text
