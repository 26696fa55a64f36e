"""The page in a real browser (Debian's chromium, headless): it loads, answers, sorts, follows, runs nothing foreign.

One short test runs with `make test`; the others are `full`.
"""

import contextlib
import json
import shutil
import time

import numpy as np
import pytest
from made_runs import (
    HOSTILE,
    answer_row,
    append_metrics,
    eval_row,
    make_run,
    make_trial,
    sample_row,
    step_row,
    write_answers,
    write_samples,
)
from PIL import Image

from gspo.models import thumbnail
from gspo.report.page.page import write_report
from gspo.report.page.watch import Watch

pytestmark = pytest.mark.run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'gspo[test]'"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        # Tests may run as root in a container, where chromium's own sandbox cannot start.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens an address; at the end of the test, nothing was complained of and nothing was asked of any other place."""
    pages = []

    def open_page(address, **options):
        context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
        page = context.new_page()
        page.problems = []
        page.requests = []
        page.on(
            "console",
            lambda message: page.problems.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("dialog", lambda dialog: page.problems.append(dialog.message))
        # A picture inside the page (data:) asks nobody.
        page.on("request", lambda r: None if r.url.startswith("data:image/webp;") else page.requests.append(r.url))
        page.set_default_timeout(15_000)
        page.goto(address)
        pages.append((page, address))
        return page

    yield open_page
    for page, address in pages:
        assert page.problems == []
        home = address.split("?")[0].rsplit("/", 1)[0]
        assert [url for url in page.requests if not url.startswith(home)] == []
        if address.startswith("file:"):
            assert page.requests == [address]
        page.context.close()


def eventually(condition, seconds=15.0):
    """Waits for what a page is about to show."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def figure(page, name):
    """The value of a figure of the headline, or nothing yet."""
    found = page.locator("#figures .figure", has=page.get_by_text(name, exact=True)).locator(".value")
    return found.inner_text() if found.count() else None


def rows_of(page):
    return page.locator("#spacer .row.item")


def column(page, number):
    return page.evaluate(
        "n => [...document.querySelectorAll('#spacer .row.item')]"
        ".sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top)).map(row => row.children[n].textContent)",
        number,
    )


@pytest.fixture
def run(tmp_path):
    run = make_trial(tmp_path, 20, ends_at=0.9)
    pieces = ["answer", "5", "of", "step", "1", ""]
    tokens = {
        "5/tokens": np.arange(6), "5/behavior_logp": np.full(6, -1.0, np.float32),
        "5/entropy": np.linspace(0, 1, 6, dtype=np.float32),
        "5/logp": np.array([-1, -1.5, -0.5, -1, -1, -1], np.float32),
    }  # fmt: skip
    write_samples(run, 1, [sample_row(1, i, pieces=pieces if i == 5 else None) for i in range(16)], tokens)
    return run


def test_the_page_loads_answers_searches_and_shows_values_under_the_pointer(run, visit):
    page = visit(write_report(run).as_uri())
    assert page.locator("h1").inner_text() == "exp/trial"
    assert page.locator(".card").count() == 6
    assert "30.0\xa0% → 90.0\xa0%" in page.locator(".card").first.inner_text()
    chart = page.locator("#curve-charts .chart").first.locator(".u-over")
    box = chart.bounding_box()
    chart.scroll_into_view_if_needed()
    chart.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    eventually(page.locator("#tip").is_visible)
    assert "step 10" in page.locator("#tip").inner_text()
    assert "reward" in page.locator("#tip").inner_text()
    assert page.locator("#sample-count").inner_text() == "320 of 320"
    page.locator("#search").fill("ANSWER 3 of step 7")
    eventually(lambda: page.locator("#sample-count").inner_text() == "1 of 320")
    rows_of(page).first.click()
    assert page.locator("#detail .one").count() == 4
    assert "answer 3 of step 7" in page.locator("#detail .one[aria-current=true]").inner_text()


@pytest.mark.full
def test_held_out_answers_questions_and_a_mixed_group_are_shown(tmp_path, visit):
    run = make_run(tmp_path / "e" / "t", [{"step": 0, **eval_row(0.3)}, step_row(1, **{"policy/kl_behavior": 0.1})])
    chat = {"prompt": "<s>the same for all<u>2+2=<a>", "question": "2+2=", "answer": None}
    write_samples(run, 1, [sample_row(1, i, reward=0.5 if i < 4 else float(i % 2), **chat) for i in range(8)])
    write_answers(run, 0, [answer_row(0, row) for row in range(3)])
    page = visit(write_report(run).as_uri())
    detail = page.locator("#detail")
    assert "prompt 101" in detail.inner_text()  # group 100 has equal rewards
    assert "the data set has none" in detail.inner_text()
    assert "null" not in detail.inner_text()
    assert column(page, 2)[0].startswith("2+2=")
    page.locator("#sample-kind").select_option("evals")
    assert "held-out problem 0" in detail.inner_text()
    assert column(page, 2) == [f"{row}+1=it is {row + 1}" for row in range(3)]
    assert "3 held-out answers after 1 steps" in page.locator("#samples-note").inner_text()
    assert not page.locator("[data-column=log_s]").is_visible()
    assert "KL to the sampler" in page.locator("#curve-charts").inner_text()


@pytest.mark.full
def test_filters_and_columns_choose_and_order_samples(run, visit):
    page = visit(write_report(run).as_uri())
    count = page.locator("#sample-count")
    page.locator("[data-preset=clipped]").click()
    assert count.inner_text() == "40 of 320"
    assert set(column(page, 7)) == {"▲ high"}
    page.locator("[data-preset=negative]").click()
    assert count.inner_text() == "160 of 320"
    assert set(column(page, 4)) == {"−1"}
    page.locator("[data-preset=longest]").click()
    assert column(page, 5)[:3] == ["16", "16", "16"]
    page.locator("[data-preset=worst]").click()
    assert set(column(page, 3)) == {"0"}
    page.locator("[data-preset=best]").click()
    assert set(column(page, 3)) == {"1"}
    page.locator("[data-preset=all]").click()
    page.locator("[data-column=log_s]").click()
    falling = column(page, 6)
    page.locator("[data-column=log_s]").click()
    rising = column(page, 6)
    assert falling[0] == "+5.0e-4"
    assert rising[0] == "−5.0e-4"
    assert page.locator("[data-column=log_s]").locator("..").get_attribute("aria-sort") == "ascending"
    page.locator("#sample-step").select_option("7")
    assert count.inner_text() == "16 of 320"
    # The card about the worst sequences leads to the farthest of all.
    page.locator(".card", has_text="worst").click()
    assert page.locator("[data-preset=farthest]").get_attribute("aria-pressed") == "true"
    assert column(page, 6)[0] in ("+5.0e-4", "−5.0e-4")


@pytest.mark.full
def test_tokens_are_coloured_on_request(run, visit):
    page = visit(write_report(run).as_uri())
    page.locator("#search").fill("answer 5 of step 1")
    eventually(lambda: page.locator("#sample-count").inner_text().startswith("11 of"))  # steps 1 and 10 to 19
    rows_of(page).first.click()
    assert page.locator("#detail .tok").count() == 0
    page.locator("[data-colour=ratio]").click()
    tokens = page.locator("#detail .one .tok")
    assert tokens.all_inner_texts() == ["answer", " 5", " of", " step", " 1", "▪"]
    colours = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == 3  # less likely, more likely, as before
    assert "log-ratio −0.5" in tokens.nth(1).get_attribute("title")
    page.locator("[data-colour=entropy]").click()
    again = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(again)) >= 5


@pytest.mark.full
def test_what_an_environment_said_is_told_apart(tmp_path, visit):
    run = make_run(tmp_path / "run", [step_row(1)])
    said = [("model", "[2*3]"), ("environment", "6<b>"), ("model", ">6")]
    turns = [{"turn": i // 2, "by": by, "text": text, "length": 1} for i, (by, text) in enumerate(said)]
    write_samples(run, 1, [sample_row(1, 0, completion="[2*3]6<b>>6", turns=turns, branch=0)])
    page = visit(write_report(run).as_uri())
    rows_of(page).first.click()
    assert page.locator("#detail .said .environment").all_inner_texts() == ["6<b>"]
    assert page.locator("#detail .one .said").first.inner_text() == "[2*3]6<b>>6"


@pytest.mark.full
def test_the_keyboard_is_enough(run, visit):
    page = visit(write_report(run).as_uri())
    page.keyboard.press("j")  # the first sample is chosen already: its group has different rewards
    page.keyboard.press("k")
    page.keyboard.press("j")
    assert page.locator("#spacer [aria-selected=true]").get_attribute("aria-rowindex") == "3"
    assert page.evaluate("document.activeElement.id") == "scroll"
    page.keyboard.press("G")
    assert page.locator("#spacer [aria-selected=true]").get_attribute("aria-rowindex") == "321"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    page.keyboard.press("/")
    page.keyboard.type("step 3")
    eventually(lambda: page.locator("#sample-count").inner_text() == "16 of 320")
    page.keyboard.press("Escape")
    assert page.locator("#sample-count").inner_text() == "320 of 320"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    eventually(lambda: page.evaluate("location.hash") == "#clipping")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    # A focused control can be seen.
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.full
@pytest.mark.parametrize("width", [1300, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_leaves_the_window_and_colours_follow_the_system(scheme, width, run, visit):
    page = visit(write_report(run).as_uri(), color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    eventually(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(json.loads("[" + paper[4:-1] + "]")) > 380) == (scheme == "light")


@pytest.mark.full
def test_every_chart_is_drawn_and_smoothing_changes_the_curves(run, visit):
    append_metrics(
        run,
        *(
            step_row(
                s, **{f"moe/flip_rate_layer_{i:02d}": 0.01 * i for i in range(4)}, **{"moe/expert_flip_rate": 0.02}
            )
            for s in (21, 22)
        ),
    )
    page = visit(write_report(run).as_uri())
    titles = page.locator(".chart figcaption b").all_inner_texts()
    assert {
        "Does it learn?", "Entropy", "Length", "Gradient norm", "How far do sequences move?", "Clipped share by sign",
        "Is ε sensible?", "Clipped share by mini-batch", "log s in the last steps", "flip rate by layer",
        "Routing over steps", "Seconds per step", "Tokens per second",
    } <= set(titles)  # fmt: skip
    drawn = """canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return data.some(v => v) && [...data].reduce((a, b) => (a * 31 + b) | 0, 7);
    }"""
    first = page.locator("#curve-charts canvas").first
    before = first.evaluate(drawn)
    assert all(canvas.evaluate(drawn) for canvas in page.locator("canvas").all())
    page.locator("#smooth").fill("0.98")
    assert page.locator("#smooth-value").inner_text() == "0.98"
    eventually(lambda: first.evaluate(drawn) != before)
    page.problems = [one for one in page.problems if "willReadFrequently" not in one]  # advice about this test


@pytest.mark.full
def test_the_config_shows_what_was_set_and_on_request_every_key(tmp_path, visit):
    config = "algorithm: gspo  # run.yaml:1\nseed: 1  # default\nactor:\n  eps_clip: 0.1  # algorithm gspo\n"
    origins = {"algorithm": ("file", "run.yaml:1"), "seed": ("default", ""), "actor.eps_clip": ("algorithm", "gspo")}
    run = make_run(tmp_path / "a" / "b", [step_row(1)], config=config, origins=origins)
    page = visit(write_report(run).as_uri())
    keys = page.locator("#config-table tbody td:nth-child(2)")
    assert keys.all_inner_texts() == ["algorithm", "actor.eps_clip"]
    page.locator("#config-all").check()
    assert keys.all_inner_texts() == ["algorithm", "seed", "actor.eps_clip"]
    page.locator("#config-filter").fill("eps")
    assert keys.all_inner_texts() == ["actor.eps_clip"]


@pytest.mark.full
def test_text_that_a_model_wrote_is_only_read(tmp_path, visit):
    run = make_run(
        tmp_path / "<img src=x onerror=pwned=9>" / "trial\u202e",
        [step_row(1), step_row(2, **{f"moe/{HOSTILE[0]}": 1.0})],
    )
    rows = [
        sample_row(1, i, prompt=text, completion=text, answer=text, failure=text, finish=text, submission=1,
                   pieces=[text], reward_parts={text: 1.0})
        for i, text in enumerate(HOSTILE)
    ]  # fmt: skip
    ones = {f"0/{name}": np.zeros(1, np.float32) for name in ("tokens", "behavior_logp", "logp", "entropy")}
    write_samples(run, 1, rows, ones)
    (run / "log.txt").write_text("alarm at step 1: " + HOSTILE[0] + "\x1b[2J\n")
    doctor = {"unreadable": HOSTILE[0]}
    page = visit(write_report(run, doctor=doctor).as_uri())
    for index, text in enumerate(HOSTILE):
        rows_of(page).nth(index).click()
        shown = page.locator("#detail .one[aria-current=true] .said").inner_text()
        assert shown.startswith(text[:4].replace("\x1b", "\\x1b"))
    page.locator("[data-colour=ratio]").click()
    assert page.locator("#detail .one .tok").count() == 1
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, iframe, object, embed, a[href^='javascript']").count() == 0
    # Nothing that acts on a terminal, on the direction of text, or that cannot be encoded is left in what is shown.
    assert not page.evaluate(r"/[\p{Cc}\p{Cf}\p{Cs}]/u.test(document.body.innerText.replace(/[\n\t]/g, ''))")
    everything = page.locator("#detail").inner_text()
    for escape in (
        "\\x1b[31mred\\x1b]0;title\\x07",
        "user\\u202egnirts\\u2066hidden",
        "lone \\ud800 and \\udfff",
        "//\\u2028\\u2029{{data}}&lt;b&gt;",
    ):
        assert escape in everything


@pytest.mark.full
def test_even_injected_markup_could_not_run(run, visit):
    page = visit(write_report(run).as_uri())
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned = 2\">')"
    )
    eventually(lambda: len(page.problems) >= 2)
    assert all("Content Security Policy" in problem for problem in page.problems)
    assert page.evaluate("window.pwned") is None
    page.problems.clear()
    del page.requests[1:]  # the image that the policy blocked


@pytest.mark.full
def test_ten_thousand_samples_scroll_sort_and_search_at_once(tmp_path, visit):
    run = make_run(tmp_path / "a" / "b", [step_row(s) for s in range(1, 41)])
    for step in range(1, 41):
        write_samples(run, step, [sample_row(step, i, completion=f"word {i} " * 40) for i in range(256)])
    page = visit(write_report(run).as_uri())
    assert page.locator("#sample-count").inner_text() == "10,240 of 10,240"
    assert rows_of(page).count() < 60  # only what is in view exists
    spent = page.evaluate(
        """() => { const time = (f) => { const start = performance.now(); f(); return performance.now() - start; };
        const scroll = document.getElementById('scroll');
        return {
          scroll: time(() => { for (let i = 0; i < 50; i++) { scroll.scrollTop = i * 9000; renderRows(); } }) / 50,
          sort: time(() => document.querySelector('[data-column=log_s]').click()),
          search: time(() => { browser.query = 'word 77 '; chooseSamples(); }),
          draw: time(showAll),
        }; }"""
    )
    assert spent["scroll"] < 200, spent  # ms for a screenful: a busy machine's bound, not a figure
    assert spent["sort"] < 1000, spent
    assert spent["search"] < 1000, spent
    assert spent["draw"] < 3000, spent
    assert page.locator("#sample-count").inner_text() == "40 of 10,240"


@contextlib.contextmanager
def watching(path, port=0):
    watch = Watch(path, lambda run: {"unreadable": "not asked"}, port)
    try:
        yield watch
    finally:
        watch.close()


@pytest.mark.full
def test_the_live_page_grows_with_its_run_and_survives_a_resume(run, visit):
    with watching(run) as watch:
        page = visit(watch.address)
        eventually(lambda: figure(page, "steps") == "20")
        eventually(lambda: page.locator("#sample-count").inner_text() == "320 of 320")
        page.locator("#search").fill("of step 21")
        append_metrics(run, step_row(21, **eval_row(0.97)))
        write_samples(run, 21, [sample_row(21, i) for i in range(16)])
        eventually(lambda: figure(page, "steps") == "21")
        eventually(lambda: page.locator("#sample-count").inner_text() == "16 of 336")  # the search stays
        assert "97.0" in page.locator(".card").first.inner_text()
        assert page.locator("#live").inner_text().startswith("live")
        assert sum("/data?" in url for url in page.requests) >= 2
        # A resume cuts everything back to step 5.
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:6]))
        for step in range(6, 22):
            for file in (run / "samples").glob(f"step_{step:06d}.*"):
                file.unlink()
        eventually(lambda: figure(page, "steps") == "5")
        page.locator("#search").fill("")
        eventually(lambda: page.locator("#sample-count").inner_text() == "80 of 80")


@pytest.mark.full
def test_the_live_page_says_when_its_server_is_gone_and_finds_it_again(run, visit):
    with watching(run) as watch:
        page = visit(watch.address)
        eventually(lambda: page.locator(".figure").count())
        token, port = watch.token, watch.port
    eventually(lambda: "no answer" in page.locator("#live").inner_text())
    assert page.locator(".figure").count()
    with watching(run, port) as watch:
        watch.token = token
        append_metrics(run, step_row(21))
        eventually(lambda: page.locator("#live").inner_text().startswith("live"))
        eventually(lambda: figure(page, "steps") == "21")
    page.problems.clear()  # chromium reports refused connections as errors


@pytest.mark.full
def test_a_folder_lists_its_runs_and_leads_to_them(tmp_path, run, visit):
    with watching(tmp_path) as watch:
        page = visit(watch.address)
        eventually(lambda: page.locator("#runs tbody tr").count() == 1)
        make_run(tmp_path / "exp" / "second <b>", [step_row(1)])
        eventually(lambda: page.locator("#runs tbody tr").count() == 2)
        page.locator("#runs a", has_text="exp/trial").click()
        eventually(lambda: page.locator("#sample-count").inner_text() == "320 of 320")
        page.locator("a", has_text="all runs").click()
        eventually(lambda: page.locator("#runs tbody tr").count() == 2)


@pytest.mark.full
def test_graded_rewards_have_a_distribution_of_the_first_and_the_last_step(visit, tmp_path):
    run = make_run(tmp_path / "exp" / "graded", [step_row(s) for s in (1, 2, 3)])
    for step in (1, 2, 3):
        write_samples(run, step, [sample_row(step, i, reward=(i + 4 * step) / 50) for i in range(16)])
    page = visit(write_report(run).as_uri())
    captions = page.locator("#distribution figcaption")
    assert captions.all_inner_texts() == [
        "reward of step 1: lowest 0.08, median 0.24, highest 0.38",
        "reward of step 3: lowest 0.24, median 0.4, highest 0.54",
    ]
    assert page.locator("#distribution .bins").first.locator("i").count() == 24
    page.locator("#sample-step").select_option("2")
    assert captions.all_inner_texts() == ["reward of step 2: lowest 0.16, median 0.32, highest 0.46"]


@pytest.mark.full
def test_rewards_of_0_and_1_have_no_distribution(visit, run):
    assert visit(write_report(run).as_uri()).locator("#distribution").is_hidden()


@pytest.mark.full
def test_the_image_of_a_prompt_is_shown_beside_its_group(run, visit):
    digest = "ab" * 32
    shown = {"sha256": digest, "from": [{"name": "<img src=x onerror=alert(1)>.png", "size": [640, 480]}]}
    write_samples(run, 1, [sample_row(1, i, images=shown) for i in range(16)])
    (run / "images").mkdir()
    (run / "images" / f"{digest}.webp").write_bytes(thumbnail([Image.new("RGB", (640, 480), "red")]))
    width = "img => img.complete ? img.naturalWidth : 0"
    page = visit(write_report(run).as_uri())
    eventually(lambda: page.locator(".shown img").evaluate(width) == 160)
    assert "640 × 480 · sha256 abababababababab" in page.locator(".shown figcaption").inner_text()
    with watching(run) as watch:
        live = visit(watch.address)
        eventually(lambda: live.locator(".shown img").count() and live.locator(".shown img").evaluate(width) == 160)
