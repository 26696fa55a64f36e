"""Rows that show images: every way to give one, and what is refused with row and key."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
import vision_zoo
from PIL import Image

from gspo.data.dataset import load_dataset, make_dataset
from gspo.data.images import image_digest, image_files
from gspo.errors import DataError

TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<vs><image><ve>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vision_zoo.write_folder("qwen3_vl", folder)
    return vision_zoo.load_processor(str(folder), vision_zoo.tokenizer())


@pytest.fixture
def picture(tmp_path):
    image = Image.fromarray(np.random.default_rng(3).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    image.save(tmp_path / "cat.png")
    return image


def as_bytes(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_of(processor, rows, tmp_path, **how):
    return make_dataset(rows, tokenizer=processor, chat_template=TEMPLATE, folder=tmp_path, **how)


def test_an_image_is_a_file_bytes_a_table_cell_or_an_object(processor, picture, tmp_path):
    cells = [
        "cat.png",
        str(tmp_path / "cat.png"),
        as_bytes(picture),
        {"bytes": as_bytes(picture), "path": None},
        picture,
    ]
    data = data_of(processor, [{"prompt": "what?", "image": cell, "answer": "a"} for cell in cells], tmp_path)
    prompts = [data.prompt(row) for row in range(len(data))]
    assert len({prompt.tokens for prompt in prompts}) == 1
    assert len({prompt.images.digest for prompt in prompts}) == 1
    assert prompts[0].text == "<vs><image><ve>what?"
    assert prompts[0].images.sizes == ((16, 16),)
    assert set(prompts[0].images.prepare()) >= {"pixel_values", "image_grid_thw"}
    # Rewards and sample files get names, not pixels.
    assert [prompt.data["image"] for prompt in prompts[:2]] == [["cat.png"], [str(tmp_path / "cat.png")]]
    assert all(isinstance(name, str) for prompt in prompts for name in prompt.data["image"])


def test_images_in_parts_of_messages_stay_where_they_are(processor, picture, tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "image"}, {"type": "text", "text": "two "}, {"type": "image"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "images": ["cat.png", picture], "answer": "a"}]
    inside = [{"type": "text", "text": "one "}, *[{"type": "image", "path": "cat.png"}] * 2]
    rows.append({"prompt": [{"role": "user", "content": inside}], "answer": "a"})
    data = data_of(processor, rows, tmp_path)
    assert data.prompt(0).text == "one <vs><image><ve>two <vs><image><ve>"
    assert len(data.prompt(0).images.names) == 2
    assert data.prompt(1).text == "one <vs><image><ve><vs><image><ve>"


def test_plain_text_gets_its_placeholders_and_text_alone_stays_text(processor, picture, tmp_path):
    rows = [{"prompt": "what?", "image": picture, "answer": "a"}, {"prompt": "what?", "image": None, "answer": "b"}]
    data = make_dataset(rows, tokenizer=processor, chat_template=False, folder=tmp_path)
    assert data.prompt(0).text == "<image>what?"
    assert data.prompt(1).images is None
    assert data.prompt(1).tokens == tuple(processor.tokenizer.encode("what?"))


def test_a_file_of_rows_finds_images_beside_it_and_other_pixels_are_other_data(processor, picture, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "what?", "image": "cat.png", "answer": "a"}) + "\n")
    how = {"tokenizer": processor, "split": "all", "chat_template": TEMPLATE}
    first = load_dataset(str(file), **how)
    before, shown = first.digest(), first.prompt(0).images
    picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "cat.png")
    again = load_dataset(str(file), **how)
    assert again.digest() != before
    assert again.prompt(0).images.digest != shown.digest
    assert again.prompt(0).tokens == first.prompt(0).tokens


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"image": "dog.png"}, r"rows, row 0: dog\.png: the image cannot be read: .*dog\.png"),
        (
            {"image": b"no image"},
            r"rows, row 0: image 0: the image cannot be read: UnidentifiedImageError",
        ),
        ({"image": "cut.png"}, r"rows, row 0: cut\.png: the image cannot be read: OSError: .*truncated"),
        ({"image": "bomb.png"}, r"rows, row 0: bomb\.png: the image has 9000 × 9000 pixels; at most 64,000,000"),
        ({"image": "page.eps"}, r"rows, row 0: page\.eps: the image cannot be read: UnidentifiedImageError"),
        ({"image": "line.png"}, r"rows, row 0: line\.png: the model's processor cannot take the image: .*aspect ratio"),
        ({"image": "."}, r"rows, row 0: \.: the image cannot be read: .*not a regular file"),
        ({"image": 7}, r"rows, row 0: image 0 must be a file name, bytes, .* got int"),
        ({"images": ["cat.png"] * 2, "prompt": "<image>?"}, "1 image placeholders .* and 2 images"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_its_row(processor, picture, tmp_path, row, match):
    (tmp_path / "cut.png").write_bytes(as_bytes(picture)[:-300])
    # A PNG file of 45 bytes whose header has 9,000 × 9,000 pixels.
    chunks = b"IHDR" + struct.pack(">II", 9000, 9000) + bytes([8, 2, 0, 0, 0]), b"IDAT"
    parts = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    (tmp_path / "page.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    Image.new("RGB", (1000, 1)).save(tmp_path / "line.png")
    rows = [{"prompt": "what?", "answer": "a", **row}]
    data = make_dataset(rows, tokenizer=processor, chat_template=False, folder=tmp_path)
    with pytest.raises(DataError, match=match):
        data.prompt(0)


def test_an_image_needs_a_model_that_sees_and_too_long_prompts_are_found(processor, picture, tmp_path):
    rows = [{"prompt": "what?", "image": picture, "answer": "a"}]
    blind = make_dataset(rows, tokenizer=processor.tokenizer, chat_template=False)
    with pytest.raises(
        DataError, match=r"row 0: the prompt shows an image, and the model takes text alone; set actor\.p"
    ):
        blind.prompt(0)
    data = data_of(processor, rows, tmp_path)
    length = len(data.prompt(0).tokens)
    assert length > len("what?") + 3
    assert data.excess(0, length - 1) == f"{length} tokens"
    assert data.excess(0, length) == ""


def saved(folder, name, **how):
    Image.new("RGB", (40, 20)).save(folder / name, **how)
    return folder / name


@pytest.mark.parametrize("name", ["../x.png", "/etc/x.png", "a/../../x.png", "link.png", "folder/x.png", "~/x.png"])
def test_a_row_shows_no_image_outside_of_the_folder_of_its_data(tmp_path, name):
    inside = tmp_path / "data"
    inside.mkdir()
    saved(tmp_path, "x.png")
    (inside / "link.png").symlink_to(tmp_path / "x.png")
    (inside / "folder").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"mine: the image .*(outside of .*train_dataset\.image_folder|No such file)"):
        image_digest([name], inside, "mine")
    if name != "~/x.png":
        with pytest.raises(DataError, match=r"mine: the image .* is outside of .*; .* train_dataset\.image_folder"):
            image_files([{"path": name}], inside, "mine")
    # With a folder that holds all of them, and for a path of the user's own program.
    saved(inside, "own.png")
    assert image_files(["data/own.png"], tmp_path, "mine")[0].open().size == (40, 20)
    assert image_files([tmp_path / "x.png"], inside, "mine")[0].open().size == (40, 20)


@pytest.mark.parametrize("name", ["a\0b.png", "\ud800.png", "x" * 5000 + ".png", "loop"])
def test_an_image_name_that_no_file_can_have_is_named(tmp_path, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for read in (image_digest, lambda *given: image_files(*given)[0].open()):
        with pytest.raises((DataError, OSError), match=r"image|name"):
            read([name], tmp_path, "rows, row 3")


def test_a_huge_image_file_is_not_read_for_the_digest(tmp_path):
    with open(tmp_path / "big.png", "wb") as file:
        file.truncate(300 * 2**30)
    with pytest.raises(DataError, match=r"rows: the image big\.png cannot be read: it has 322,122,547,200 bytes"):
        image_digest(["big.png"], tmp_path, "rows")


@pytest.mark.parametrize(
    ("orientation", "size"), [(1, (40, 20)), (3, (40, 20)), (6, (20, 40)), (8, (20, 40)), (99, (40, 20))]
)
def test_an_image_is_turned_as_the_camera_was_held(tmp_path, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (40, 20), "black")
    image.putpixel((0, 0), (255, 255, 255))
    image.save(tmp_path / "a.png", exif=exif)
    opened = image_files(["a.png"], tmp_path, "rows")[0].open()
    assert opened.size == size
    corner = {1: (0, 0), 3: (39, 19), 6: (19, 0), 8: (0, 39), 99: (0, 0)}[orientation]
    assert opened.getpixel(corner) == (255, 255, 255)


@pytest.mark.parametrize(
    "content",
    [
        b"P6\n#" + b"x" * 50_000_000 + b"\n1 1\n255\n123",
        b"P3\n1 1\n255\n" + b"1 " * 1_000_000,
        b"P6\n" + b" " * 1_000_000 + b"1 1 255\n123",
        b"P6\n" + b"#\n" * 1_000_000 + b"1 1 255\n123",
        b"P5 " + b"1" * 100_000,
    ],
)
def test_a_ppm_file_that_pillow_reads_slowly_is_refused(tmp_path, content):
    (tmp_path / "a.ppm").write_bytes(content)
    with pytest.raises(DataError, match="PPM file must be binary"):
        image_files(["a.ppm"], tmp_path, "rows")[0].open()
    (tmp_path / "a.ppm").write_bytes(b"P6\n# made by a program\n1 1\n255\nabc")
    assert image_files(["a.ppm"], tmp_path, "rows")[0].open().getpixel((0, 0)) == (97, 98, 99)


def test_the_first_frame_of_an_animation_is_shown(tmp_path):
    frames = [Image.new("L", (4, 4), 10 * i) for i in range(5)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert image_files(["a.gif"], tmp_path, "rows")[0].open().convert("L").getpixel((0, 0)) == 0
