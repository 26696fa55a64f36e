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
