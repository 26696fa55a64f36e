"""Rows of files, folders, hub data sets and procedural tasks, and their held-out part.

`rows_of(path, split)` is the entry point. If a source has no held-out part, a hash of each problem's text divides it,
so that equal problems are always in the same part.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo.data import arithmetic
from gspo.errors import DataError
from gspo.system import by_name, human, install_command

HELD_OUT = ("test", "valid", "validation", "val", "dev", "eval", "heldout")
ONE_IN = 20  # a row in so many is held out
FEW = ONE_IN  # with fewer rows nothing need be held out
MOST = 0.25  # largest share that may be held out


def in_held_out(text: str, share: float) -> bool:
    """Whether a problem belongs to the held-out part.

    >>> in_held_out("2+2=", 0.0), in_held_out("2+2=", 1.0)
    (False, True)
    """
    return _hash(text) < share * 2**64


class Division(NamedTuple):
    """Which rows are held out, and what a user should know about it (empty: nothing)."""

    held_out: list[bool] | None  # None: the rows are too few, so training and evaluation use all of them
    note: str = ""


def divide(texts: Sequence[str]) -> Division:
    """Hold out about 5 % of the rows, by their prompts.

    Equal prompts are on the same side. The exception are rows with so few different prompts that a side would be empty,
    or more than a quarter held out (an environment may have one prompt for all rows): these are divided row by row.

    >>> divide(["guess"] * 60).held_out.count(True), divide(["a", "b"]).held_out
    (3, None)
    """
    total = len(texts)
    held = [in_held_out(text, 1 / ONE_IN) for text in texts]
    if any(held) and not all(held) and (total < FEW or sum(held) <= MOST * total):
        return Division(held)
    if total < FEW:
        return Division(None, f"{total} rows are too few to hold some out, so evaluation uses the training rows")
    seen, keys = Counter[str](), list[int]()
    for text in texts:
        keys.append(_hash(f"{text} {seen[text]}"))
        seen[text] += 1
    chosen = set(sorted(range(total), key=keys.__getitem__)[: total // ONE_IN])
    prompts = "one prompt" if len(seen) == 1 else f"{len(seen):,} different prompts"
    note = f"{total:,} rows have {prompts}: {len(chosen):,} rows are held out by position, not by prompt"
    return Division([row in chosen for row in range(total)], note)


def _hash(text: str) -> int:
    """64 bits of a text; white space does not matter."""
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


Row = dict[str, Any]
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SPLIT_NAME = re.compile(r"(train|" + "|".join(HELD_OUT) + r")(?:[-_.].*)?", re.IGNORECASE)
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_FETCHED = re.compile(r"debian-summaries|debian-translations-\w+-\w+|restaurants")  # folders of examples/fetch.py
_MAX_ROWS = 50_000_000  # rows are Python objects; more would not fit into memory
_MAX_DEPTH = 100
_TOO_DEEP = f"lists and objects are nested deeper than {_MAX_DEPTH}"
_HUB_CONFIG = {"openai/gsm8k": "main", "gsm8k": "main"}  # data sets that need a config name


def rows_of(
    path: str,
    split: str | None,
    *,
    size: int | None,
    seed: int,
    options: Mapping[str, Any],
    text_of: Callable[[Row], str],
    key: str,
    notes: list[str],
) -> list[Row]:
    """The rows of a split (None or 'all': every row), at most `size`. `text_of` gives the text that is hashed.

    `notes` receives what a user should know about how the rows were divided.
    """
    if split not in (None, "all", "train", *HELD_OUT):
        raise DataError(f"{key}.split must be train, all, or one of {', '.join(HELD_OUT)}; got {split!r}")
    held_out = split in HELD_OUT
    if path.startswith("reasoning_gym:"):
        task_rows = by_name("gspo.data.reasoning_gym:task_rows")
        return task_rows(path.partition(":")[2], split, size=size, seed=seed, options=options, key=key)
    if options:
        raise DataError(
            f"{key}.options ({', '.join(options)}) are settings of reasoning_gym tasks, but {key}.path is {path}; "
            "remove them"
        )
    if path.startswith("embedded:"):
        return _embedded(path, split, size=size, seed=seed, key=key)
    # A local file or folder has priority; `parts` maps a split's name to a function that reads it, so that only the
    # needed files are read.
    try:
        parts = _local(path, key)
    except OSError as error:  # for example a name that is too long
        raise DataError(f"{key}.path: {path[:200]} cannot be read: {error.strerror}") from error
    if parts is None:
        parts = _hub(path, key)
    # The source's own held-out split: the named one, or any other of its usual names.
    own = next((parts[name] for name in (split, *HELD_OUT) if name in parts and name != "train"), None)
    train = parts.get("train")
    if split in (None, "all"):
        rows = [row for load in parts.values() for row in load()]
    elif held_out and own is not None:
        rows = own()
    elif not held_out and train is None:
        raise DataError(
            f"{key}.path: by its file names, {path} has only held-out data, but {key}.split is 'train'; "
            f"set {key}.split: all to use every row"
        )
    elif train is None:
        raise DataError(f"{key}.path: {path} has neither a train split nor a {split} split")
    elif own is not None:
        rows = train()
    else:
        # No held-out split: 5 % of the training rows, by a hash of their text. Training leaves the same rows out.
        rows = train()
        division = divide([text_of(row) for row in rows])
        if held_out and division.note:
            notes.append(division.note)
        if division.held_out is not None:
            if not held_out:
                notes.append(f"{sum(division.held_out):,} of {len(rows):,} rows are held out")
            rows = [row for row, held in zip(rows, division.held_out, strict=True) if held == held_out]
    return rows if size is None else rows[:size]


def is_on_hub(path: str, key: str = "train_dataset") -> bool:
    """Whether `rows_of` would ask the hub: the path is no task, and there is no file or folder of that name here."""
    return not path.startswith(("embedded:", "reasoning_gym:")) and _local(path, key) is None


def read_file(path: Path, key: str = "train_dataset") -> list[Row]:
    """All rows of one JSONL, JSON, CSV or Parquet file."""
    if path.exists():
        # Reading a pipe or a device may never end.
        if not path.is_file():
            raise DataError(f"{key}.path: {path} is not a regular file")
        if path.stat().st_size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            raise DataError(
                f"{key}.path: {path} has {human(path.stat().st_size)}, more than the memory of this machine "
                f"({human(memory)}); rows are kept in memory"
            )
    try:
        if path.suffix == ".jsonl":
            return list(_read_jsonl(path))
        if path.suffix == ".json":
            content = parse_json(path.read_text(encoding="utf-8-sig"))
            rows = content.get("data") if isinstance(content, dict) else content
            if not isinstance(rows, list):
                raise DataError(f"{path} must contain a list of objects, or an object with a list under 'data'")
            return [_row(row, f"{path}: entry {i}") for i, row in enumerate(rows)]
        if path.suffix == ".csv":
            # newline="" is required by csv for line breaks inside fields; utf-8-sig removes a byte order mark.
            csv.field_size_limit(2**31 - 1)  # of Python: 131,072 characters in a field
            with path.open(newline="", encoding="utf-8-sig") as file:
                return list(_read_csv(csv.DictReader(file, strict=True), path))
        if path.suffix == ".parquet":
            return _read_parquet(path)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{key}.path: there is no file {path}") from None
    except UnicodeDecodeError as error:
        if path.suffix == ".parquet":
            raise DataError(f"{path} cannot be read: a string is not UTF-8: {error}") from None
        raise DataError(f"{path}:{_first_bad_line(path)} is not UTF-8; convert the file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{key}.path: {path} cannot be read: {error}") from error
    raise DataError(f"{key}.path: {path} is not a {', '.join(_SUFFIXES)} file")


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError for duplicate keys, lone surrogates, and values nested too deep.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Both checks walk the whole value, so they are made only where a cheap look at the text does not exclude it.
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ord(error.object[error.start])
            raise ValueError(f"a string has a lone surrogate (\\u{found:04x}), which is not a character") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice in one object")
    return made


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [v for v in level if isinstance(v, list | dict)]
        level = [item for v in inner for item in (v.values() if isinstance(v, dict) else v)]
    return depth - 1


def _read_jsonl(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _row(parse_json(line), f"{path}:{number}")
                except UnicodeDecodeError:
                    raise
                except ValueError as error:
                    raise DataError(f"{path}:{number} is not valid JSON: {error}") from None


def _read_csv(reader: csv.DictReader[str], path: Path) -> Iterable[Row]:
    names = list(reader.fieldnames or ())
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}:1 has two columns named {twice[0]!r}; rename one of them")
    for row in reader:
        # DictReader stores surplus fields under None, and fills missing fields with None.
        if None in row or None in row.values():
            raise DataError(f"{path}:{reader.line_num}: the line has more or fewer fields than the header {names}")
        yield dict(row)


def _first_bad_line(path: Path) -> int:
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 1


def _read_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: {install_command('tasks')}") from None
    try:
        # A few bytes can describe billions of equal rows: look before they are made.
        num_rows = pyarrow.parquet.read_metadata(path).num_rows
        if num_rows > _MAX_ROWS:
            raise DataError(f"{path} has {num_rows:,} rows; at most {_MAX_ROWS:,} are read. Use a smaller file")
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be a JSON object, got {type(value).__name__}")
    return dict(value)


Parts = dict[str, Callable[[], list[Row]]]


def _local(path: str, key: str) -> Parts | None:
    """The splits of a file or folder; None if `path` is a hub name without a local copy."""
    here = Path(path).expanduser()
    if here.suffix in _SUFFIXES:
        if not here.is_file():
            raise DataError(f"{key}.path: there is no file {path} (looked in {Path.cwd()})")
        return _parts([here], key)
    if here.suffix in _PACKED:
        raise DataError(f"{key}.path: {path} is compressed; unpack it first, for example with gunzip")
    folders = [here]
    if root := os.environ.get("GSPO_DATA"):
        folders += [Path(root) / path, Path(root) / here.name]
        if Path(root).name == here.name:
            folders.append(Path(root))
    for folder in filter(Path.is_dir, folders):
        for place in filter(Path.is_dir, (folder, folder / "data", folder / "main")):
            if files := sorted(file for file in place.iterdir() if file.suffix in _SUFFIXES):
                return _parts(files, key)
        raise DataError(f"{key}.path: the folder {folder} has no {', '.join(_SUFFIXES)} file")
    if _FETCHED.fullmatch(here.name):
        name = here.name.replace("translations-", "translations:")
        raise DataError(
            f"{key}.path: there is no folder {path} (looked in {Path.cwd()}): run `python examples/fetch.py {name}`"
        )
    # A hub name has at most one slash; anything else was meant as a local path.
    if here.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise DataError(f"{key}.path: there is no data file or folder {path} (looked in {Path.cwd()})")
    return None


def _parts(files: list[Path], key: str) -> Parts:
    grouped: dict[str, list[Path]] = {}
    for file in files:
        # A file whose name is no split's name is training data. Shards of a split are read in the order of their names.
        found = _SPLIT_NAME.fullmatch(file.stem)
        grouped.setdefault(found[1].lower() if found else "train", []).append(file)

    def loader(shards: list[Path]) -> Callable[[], list[Row]]:
        return lambda: [row for shard in shards for row in read_file(shard, key)]

    return {split: loader(shards) for split, shards in grouped.items()}


def _hub(path: str, key: str) -> Parts:
    """A data set of the hub, `owner/name` or `owner/name:config`, through `datasets`."""
    name, _, config = path.partition(":")
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{key}.path: {path} was not found locally; loading it from the hub needs: {install_command('tasks')}"
        ) from None
    try:
        loaded = datasets.load_dataset(name, config or _HUB_CONFIG.get(name))
    except Exception as error:  # many types: of the library, the hub and the HTTP client
        raise DataError(
            f"{key}.path: {path} was not found locally, and loading it from the hub failed "
            f"({type(error).__name__}: {str(error)[:200]}). Without a connection, set {key}.path to a folder with "
            f"train.jsonl and test.jsonl, or set the environment variable GSPO_DATA to the parent folder of "
            f"{Path(name).name}/"
        ) from error

    def loader(part: Any) -> Callable[[], list[Row]]:
        return lambda: [dict(row) for row in part]

    return {str(part): loader(loaded[part]) for part in loaded}


def _embedded(path: str, split: str | None, *, size: int | None, seed: int, key: str) -> list[Row]:
    """`embedded:digits`, `embedded:arithmetic`, with digits `…:2-3`, and chains of five additions `…:3x5`."""
    part: arithmetic.Split = "test" if split in HELD_OUT else "train"
    count = size if size is not None else 512 if part == "test" else 4096
    # The same held-out problems for every seed, so that runs can be compared.
    seed = 0 if part == "test" else seed
    if path == "embedded:digits":
        return by_name("gspo.data.digits:digit_rows")(part, count, seed=seed)
    found = re.fullmatch(r"embedded:arithmetic(?::([1-6])(?:-([1-6]))?(?:x(\d+))?)?", path)
    if not found:
        known = "embedded:arithmetic, embedded:arithmetic:2-3, embedded:arithmetic:3x5 or embedded:digits"
        raise DataError(f"{key}.path: there is no {path}; use {known}")
    digits = (int(found[1]), int(found[2] or found[1])) if found[1] else arithmetic.DIGITS
    chained = int(found[3]) if found[3] else None
    if chained is not None and not 1 <= chained <= arithmetic.LONGEST_CHAIN:
        raise DataError(f"{key}.path: {path}: a chain has 1 to {arithmetic.LONGEST_CHAIN} additions, got {chained}")
    drawn = arithmetic.distinct_problems(part, count, seed=seed, digits=digits, chained=chained)
    if size is not None and len(drawn) < size:
        low, high = digits
        raise DataError(
            f"{key}.size is {size}, but {path} has only {len(drawn)} different {part} problems of {low} to {high} "
            f"digits; lower it, or set {key}.path: embedded:arithmetic:{low}-{high + 1}"
        )
    return [{"question": p.question, "answer": p.answer, "solution": p.solution} for p in drawn]


def default_reward(path: str) -> dict[str, Any]:
    """The default reward of a data set, as an entry for `rewards.spec.reward_spec`.

    >>> default_reward("embedded:arithmetic")
    {'name': 'final', 'marker': '>'}
    """
    if path.startswith(("embedded:arithmetic", "embedded:digits")):
        return {"name": "finals" if "x" in path else "final", "marker": arithmetic.MARKER}
    return {"name": "reasoning_gym" if path.startswith("reasoning_gym:") else "math"}
