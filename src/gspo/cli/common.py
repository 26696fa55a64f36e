"""Shared by the verbs: loading a config from arguments, width and colour of the terminal."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import TYPE_CHECKING, Any

from gspo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from gspo.config.load import Loaded

OVERRIDES = "key=value (also +key=value, ++key=value), or ~key to reset it to its default"


def config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG [key=value …]", help=f"a YAML file, then overrides: {OVERRIDES}"
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML file; the form that AReaL's commands use")


def override_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a command that has a config of its own."""
    parser.add_argument("words", nargs="*", metavar="key=value …", help=f"overrides: {OVERRIDES}")
    parser.add_argument("--config", help=argparse.SUPPRESS)  # an error that names `gspo train`


def load_config(args: argparse.Namespace) -> Loaded:
    from gspo.config.load import load

    words = list(args.words)
    path = args.config
    if path is None:
        if not words:
            raise ConfigError(
                "no config given: pass a YAML file, or the name of an example: quickstart (`gspo examples` lists them)"
            )
        path = words.pop(0)
        if "=" in path and not os.path.exists(path):
            raise ConfigError(
                f"no config given: {path!r} sets a key; pass a YAML file or the name of an example before it: "
                f"quickstart {path}"
            )
    return load(path, words)


def display() -> dict[str, Any]:
    """Width and colour of the output: a pipe gets plain text of a fixed width; NO_COLOR and TERM=dumb are respected."""
    import shutil

    if not sys.stdout.isatty():
        columns = os.environ.get("COLUMNS", "")
        return {"width": int(columns) if columns.isdecimal() else 100, "styled": False}
    styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": shutil.get_terminal_size().columns, "styled": styled}


def console() -> Console:
    """Stdout for tables, with the width and colour of `display`; text is never parsed as markup."""
    from rich.console import Console

    how = display()
    return Console(width=how["width"], no_color=not how["styled"], highlight=False, markup=False, emoji=False)


def did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "."
