"""Images of prompts in the report, on the live page and in the terminal: small pictures, and nothing foreign."""

import base64
import json
import os
from io import BytesIO

import pytest
from made_runs import make_run, sample_row, step_row, write_samples
from PIL import Image

from gspo.cli.main import main
from gspo.errors import DataError
from gspo.models import thumbnail
from gspo.report import samples
from gspo.report.page.page import write_report
from gspo.report.page.watch import Watch
from gspo.report.samples import read_block
from gspo.runs import RunDir, directory
from gspo.types import Images

ONE, OTHER = "ab" * 32, "cd" * 32


def shown(digest, name="signs/30.png"):
    return {"sha256": digest, "from": [{"name": name, "size": [640, 480]}]}


def picture(colour="red"):
    return thumbnail([Image.new("RGB", (640, 480), colour)])


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "exp" / "trial", [step_row(1)])
    write_samples(run, 1, [sample_row(1, i, images=shown(ONE if i < 4 else OTHER)) for i in range(8)])
    (run / "images").mkdir()
    (run / "images" / f"{ONE}.webp").write_bytes(picture())
    return run


def pictures_of(page):
    found = page.partition('class="pictures">')[2].partition("</script>")[0]
    return json.loads(found) if found else {}


def test_a_page_holds_each_picture_once_and_may_show_no_others(run):
    page = write_report(run).read_text()
    assert pictures_of(page) == {ONE: f"data:image/webp;base64,{base64.b64encode(picture()).decode()}"}
    assert "img-src data:;" in page.replace("&#x27;", "'")
    block = read_block(run, 1)
    assert block["images"] == [{"sha256": d, "words": "signs/30.png, 640 × 480"} for d in (ONE, OTHER)]
    assert block["shown"] == [0] * 4 + [1] * 4


def test_pictures_of_a_page_have_a_budget(run):
    (run / "images" / f"{OTHER}.webp").write_bytes(picture("blue"))
    assert list(samples.pictures(run, [ONE, OTHER, ONE])) == [ONE, OTHER]
    assert list(samples.pictures(run, [ONE, OTHER], budget=2 * len(picture()))) == [ONE]


@pytest.mark.parametrize(
    "content", [b"", b"<svg onload=alert(1)>", b"RIFF....WEB", b"RIFF0000WEBP" + bytes(samples.MAX_BYTES)]
)
def test_a_file_that_is_no_small_webp_is_not_shown(content, run):
    (run / "images" / f"{ONE}.webp").write_bytes(content)
    assert pictures_of(write_report(run).read_text()) == {}


def test_a_fifo_in_place_of_a_picture_is_not_read(run):
    os.mkfifo(run / "images" / f"{OTHER}.webp")
    assert list(pictures_of(write_report(run).read_text())) == [ONE]


@pytest.mark.parametrize(
    "given",
    ["x", {}, {"sha256": "../../secret"}, {"sha256": ONE[:-1]}, {"sha256": "AB" * 32}, {"sha256": [ONE]}, [ONE], 7],
)
def test_a_digest_that_is_none_leads_nowhere(given, run):
    write_samples(run, 1, [sample_row(1, 0, images=given)])
    assert read_block(run, 1)["shown"] == [None]
    assert pictures_of(write_report(run).read_text()) == {}


@pytest.mark.parametrize("given", [None, 7, [7], [{"name": 7, "size": "x"}], [{"size": [1, True]}]])
def test_names_and_sizes_of_another_type_are_left_out(given, run):
    write_samples(run, 1, [sample_row(1, 0, images={"sha256": ONE, "from": given})])
    assert read_block(run, 1)["images"] == [{"sha256": ONE, "words": ""}]


@pytest.mark.run
def test_the_live_page_serves_pictures_of_its_runs_alone(run):
    watch = Watch(run, lambda run: {})
    try:
        kind, found = watch.answer("image", {"run": "trial", "sha256": ONE})
        assert (kind, json.loads(found)) == ("application/json", samples.pictures(run, [ONE]))
        for digest in (OTHER, "../x", ""):
            assert watch.answer("image", {"run": "trial", "sha256": digest}) == ("application/json", "{}")
        assert watch.answer("image", {"run": "..", "sha256": ONE}) is None
    finally:
        watch.close()


def test_the_terminal_shows_name_size_and_digest(run, capsys):
    write_samples(run, 1, [sample_row(1, 0, images=shown(ONE, "a\x1b[2Jb.png"))])
    assert main(["report", str(run), "--samples"]) == 0
    said = capsys.readouterr().out
    assert "b.png, 640 × 480, sha256 abababababababab" in said
    assert "\x1b[2J" not in said


def test_a_run_keeps_a_limited_number_of_small_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "MAX_PICTURES", 2)
    made = []

    def shown_by(digest):
        def make():
            made.append(digest)
            if digest == "c":
                raise DataError("the image cannot be read")
            return picture()

        return Images(digest, dict, thumbnail=make)

    run = RunDir(tmp_path)
    try:
        run.images([shown_by("a"), None, shown_by("a"), Images("z", dict)])
        run.images([shown_by("a"), shown_by("b"), shown_by("c")])
        assert made == ["a", "b", "c"]  # each once
        run.images([shown_by("d")])
    finally:
        run.close()
    assert {file.name for file in (tmp_path / "images").iterdir()} == {"b.webp", "d.webp"}


def test_a_thumbnail_has_the_first_images_side_by_side_and_keeps_tiny_pixels():
    many = thumbnail([Image.new("RGB", (2000, 1000), "red")] * 9)
    assert Image.open(BytesIO(many)).size == (4 * 160 + 3 * 4, 80)
    tiny = Image.effect_noise((16, 16), 80)
    assert Image.open(BytesIO(thumbnail([tiny]))).convert("L").tobytes() == tiny.tobytes()
