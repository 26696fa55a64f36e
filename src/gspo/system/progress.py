"""Progress of work that takes longer than a second: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gspo.system.text import duration

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
