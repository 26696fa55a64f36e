"""A bound on what a folder's tokenizer makes of a short text: a normalizer can turn one character into gigabytes."""

from __future__ import annotations

import base64
import math
from typing import Any

from gspo.errors import DataError
from gspo.system import parse_json

MAX_GROWTH = 1000


def check_growth(tokenizer: Any, place: str) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in (getattr(backend, name, None) for name in ("normalizer", "decoder")):
        if part is not None and (times := growth(parse_json(part.__getstate__()))) > MAX_GROWTH:
            raise DataError(
                f"{place}: the {type(part).__name__} of tokenizer.json can make a text {times:,.0f} times longer; "
                f"at most {MAX_GROWTH:,} times is allowed"
            )


def growth(part: Any) -> float:
    """By which factor a normalizer or a decoder of tokenizer.json may make a text longer, at most.

    >>> growth({"normalizers": [{"pattern": {"String": "ab"}, "content": "abcd"}, {"prepend": "▁▁"}]})
    6.0
    """
    if isinstance(part, list):
        return math.prod(map(growth, part))
    if not isinstance(part, dict):
        return 1.0
    times = growth(part.get("normalizers") or part.get("decoders"))
    if isinstance(content := part.get("content"), str):
        pattern = part.get("pattern")
        found = pattern.get("String") if isinstance(pattern, dict) else None
        # An empty pattern, and a regular expression that matches the empty text, are found before each character, too.
        times *= max(1.0, len(content) / len(found)) if found else 1.0 + len(content)
    if isinstance(charsmap := part.get("precompiled_charsmap"), str):
        # Four bytes with the size of an index, the index, and the replacements as texts that end with NUL.
        table = base64.b64decode(charsmap)
        times *= max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")), default=1) or 1
    return times * (1 + len(part.get("prepend") or ""))
