"""Text for terminals and pages: escape control characters, format numbers. Torch-free."""

from __future__ import annotations

import unicodedata

# Unicode categories of characters that can move the cursor, change colours or reorder text.
DANGEROUS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def inert(text: str) -> str:
    r"""Escape characters that could control a terminal; line breaks stay.

    >>> inert("a\x1b[31mb\u202e")
    'a\\x1b[31mb\\u202e'
    """
    return "".join(
        c.encode("unicode_escape").decode() if c != "\n" and unicodedata.category(c) in DANGEROUS else c for c in text
    )


def human(num_bytes: int) -> str:
    """A size in bytes with a binary unit.

    >>> human(1536), human(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def number(value: float) -> str:
    """A setting in its usual short form.

    >>> number(3e-4), number(0.0025), number(0.2), number(1.0)
    ('3e-4', '2.5e-3', '0.2', '1')
    """
    if value == 0 or abs(value) >= 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.5e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def count(number: int) -> str:
    """A large number with a unit.

    >>> count(1_543_000_000), count(820)
    ('1.54 B', '820')
    """
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
