"""`gspo study`: experiments on the paper's claims, and comparisons of your own arms."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo.cli.common import console
from gspo.errors import ConfigError


def study(args: argparse.Namespace) -> int:
    from gspo.studies import Choice, command

    if args.what not in ("list", "run", "show", "page"):  # gspo study clipping: run it
        args.names, args.what = [args.what, *args.names], "run"
    if args.what == "run":
        if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
            raise ConfigError("--jobs and --seeds must be 1 or more")
        return command.run_studies(
            args.names,
            Choice(args.full, args.only, args.seeds),
            docs=Path(args.docs),
            runs=Path(args.runs),
            num_parallel=args.jobs,
            console=console(),
        )
    if args.what == "page":
        print(command.generate_page(Path(args.docs)))
    elif args.what == "show":
        command.show(args.names, Path(args.docs), console())
    else:
        command.listing(Path(args.docs), console())
    return 0
