"""Shared by the verbs, and the verbs that list what there is: models, examples, objectives and config keys."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo.algorithms import ALGORITHMS
from gspo.config import Loaded, dump, known_keys, load, unknown_key
from gspo.errors import ConfigError, GspoError
from gspo.shipped import copy_example, example_files, find_config, with_pages
from gspo.system import NO_LAB, TextRows, in_lab, laboratory, set_limit

MIN_TIMEOUT_S = 600.0  # the least stall timeout outside of training


def load_config(args: argparse.Namespace) -> Loaded:
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
    loaded = load(path, words)
    set_limit(max(loaded.config.stall_timeout, MIN_TIMEOUT_S))
    return loaded


def display() -> dict[str, Any]:
    """Width and colour of the output: a pipe gets plain text of a fixed width; NO_COLOR and TERM=dumb are respected."""
    if not sys.stdout.isatty():
        columns = os.environ.get("COLUMNS", "")
        return {"width": int(columns) if columns.isdecimal() else 100, "styled": False}
    styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": shutil.get_terminal_size().columns, "styled": styled}


def console() -> Console:
    """Stdout for tables, with the width and colour of `display`; text is never parsed as markup."""
    how = display()
    return Console(width=how["width"], no_color=not how["styled"], highlight=False, markup=False, emoji=False)


def did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "."


def models(args: argparse.Namespace) -> int:
    if args.what == "check":
        return _check_models(args)
    if args.names:
        raise ConfigError("gspo models list takes no further arguments")
    from gspo.report import models_view

    console().print(models_view(_known_models()), crop=False)
    return 0


def _known_models() -> list[dict[str, Any]]:
    """All known models, in the cache or not: name, description, whether it is there, bytes on disk, folder."""
    from gspo.models import FETCHED, cache, embedded, fetched_folder

    found: list[dict[str, Any]] = []
    for name in embedded.RECIPES:
        built, say = embedded.embedded_folder(name), f"built on first use, in {embedded.build_time(name)}"
        found.append(_model_row(name, embedded.DESCRIPTIONS[name], built, say))
    for name in FETCHED:
        what = "SmolLM2-135M-Instruct, Apache-2.0, from Q4_1"
        found.append(_model_row(name, what, fetched_folder(name), f"python examples/fetch.py {name}"))
    for place in sorted(cache.root().glob("gguf-*")):
        found.append(_model_row(place.name, "converted from a .gguf file", place, ""))
    return found


def _model_row(name: str, what: str, place: Path, absent: str) -> dict[str, Any]:
    from gspo.models import SUMS

    is_here = (place / SUMS).is_file()
    size = sum(file.stat().st_size for file in place.iterdir()) if is_here else 0
    return {"name": name, "what": what, "here": is_here, "bytes": size, "where": str(place) if is_here else absent}


def _check_models(args: argparse.Namespace) -> int:
    """`gspo models check`: exit code 1 if a model is refused or not exact."""
    from gspo.doctor import COLUMNS, check_model, is_exact

    if bool(args.names) == args.all:
        raise ConfigError("give folders or model types to check, or --all; for example: gspo models check qwen3_next")
    # The tiny models of each type are not in an installed package.
    types = in_lab("lab.zoo.families:TYPES") if args.all or args.write or laboratory() is not None else ()
    for name in args.names:
        if name not in types:
            _require_model(name, types)
    widths = (24, 16, 20, 10, 10, 7)

    def show(cells: Sequence[str]) -> None:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    show(COLUMNS)
    rows = []
    for name in types if args.all else args.names:
        rows.append(in_lab("lab.zoo.families:check_type")(name) if name in types else check_model(name))
        show(rows[-1].cells())
    if args.write:
        Path(args.write).write_text(in_lab("lab.zoo.families:families_page")(rows), encoding="utf-8")
    built = [row for row in rows if not row.not_built]
    wrong = [row.name for row in built if not is_exact(row)]
    print(
        f"{len(built) - len(wrong)} of {len(rows)} train and sample; refused or not exact: {', '.join(wrong) or 'none'}"
        + (f"; {len(rows) - len(built)} not built" if len(built) < len(rows) else "")
    )
    return 1 if wrong else 0


def _require_model(name: str, types: Sequence[str]) -> None:
    """An error before any check if a name is neither a model type nor a model that `actor.path` could name."""
    from gspo.models import find_here, is_hub_name

    try:
        find_here(name, "model")
    except GspoError as error:
        if not is_hub_name(name):
            raise ConfigError(str(error)) from error
        what = "neither a model type of transformers nor a model" if types else "not a model"
        without = "" if types else f". To check a model type of transformers: {NO_LAB}"
        raise ConfigError(
            f"{name!r} is {what}{did_you_mean(name, types)} There is no such folder, and the hub did not provide it"
            f"{without}"
        ) from error


def objectives(args: argparse.Namespace) -> int:
    from gspo.doctor import algorithm_card, algorithm_table

    if args.name is None:
        print(algorithm_table(**display()))
        return 0
    algorithm = ALGORITHMS.get(args.name.lower().replace("-", "_"))
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"unknown objective {args.name!r}{did_you_mean(args.name, ALGORITHMS)} Available: {known}")
    print(algorithm_card(algorithm, **display()))
    return 0


def config(args: argparse.Namespace) -> int:
    from gspo.cli.schema import json_schema

    if args.schema:
        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return 0
    if len(args.words) == 1 and args.config is None and not _is_config(args.words[0]):
        return _explain_key(args.words[0])
    print(dump(load_config(args)), end="")
    return 0


def _is_config(word: str) -> bool:
    """True for a file, an example, and what looks like the path of a file; a key has no slash and no such suffix."""
    is_path = "/" in word or word.endswith((".yaml", ".yml")) or "=" in word
    return is_path or Path(word).is_file() or find_config(word) is not None


def _explain_key(name: str) -> int:
    """Print the description, type, bounds and default of a key, or of each key of a section."""
    keys = known_keys()
    if name not in keys:
        # The last part alone is enough where no other key has it.
        ends = [key for key in keys if key.endswith(f".{name}")]
        if not ends:
            raise ConfigError(unknown_key(name, "no file and no example has this name, and as a key"))
        if len(ends) > 1:
            raise ConfigError(f"several keys end in {name}: {', '.join(ends)}; for one of them: gspo config {ends[0]}")
        (name,) = ends
    rows = []
    for key in keys.values():
        if key.name == name or key.name.startswith(f"{name}."):
            rows.append((key.name, with_pages(key.doc), ""))
            if key.section is None:
                bounds = f", {key.bounds}" if key.bounds else ""
                default = json.dumps(key.default, ensure_ascii=False)
                rows.append(("", f"{key.wanted}{bounds}; default {default}", "dim"))
    console().print(TextRows(rows), crop=False)
    return 0


def examples(args: argparse.Namespace) -> int:
    known = example_files()
    if args.what == "list":
        console().print(TextRows([(name, _first_line(file), "") for name, file in known.items()]), crop=False)
        print("\nRun one with `gspo train NAME`, or `gspo examples copy NAME DIR` to change it.")
        return 0
    if args.name is None:
        raise ConfigError(f"which example? Pass its name: gspo examples copy NAME DIR. Examples: {', '.join(known)}")
    if args.name not in known:
        raise ConfigError(
            f"no example is called {args.name!r}{did_you_mean(args.name, known)} Examples: {', '.join(known)}"
        )
    try:
        written = copy_example(known[args.name], Path(args.to))
    except FileExistsError as error:
        raise ConfigError(f"{error} exists, and gspo does not overwrite it; pass another folder") from None
    print(*written, sep="\n")
    return 0


def _first_line(file: Path) -> str:
    """What an example is about: the first line of its comment or docstring."""
    return file.read_text(encoding="utf-8").partition("\n")[0].strip('#" ')
