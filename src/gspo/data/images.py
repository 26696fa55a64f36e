"""Images in the rows of a data set: file names, bytes or Pillow images, opened only when a model needs their pixels."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from gspo.data.sources import Row
from gspo.errors import DataError
from gspo.system import install_command, read_regular
from gspo.types import ImageFile

# Pillow would run a program (Ghostscript) for others, for example EPS.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_PIXELS, MAX_BYTES = 64_000_000, 256_000_000  # of one image
_PPM = re.compile(rb"P[456](?:(?:\s|#[^\n]*\n)+\d+){2,3}\s")
COLUMNS = ("images", "image")  # one of them, a single image or a list
_PART_KEYS = ("image", "path", "url")  # of a part {"type": "image", …} of a message


def given_images(row: Row, messages: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """The images of a row as they are: those of its column, else those inside the parts of its messages."""
    for name in COLUMNS:
        if (found := row.get(name)) is not None:
            return list(found) if isinstance(found, (list, tuple)) else [found]
    parts = [part for message in messages for part in _parts(message.get("content")) if part.get("type") == "image"]
    found = [next((part[key] for key in _PART_KEYS if part.get(key) is not None), None) for part in parts]
    return [image for image in found if image is not None]


def image_files(images: Sequence[Any], folder: Path, where: str) -> list[ImageFile]:
    """Images that can be opened again and again. `folder`: of their files; `where`: for messages."""
    files = []
    for number, image in enumerate(images):
        name, content = _content(image, folder, where)
        if content is None:
            raise DataError(
                f"{where}: image {number} must be a file name, bytes, {{'bytes': …}} or an image of Pillow, got "
                f"{type(image).__name__}"
            )
        files.append(ImageFile(name or f"image {number}", partial(_open, content)))
    return files


def image_digest(images: Sequence[Any], folder: Path, where: str) -> str:
    """A hash of the images' files; of an image of Pillow, of its pixels."""
    total = hashlib.sha256()
    for image in images:
        name, content = _content(image, folder, where)
        try:
            raw = read_regular(content, MAX_BYTES) if isinstance(content, Path) else content
        except OSError as error:
            raise DataError(f"{where}: the image {name} cannot be read: {error.strerror or error}") from None
        total.update(raw if isinstance(raw, bytes) else repr(raw).encode() if raw is None else raw.tobytes())
    return total.hexdigest()


def with_image_parts(messages: Sequence[Mapping[str, Any]], num: int) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts, with one part {"type": "image"} per image.

    If no message has such a part, they are the first parts of the first user turn.

    >>> with_image_parts([{"role": "user", "content": "What is it?"}], 1)[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    """
    made = [
        {
            **message,
            "content": [{"type": "image"} if p.get("type") == "image" else p for p in _parts(message["content"])],
        }
        for message in messages
        if isinstance(message.get("content"), (str, list))
    ]
    if num and not any(part.get("type") == "image" for message in made for part in message["content"]):
        first = next((message for message in made if message.get("role") == "user"), None)
        if first is not None:
            first["content"] = [{"type": "image"}] * num + first["content"]
    return made


def without_pixels(row: Row, names: Sequence[str]) -> Row:
    """The columns of a row for rewards and sample files: images are their names."""
    return {column: list(names) if column in COLUMNS and value is not None else value for column, value in row.items()}


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(part) for part in content or () if isinstance(part, Mapping)]


def _content(image: Any, folder: Path, where: str) -> tuple[str, Any]:
    """A name and where the pixels are: a file, bytes, or an image of Pillow; None: it is none of these."""
    if isinstance(image, Mapping):  # as parquet files of the hub have it
        name = str(image.get("path") or "")
        return (
            (name, image["bytes"]) if isinstance(image.get("bytes"), bytes) else _content(name or None, folder, where)
        )
    if isinstance(image, str):  # of a row that a stranger may have written; a Path is of the user's own program
        return image, _inside(image, folder, where)
    if isinstance(image, Path):
        return str(image), folder / image
    if isinstance(image, (bytes, bytearray)):
        return "", bytes(image)
    return "", image if hasattr(image, "convert") and hasattr(image, "tobytes") else None


def _inside(name: str, folder: Path, where: str) -> Path:
    try:
        file, root = (folder / name).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, or links in a circle
        raise DataError(f"{where}: the image {name[:200]!r} cannot be read: {error}") from None
    if not file.is_relative_to(root):
        raise DataError(
            f"{where}: the image {name[:200]} is outside of {root}, the folder of the data set; move it there, or set "
            "train_dataset.image_folder to a folder that holds all images"
        )
    return file


def _open(content: Any) -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(f"images need Pillow: {install_command('vision')}") from None

    if isinstance(content, Path):
        content = read_regular(content, MAX_BYTES)
    if not isinstance(content, bytes):
        return content
    # Pillow reads comments byte by byte in Python, and so it does the numbers of a PPM file that is text.
    if content[:1] == b"P" and not _PPM.match(content[:4096]):
        raise DataError("a PPM file must be binary (P4, P5 or P6), with short comments")
    with warnings.catch_warnings():  # Pillow's own limit warns or raises; ours is lower
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(BytesIO(content), formats=FORMATS)
    # The size stands in the header: no pixel is decoded before this.
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"the image has {width} × {height} pixels; at most {MAX_PIXELS:,} are read: make it smaller")
    ImageOps.exif_transpose(image, in_place=True)  # as a camera was held
    return image
