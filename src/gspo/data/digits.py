"""`embedded:digits`: images of handwritten numbers, and their sums as answers.

The answer is written as in `embedded:arithmetic`: the columns from the right, then the result after `>`. Problems and
images are divided into three disjoint sets, for every seed: warm start (supervised), reinforcement learning, held-out
test. The held-out images are 20 % of the 1,797; the writers are not known, so one writer may be in several sets.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.data import arithmetic
from gspo.errors import DataError
from gspo.system import install_command

PATH = "embedded:digits"
QUESTION = "="
SIDE = 8  # pixels of one digit, both ways
# The range of the hash of an image that belongs to each split.
_BOUNDS = {"warm": (0.0, 0.35), "train": (0.35, 0.8), "test": (0.8, 1.0)}
ALIKE = dict(zip("174938", "719483", strict=True))  # digits that a teacher confuses
_SHIFTS = 9  # one pixel up or down, left or right, or none: 3 × 3


class Glyph(NamedTuple):
    """One handwritten digit of the data, shifted by at most one pixel."""

    number: int  # row of digits.csv.gz
    shift: int  # 3 · down + right, each 0, 1 (not shifted) or 2


class ShownProblem(NamedTuple):
    """A problem and the four digits of its image: upper number, lower number."""

    problem: arithmetic.Problem
    glyphs: tuple[Glyph, ...]


def problem_stream(split: arithmetic.Split, *, seed: int, start: int = 0) -> Iterator[ShownProblem]:
    """The endless stream of a split's problems with their images; a pure function of its arguments.

    Digits of the test split are not shifted.
    """
    drawn = arithmetic.problems(split, seed=seed, digits=(2, 2), start=start)
    for index, problem in enumerate(drawn, start):
        digits = [int(c) for c in problem.question if c.isdigit()]
        u = rng.uniform(seed, f"digits/{split}", index, range(2 * len(digits)))
        chosen = [_numbers(split, digit) for digit in digits]
        glyphs = tuple(
            Glyph(int(among[int(a * len(among))]), 4 if split == "test" else int(b * _SHIFTS))
            for among, a, b in zip(chosen, u[::2], u[1::2], strict=True)
        )
        yield ShownProblem(problem, glyphs)


def digit_rows(split: arithmetic.Split, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Rows with an image (its form is that of the hub's parquet files) and the answer; a problem may occur again."""
    made = []
    for (problem, glyphs), _ in zip(problem_stream(split, seed=seed), range(count), strict=False):
        image = {"path": name_of(glyphs), "bytes": png(picture(glyphs))}
        made.append({"question": QUESTION, "image": image, "answer": problem.answer, "solution": problem.solution})
    return made


def picture(glyphs: Sequence[Glyph]) -> NDArray[np.uint8]:
    """Two numbers one above the other, [16, 16]."""
    upper, lower = (np.concatenate([_pixels(g) for g in pair], axis=1) for pair in (glyphs[:2], glyphs[2:]))
    return np.concatenate([upper, lower])


def digit_of(glyph: Glyph) -> str:
    return str(_data()[glyph.number, -1])


def misread(digits: str, u: Iterable[float], share: float) -> str:
    """What a teacher reads who confuses 1 and 7, 4 and 9, 3 and 8 in a `share` of cases; `u`: a draw for each digit.

    >>> misread("17+25=", (0.1, 0.9, 0, 0, 0, 0), share=0.5)
    '77+25='
    """
    return "".join(ALIKE.get(c, c) if x < share else c for c, x in zip(digits, u, strict=True))


def png(pixels: NDArray[np.uint8]) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{PATH}: images need Pillow: {install_command('vision')}") from None
    content = BytesIO()
    Image.fromarray(pixels).save(content, "png")
    return content.getvalue()


def name_of(glyphs: Sequence[Glyph]) -> str:
    """The name of an image, from which it can be made again.

    >>> glyphs = (Glyph(3, 4), Glyph(17, 0), Glyph(5, 4), Glyph(1796, 8))
    >>> name_of(glyphs), glyphs_of(name_of(glyphs)) == glyphs
    ('embedded:digits/3.4-17.0-5.4-1796.8', True)
    """
    return f"{PATH}/{'-'.join(f'{number}.{shift}' for number, shift in glyphs)}"


def glyphs_of(name: str) -> tuple[Glyph, ...] | None:
    """The digits of an image by its name; None: it is not the name of one."""
    try:
        pairs = [tuple(map(int, part.split("."))) for part in name.removeprefix(f"{PATH}/").split("-")]
        glyphs = tuple(Glyph(number, shift) for number, shift in pairs)
    except ValueError:
        return None
    known = len(glyphs) == 4 and all(0 <= n < len(_data()) and 0 <= s < _SHIFTS for n, s in glyphs)
    return glyphs if known and name.startswith(f"{PATH}/") else None


def _pixels(glyph: Glyph) -> NDArray[np.uint8]:
    """One digit, [8, 8], white on black."""
    down, right = divmod(glyph.shift, 3)
    framed = np.pad(_data()[glyph.number, :-1].reshape(SIDE, SIDE), 1)
    shifted = framed[2 - down : 2 - down + SIDE, 2 - right : 2 - right + SIDE]
    return np.minimum(shifted * 16, 255).astype(np.uint8)  # the data count from 0 to 16


@cache
def _numbers(split: str, digit: int) -> NDArray[np.int64]:
    """The images of a digit that belong to a split."""
    every = np.arange(len(_data()))
    u, (low, high) = rng.uniform(0, "digits-split", every), _BOUNDS[split]
    return every[(_data()[:, -1] == digit) & (u >= low) & (u < high)]


@cache
def _data() -> NDArray[np.int64]:
    """The file, [1797, 65]: 64 pixels and the digit of each image."""
    packed = (resources.files("gspo.data") / "digits.csv.gz").read_bytes()
    return np.loadtxt(BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.float64).astype(np.int64)
