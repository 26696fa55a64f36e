"""`gspo study`: comparisons of your own arms over seeds, and the experiments on the paper's claims."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo.cli.common import console
from gspo.errors import ConfigError


def study(args: argparse.Namespace) -> int:
    from gspo.studies import Choice, command

    docs = Path(args.docs) if args.docs else None
    if args.what not in ("list", "run", "show", "page"):  # gspo study clipping: run it
        args.names, args.what = [args.what, *args.names], "run"
    if args.what == "run":
        if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
            raise ConfigError("--jobs and --seeds must be 1 or more")
        return command.run_studies(
            args.names,
            Choice(args.full, args.only, args.seeds),
            docs=docs,
            runs=Path(args.runs),
            num_parallel=args.jobs,
            console=console(),
        )
    if args.what == "page":
        print(*command.generate_pages(args.names, docs), sep="\n")
    elif args.what == "show":
        command.show(args.names, docs, console())
    else:
        command.listing(args.names, docs, console())
    return 0
