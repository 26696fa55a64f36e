"""The comparison's page in a real browser: it draws, tells values under the pointer, and runs nothing foreign."""

import pytest
from made_runs import eval_row, make_run, step_row
from test_browser import browser, visit  # noqa: F401 - fixtures

from gspo.report.comparison import compare
from gspo.report.comparison_page import write_page

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def address(tmp_path):
    for name, end in (("gspo", 0.9), ("grpo", 0.6)):
        for seed in (1, 2, 3):
            rows = [{"step": 0, **eval_row(0.2)}, *(step_row(s) for s in range(1, 20))]
            rows.append(step_row(20, **eval_row(end + seed / 100)))
            text = f"seed: {seed}\nalgorithm: {name}\nactor: {{path: '{EVIL} {name}'}}\n"
            make_run(tmp_path / "e" / f"{name}_{seed}", rows, config=text)
    return write_page(compare([tmp_path / "e"]), tmp_path / "compare.html").as_uri()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_every_curve_and_shows_arms_side_by_side(visit, address, scheme):  # noqa: F811
    page = visit(address, color_scheme=scheme)
    assert page.locator("html").get_attribute("data-theme") == scheme
    assert page.locator(".chart canvas").count() == len(page.evaluate("boot.curves"))
    assert page.locator("#outcome-table thead th").all_inner_texts()[1:] == [
        "● gspo",
        "● grpo",
    ]
    assert EVIL in page.locator("#config-table").inner_text()  # as text; an alert would be a problem of `visit`
    assert page.locator("#config-table img").count() == 0
    assert page.locator("#runs-table tbody tr").count() == 6


@pytest.mark.full
def test_pointing_at_a_curve_tells_each_arm_with_its_interval(visit, address):  # noqa: F811
    page = visit(address)
    plot = page.locator(".chart .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] - 2, "y": box["height"] / 2})
    tip = page.locator("#tip")
    tip.wait_for()
    text = tip.inner_text().replace("\u00a0", " ")
    assert "step 20" in text
    assert "gspo" in text
    assert "92 % (" in text  # the mean of 0.91, 0.92, 0.93, then its interval


@pytest.mark.full
def test_smoothing_and_the_theme_draw_the_same_curves_again(visit, address):  # noqa: F811
    page = visit(address, color_scheme="light")
    drawn = page.locator(".chart canvas").count()
    assert drawn > 3
    page.locator("#smooth").fill("0.8")
    assert page.locator("#smooth-value").inner_text() == "0.80"
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.locator(".chart canvas").count() == drawn


@pytest.mark.full
def test_the_page_does_not_scroll_sideways_on_a_phone(visit, address):  # noqa: F811
    page = visit(address)
    page.set_viewport_size({"width": 390, "height": 800})
    # Charts are drawn anew, in the frames after the resize.
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=5000)
