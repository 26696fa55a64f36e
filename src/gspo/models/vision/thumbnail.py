"""A small picture of what a prompt shows, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

SIDE = 160  # pixels of the longer side of an image
MAX_IMAGES = 4  # of a prompt, side by side
_TINY = 64  # images up to this side are stored without loss: their pixels can be seen


def thumbnail(images: Sequence[Any]) -> bytes:
    """The first images of a prompt side by side, each at most SIDE pixels wide and high, as a WebP file."""
    from PIL import Image

    small = []
    for image in images[:MAX_IMAGES]:
        one = image.convert("RGB")
        one.thumbnail((SIDE, SIDE))
        small.append(one)
    gap = 4
    sheet = Image.new("RGB", (sum(i.width + gap for i in small) - gap, max(i.height for i in small)), "white")
    left = 0
    for one in small:
        sheet.paste(one, (left, 0))
        left += one.width + gap
    content = BytesIO()
    sheet.save(content, "webp", lossless=max(sheet.size) <= _TINY, quality=80)
    return content.getvalue()
