"""What prompts show: names and sizes from the sample files, pictures from the run's folder images/.

Both may be edited or damaged. A picture is sent as WebP only, whatever its content; a browser decodes it or shows
nothing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gspo.system.files import read_regular

MAX_BYTES = 128_000  # of one picture; ours have a few kB
BUDGET = 16_000_000  # bytes of pictures in one page
_NAME_LENGTH = 120


def shown_images(value: Any) -> tuple[str, str] | None:
    """The field `images` of a sample as sha256 and words; None if there is none or it is not as documented.

    >>> shown_images({"sha256": "ab" * 32, "from": [{"name": "cat.png", "size": [448, 336]}]})[1]
    'cat.png, 448 × 336'
    """
    if not isinstance(value, dict) or not is_digest(value.get("sha256")):
        return None
    given = value.get("from")
    words = [_words(one) for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return value["sha256"], "; ".join(words)


def _words(one: dict[str, Any]) -> str:
    name, size = one.get("name"), one.get("size")
    parts = [name[-_NAME_LENGTH:]] if isinstance(name, str) else []
    if isinstance(size, list) and len(size) == 2 and all(type(number) is int for number in size):
        parts.append(f"{size[0]} × {size[1]}")
    return ", ".join(parts)


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def sample_picture(run: Path, digest: str) -> bytes | None:
    """The small picture of a prompt's images; None: the run has none, or the file is no WebP file of this size."""
    if not is_digest(digest):
        return None
    try:
        file = run / "images" / f"{digest}.webp"
        content = read_regular(file) if file.stat().st_size <= MAX_BYTES else b""
    except OSError:
        return None
    return content if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def pictures(run: Path, digests: Iterable[str], budget: int = BUDGET) -> dict[str, str]:
    """Pictures as data: addresses, by sha256, in the order given, until `budget` bytes are used."""
    found: dict[str, str] = {}
    for digest in dict.fromkeys(digests):
        if (content := sample_picture(run, digest)) is not None:
            address = f"data:image/webp;base64,{base64.b64encode(content).decode()}"
            budget -= len(address)
            if budget < 0:
                break
            found[digest] = address
    return found
