"""The `gspo` command: verbs only. Each verb imports what it needs when it runs, so help and doctor stay torch-free."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo import __version__
from gspo.errors import ConfigError, GspoError

if TYPE_CHECKING:
    from gspo.config.load import Loaded

OVERRIDES = "key=value, +key=value, ++key=value, or ~key for its default"


class Verb(NamedTuple):
    usage: str
    line: str  # one line for `gspo --help`
    arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # formulas on a terminal without UTF-8
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except GspoError as error:
        from gspo.config.render import inert

        print(f"gspo: {inert(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Without this, Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"gspo {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise ConfigError(f"{words[0]!r} is no verb{_nearest(words[0], VERBS)}. `gspo --help` lists the verbs")
    parser = argparse.ArgumentParser(
        prog=f"gspo {words[0]}", usage=f"gspo {verb.usage}", description=verb.line, allow_abbrev=False
    )
    verb.arguments(parser)
    # Intermixed: options may stand between overrides.
    return verb.run(parser.parse_intermixed_args(words[1:]))


def help_text() -> str:
    verbs = "\n".join(f"  {name:<12} {verb.line}" for name, verb in VERBS.items())
    return f"""\
gspo {__version__}: reinforcement-learning post-training for language models,
with Group Sequence Policy Optimization at its centre.

Try first:
  gspo train examples/quickstart.yaml          a tiny model learns to add, in minutes, on a CPU
  gspo doctor examples/math/gsm8k_gspo.yaml    what a config will do, before it does it
  gspo objectives gspo                         the formula, its paper, its defaults

Verbs:
{verbs}

Any key of the config can be set on the command line: `gspo doctor run.yaml gconfig.n_samples=16`.
`~key` resets one to its default; `+key=value` and `++key=value` mean `key=value`.
Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG [key=value …]", help=f"a YAML file, then overrides: {OVERRIDES}"
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML file, as AReaL's commands give it")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _load(args: argparse.Namespace) -> Loaded:
    from gspo.config.load import load

    words = list(args.words)
    path = args.config
    if path is None:
        if not words:
            raise ConfigError("which config? Give a YAML file, for example examples/math/gsm8k_gspo.yaml")
        path = words.pop(0)
    return load(path, words)


def _doctor(args: argparse.Namespace) -> int:
    from gspo.config.explain import explain, to_json
    from gspo.config.render import to_text

    try:
        loaded = _load(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"exit_code": 2, "unreadable": str(error).splitlines()}))
        raise
    report = explain(loaded, embedded=_embedded_shape)
    print(to_json(report) if args.json else to_text(report, **_display()))
    return report.exit_code


def _train(args: argparse.Namespace) -> int:
    from gspo.config.lint import check

    loaded = _load(args)
    check(loaded)  # the loop says the warnings; the impossible is refused here, seconds before torch is imported
    from gspo.train import run

    summary = run(loaded)
    return 0 if summary.finished else 130  # stopped by a signal, whole and resumable


def _config(args: argparse.Namespace) -> int:
    from gspo.config.document import dump

    print(dump(_load(args)), end="")
    return 0


def _objectives(args: argparse.Namespace) -> int:
    from gspo.algorithms import ALGORITHMS
    from gspo.config.render import algorithm_card, algorithm_table

    if args.name is None:
        print(algorithm_table(**_display()))
        return 0
    algorithm = ALGORITHMS.get(args.name.lower().replace("-", "_"))
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"{args.name!r} is no objective{_nearest(args.name, ALGORITHMS)}. Known: {known}")
    print(algorithm_card(algorithm, **_display()))
    return 0


def _embedded_shape(name: str) -> Mapping[str, Any]:
    # models/ stands above config/, so the shapes of embedded models are handed down from here.
    from gspo.models.embedded import shape

    return shape(name)


def _display() -> dict[str, Any]:
    """How wide and how colourful: pipes get plain text of a fixed width; NO_COLOR and TERM=dumb are respected."""
    import shutil

    if not sys.stdout.isatty():
        return {"width": int(columns) if (columns := os.environ.get("COLUMNS", "")).isdigit() else 100, "styled": False}
    styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": shutil.get_terminal_size().columns, "styled": styled}


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", the nearest is {close[0]}" if close else ""


VERBS: dict[str, Verb] = {
    "doctor": Verb(
        "doctor CONFIG [key=value …] [--json]",
        "explain a config: objective, batches, memory, warnings; touches no weights",
        _doctor_arguments,
        _doctor,
    ),
    "train": Verb("train CONFIG [key=value …]", "train as a config says", _config_arguments, _train),
    "objectives": Verb(
        "objectives [NAME]",
        "the table of objectives, or one's formula, paper and defaults",
        lambda parser: parser.add_argument("name", nargs="?", metavar="NAME", help="for example gspo"),
        _objectives,
    ),
    "config": Verb(
        "config CONFIG [key=value …]",
        "print the resolved config: every key, as a run writes it down",
        _config_arguments,
        _config,
    ),
}
