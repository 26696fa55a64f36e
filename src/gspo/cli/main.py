"""The `gspo` command: dispatch, exit codes and help. The table of its verbs is verbs.yaml."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo import __version__
from gspo.errors import ConfigError, GspoError
from gspo.system import by_name, heartbeat, in_lab, laboratory, parse_yaml, program

# The commands with a deadline: they end after the stall timeout without progress. The others wait for the user, or for
# runs that have their own, or do little.
_WATCHED = frozenset(
    ("train", "preview", "eval", "report", "export", "chat", "checkpoints", "compare", "doctor", "audit")
)


class Verb(NamedTuple):
    """A row of verbs.yaml, which explains the fields."""

    usage: str
    line: str
    run: str
    arguments: Mapping[str, Mapping[str, Any]] | str


HERE = Path(__file__).parent
VERBS = {name: Verb(**row) for name, row in parse_yaml((HERE / "verbs.yaml").read_text(encoding="utf-8")).items()}
TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "path": Path}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""
    program.wait_without_spinning()
    if argv is None and sys.argv[1:2] and sys.argv[1] in _WATCHED:
        # Exits: signals and the stall timeout cover the rest of the process. Training shows its progress itself.
        program.run_main(lambda: main(sys.argv[1:]), math.inf if sys.argv[1] == "train" else heartbeat.NOTICE_S)
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # formulas on a terminal without UTF-8
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except GspoError as error:
        from gspo.shipped import with_pages
        from gspo.system import inert

        print(f"gspo: {inert(with_pages(f'{error!s:.10000}'))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader of stdout (`| head`) has left, or else another pipe is broken, which is an error.
        if not program.stdout_is_closed():
            raise
        program.drop_stdout()
        return 0
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"gspo {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        from gspo.cli.common import did_you_mean  # imports the config

        raise ConfigError(
            f"unknown command {words[0]!r}{did_you_mean(words[0], VERBS)} `gspo --help` lists the commands"
        )
    heartbeat.beat(f"the start of gspo {words[0]}")
    # Intermixed: options may come between overrides.
    args = parser_of(words[0], verb).parse_intermixed_args(words[1:])
    return _function(verb.run)(args)  # imported after `--help` and wrong options have ended the command


def _function(name: str) -> Callable[..., Any]:
    return (in_lab if name.startswith("lab.") else by_name)(name)


def parser_of(name: str, verb: Verb) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"gspo {name}", usage=f"gspo {verb.usage}", description=verb.line, allow_abbrev=False
    )
    if isinstance(verb.arguments, str):
        _function(verb.arguments)(parser)
        return parser
    for argument, settings in verb.arguments.items():
        parser.add_argument(argument, **{**settings, "help": settings["help"] or argparse.SUPPRESS, **_type(settings)})
    return parser


def _type(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": TYPES[settings["type"]]} if "type" in settings else {}


def available_verbs() -> dict[str, Verb]:
    """The table without the verbs of a clone, if this is an installed package; those say where they are."""
    return {name: verb for name, verb in VERBS.items() if not verb.run.startswith("lab.") or laboratory()}


def help_text() -> str:
    from gspo.shipped import shipped

    verbs = "\n".join(f"  {name:<12} {verb.line}" for name, verb in available_verbs().items())
    text = (HERE / "help.txt").read_text(encoding="utf-8").rstrip("\n")
    return text.format(version=__version__, verbs=verbs, pages=shipped("docs"))
