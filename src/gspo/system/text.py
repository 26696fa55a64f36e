"""Text for terminals and pages, numbers in words, and progress bars. Torch-free."""

from __future__ import annotations

import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


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


def duration(seconds: float) -> str:
    """Seconds in two units; below a minute an integer, such as an estimate, has no decimal.

    >>> duration(4.2), duration(4), duration(65.2), duration(7322), duration(200_000)
    ('4.2 s', '4 s', '1 min 5 s', '2 h 2 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours = whole // 3600
    return f"{hours} h {whole % 3600 // 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def turns_text(turns: Iterable[tuple[bool, str]]) -> str:
    """The turns of an episode, (is from the environment, text), as one text: ‹…› is what the environment wrote.

    >>> turns_text([(False, "[1+1]"), (True, "2"), (False, ">2")])
    '[1+1]‹2›>2'
    """
    return "".join(f"‹{text}›" if of_environment else text for of_environment, text in turns)


@dataclass(frozen=True)
class TextRows:
    """Rows (name, text, style) for a rich console, which must be told not to crop: a path may be wider than it."""

    rows: Sequence[tuple[str, str, str]]
    indent: int = 0
    unwrapped: Collection[str] = ()  # names of rows with a command or a path: one line each, to be copied

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width = options.max_width - self.indent
        names = [wrapped(name, width // 3) for name, _, _ in self.rows]
        left = max((len(line) for lines in names for line in lines), default=0)
        gap = 2 if left else 0
        for lines, (title, text, style) in zip(names, self.rows, strict=True):
            right = [text] if title in self.unwrapped else wrapped(text, width - left - gap)
            for name, line in zip_longest(lines, right, fillvalue=""):
                parts = (" " * self.indent, (name.ljust(left + gap), "dim"), (line, style))
                yield Text.assemble(*parts, no_wrap=True, overflow="ignore")


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters. A path is never broken, so that it can be copied.

    >>> wrapped("run /tmp/a-long-folder/file of incomprehensible size", 16)
    ['run', '/tmp/a-long-folder/file', 'of', 'incomprehensible', 'size']
    >>> wrapped("incomprehensible", 9)
    ['incompreh', 'ensible']
    """
    lines: list[str] = []
    for line in text.split("\n"):
        words = (w if "/" in w else " ".join(textwrap.wrap(w, width)) or w for w in line.split(" "))
        lines += textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False) or [""]
    return lines


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys.

    >>> flat({"actor": {"lr": 1, "mb": {}}, "seed": 3})
    {'actor.lr': 1, 'actor.mb': {}, 'seed': 3}
    """
    out: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        out |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return out


LINE_EVERY_S = 10.0


@contextmanager
def progress(what: str, *, lines: bool = False, note: str = "") -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that shows progress with the time left, on stderr.

    `lines`: where stderr is no terminal, print a line at the start and then every LINE_EVERY_S; else print nothing.
    `note`: shown once, behind `what`; on a terminal as long as the bar.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what + note, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    start = last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= LINE_EVERY_S:
            last = now
            left = (now - start) * (total - done) / done
            print(
                f"gspo: {what}: {100 * done // total} %, about {duration(round(left))} left",
                file=sys.stderr,
                flush=True,
            )

    if lines:
        print(f"gspo: {what}{note}", file=sys.stderr, flush=True)
    yield line if lines else lambda done, total: None
