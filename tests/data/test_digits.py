"""The embedded vision task: the image shows the numbers of the answer, and held-out images and problems are apart."""

from io import BytesIO
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from gspo.data import digits
from gspo.data.arithmetic import SPLITS
from gspo.data.sources import default_reward, rows_of
from gspo.errors import DataError


def drawn(split, seed=1, count=2000):
    return list(islice(digits.problem_stream(split, seed=seed), count))


def rows(split, **changes):
    settings = {"size": 8, "seed": 1, "options": {}, "text_of": str, "key": "train_dataset", "notes": []}
    return rows_of("embedded:digits", split, **{**settings, **changes})


def test_the_image_shows_the_digits_of_the_problem():
    labels = digits._data()[:, -1]
    for problem, glyphs in drawn("train", count=200):
        upper, lower = (int("".join(str(labels[g.number]) for g in pair)) for pair in (glyphs[:2], glyphs[2:]))
        assert str(upper + lower) == problem.answer
        assert problem.solution.endswith(f">{problem.answer}")


def test_the_three_splits_share_neither_images_nor_problems():
    images = {split: {g.number for shown in drawn(split) for g in shown.glyphs} for split in SPLITS}
    problems = {
        split: {tuple(sorted(shown.problem.question.rstrip("=").split("+"))) for shown in drawn(split)}
        for split in SPLITS
    }
    for one, other in (("warm", "train"), ("warm", "test"), ("train", "test")):
        assert not images[one] & images[other]
        assert not problems[one] & problems[other]
    assert len(images["test"]) > 350


def test_a_shift_moves_a_digit_by_one_pixel_and_the_held_out_ones_are_not_shifted():
    still = digits._pixels(digits.Glyph(5, 4))
    assert still.max() > 200
    assert np.array_equal(digits._pixels(digits.Glyph(5, 7))[1:], still[:-1])  # down
    assert np.array_equal(digits._pixels(digits.Glyph(5, 5))[:, 1:], still[:, :-1])  # right
    assert {g.shift for shown in drawn("test", count=50) for g in shown.glyphs} == {4}
    assert {g.shift for shown in drawn("train", count=200) for g in shown.glyphs} == set(range(9))


def test_rows_hold_an_image_that_its_name_makes_again():
    for row in rows("train"):
        pixels = np.asarray(Image.open(BytesIO(row["image"]["bytes"])))
        assert pixels.shape == (16, 16)
        glyphs = digits.glyphs_of(row["image"]["path"])
        assert glyphs is not None
        assert np.array_equal(pixels, digits.picture(glyphs))
    assert rows("train") == rows("train") != rows("train", seed=2)
    assert rows("test") == rows("test", seed=2)


@pytest.mark.parametrize(
    "name", ["cat.png", "embedded:digits/1.4", "embedded:digits/1.4-2.4-3.4-9999.4", "1.4-2.4-3.4-4.4"]
)
def test_another_name_is_no_image_of_the_task(name):
    assert digits.glyphs_of(name) is None


def test_the_reward_is_that_of_arithmetic_and_another_name_is_refused_with_this_one():
    assert default_reward("embedded:digits") == default_reward("embedded:arithmetic")
    with pytest.raises(DataError, match=r"no embedded:digit; use .*embedded:digits"):
        rows_of("embedded:digit", "train", size=8, seed=1, options={}, text_of=str, key="train_dataset", notes=[])
