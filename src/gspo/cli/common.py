"""What the verbs share: configs from words, the terminal's width and colour, a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gspo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from gspo.config.load import Loaded

OVERRIDES = "key=value, +key=value, ++key=value, or ~key for its default"


def config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG [key=value …]", help=f"a YAML file, then overrides: {OVERRIDES}"
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML file, as AReaL's commands give it")


def load_config(args: argparse.Namespace) -> Loaded:
    from gspo.config.load import load

    words = list(args.words)
    path = args.config
    if path is None:
        if not words:
            raise ConfigError("which config? Give a YAML file, for example examples/math/gsm8k_gspo.yaml")
        path = words.pop(0)
    return load(path, words)


def display() -> dict[str, Any]:
    """How wide and how colourful: pipes get plain text of a fixed width; NO_COLOR and TERM=dumb are respected."""
    import shutil

    if not sys.stdout.isatty():
        return {"width": int(columns) if (columns := os.environ.get("COLUMNS", "")).isdigit() else 100, "styled": False}
    styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": shutil.get_terminal_size().columns, "styled": styled}


def console() -> Console:
    """Stdout for tables, as wide and as colourful as `display` says; texts are never read as markup."""
    from rich.console import Console

    how = display()
    return Console(width=how["width"], no_color=not how["styled"], highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while a person looks on; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", the nearest is {close[0]}" if close else ""
