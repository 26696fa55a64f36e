"""The rows of data files: JSONL, JSON, CSV and Parquet, each read within bounds. DataError names file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.system import Limits, human, install_command, memory_bytes, parse_json

MAX_ROWS = 50_000_000  # rows are Python objects; more would not fit into memory
_MEMORY = memory_bytes()
_LIMITS = Limits(bytes=_MEMORY, values=8 * MAX_ROWS)
_BATCH_BYTES = 1 << 30  # of a Parquet file, in memory at once beside the rows

Row = dict[str, Any]


def read_file(path: Path, key: str = "train_dataset") -> list[Row]:
    """All rows of one JSONL, JSON, CSV or Parquet file."""
    try:
        if path.exists():
            # Reading a pipe or a device may never end.
            if not path.is_file():
                raise DataError(f"{key}.path: {path} is not a regular file; move it away")
            if path.stat().st_size > _MEMORY:
                raise DataError(
                    f"{key}.path: {path} has {human(path.stat().st_size)}, more than the memory of this machine "
                    f"({human(_MEMORY)}); rows are kept in memory"
                )
        if path.suffix == ".jsonl":
            return _few(_read_jsonl(path), path)
        if path.suffix == ".json":
            content = parse_json(path.read_bytes(), _LIMITS, strict=True)
            rows = content if isinstance(content, list) else content.get("data") if isinstance(content, dict) else None
            return [_row(row, f"{path}: entry {i}") for i, row in enumerate(_listed(rows, path))]
        if path.suffix == ".csv":
            # newline="" is required by csv for line breaks inside fields; utf-8-sig removes a byte order mark.
            csv.field_size_limit(2**31 - 1)  # of Python: 131,072 characters in a field
            with path.open(newline="", encoding="utf-8-sig") as file:
                return _few(_read_csv(csv.DictReader(file, strict=True), path), path)
        if path.suffix == ".parquet":
            return read_parquet(path)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{key}.path: there is no file {path}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}:{_first_bad_line(path)} is not UTF-8; convert the file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{key}.path: {path} cannot be read: {error}") from error
    raise DataError(f"{key}.path: {path} is not a .jsonl, .json, .csv or .parquet file")


def read_parquet(path: Path, most_rows: int = MAX_ROWS, most_bytes: int = _MEMORY) -> list[Row]:
    """All rows of a Parquet file; a few bytes of it can describe billions of rows, or a huge value in each of them."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: {install_command('tasks')}") from None
    rows, left = list[Row](), most_bytes
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            about = file.metadata
            if about.num_rows > most_rows:
                raise DataError(
                    f"{path} has {about.num_rows:,} rows; at most {most_rows:,} are read. Use a smaller file"
                )
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
            largest = max(
                (sum(g.column(i).total_uncompressed_size for i in range(g.num_columns)) for g in groups), default=1
            )
            # A group stores equal values once, so that a batch may need the size of the group for each of its rows.
            for batch in file.iter_batches(max(16, min(8192, _BATCH_BYTES // max(largest, 1)))):
                is_dictionary = [isinstance(column, pyarrow.DictionaryArray) for column in batch.columns]
                if any(
                    "dictionary<" in str(c.type) for c, d in zip(batch.columns, is_dictionary, strict=True) if not d
                ):
                    raise DataError(f"{path} has a dictionary inside a list or a struct; write it with plain values")
                columns = [c.dictionary_decode() if d else c for c, d in zip(batch.columns, is_dictionary, strict=True)]
                left -= sum(column.nbytes for column in columns)
                if left < 0:
                    raise DataError(f"{path} holds more than {human(most_bytes)}; use a smaller file")
                rows += pyarrow.record_batch(columns, batch.schema.names).to_pylist() if columns else [{}] * len(batch)
    except DataError:
        raise
    except Exception as error:  # of Arrow, of Python's dates and numbers, or of memory
        raise DataError(f"{path} cannot be read as Parquet: {str(error) or type(error).__name__:.300}") from error
    return rows


def _few(rows: Iterable[Row], path: Path) -> list[Row]:
    if len(found := list(islice(rows, MAX_ROWS + 1))) > MAX_ROWS:
        raise DataError(f"{path} has more than {MAX_ROWS:,} rows; use a smaller file")
    return found


def _read_jsonl(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _row(parse_json(line, _LIMITS, strict=True), f"{path}:{number}")
                except ValueError as error:
                    raise DataError(f"{path}:{number} is not valid JSON: {error}") from None


def _read_csv(reader: csv.DictReader[str], path: Path) -> Iterable[Row]:
    names = list(reader.fieldnames or ())
    if len(set(names)) < len(names):
        seen = set[str]()
        twice = next(name for name in names if name in seen or seen.add(name))
        raise DataError(f"{path}:1 has two columns named {twice!r}; rename one of them")
    for row in reader:
        # DictReader stores surplus fields under None, and fills missing fields with None.
        if None in row or None in row.values():
            raise DataError(f"{path}:{reader.line_num}: the line has more or fewer fields than the header {names[:20]}")
        yield dict(row)


def _first_bad_line(path: Path) -> int:
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 1


def _listed(rows: Any, path: Path) -> list[Any]:
    if not isinstance(rows, list):
        raise DataError(f"{path} must contain a list of objects, or an object with a list under 'data'")
    return rows


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be a JSON object, got {type(value).__name__}")
    return dict(value)
