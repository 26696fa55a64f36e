"""GGUF files, converted once into a model folder in the cache: float32, with tokenizer and chat template.

transformers reads and dequantises the file (package `gguf`), but cannot save such a model. So its tensors are copied
into a new model of the same config, which is saved. The cache key is the file's content: a moved file is not converted
again, a changed one is.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.models import cache
from gspo.models.folder import Stored, Weights, absurd, check_size
from gspo.system import install_command, sha256

SUFFIX = ".gguf"
VERSION = 1  # of the conversion; part of the cache folder's name


def _to_stderr(text: str) -> None:
    print(f"gspo: {text}", file=sys.stderr, flush=True)


def converted(path: str, key: str = "actor.path", say: Callable[[str], None] = _to_stderr) -> Path:
    """The model folder of a .gguf file; converted now if it is not in the cache."""
    file = Path(require_file(path, key))
    # Size and time of change are the key of `_digest`'s cache, so a file that changes is hashed again.
    stat = file.stat()
    folder = cache.root() / f"gguf-{file.stem}-{_digest(file, stat.st_size, stat.st_mtime_ns)[:12]}-{VERSION}"
    if not cache.is_whole(folder):
        require_package(key)
        say(f"converting {file.name} ({stat.st_size / 1e6:,.0f} MB), only once: about a minute per 100 MB")
        cache.publish_folder(folder, lambda tmp: convert(file, tmp, key))
        say(f"converted into {folder}")
    return folder


def require_file(path: str, key: str) -> str:
    """The path of a .gguf file; DataError if there is none, or it has another content."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{key}: there is no file {path} (looked in {Path.cwd()})")
    refuse_foreign(file, key)
    return str(file)


@functools.lru_cache
def _digest(file: Path, size: int, changed_ns: int) -> str:
    """sha256 of a file, cached: tokenizer and model need it for the same file."""
    return sha256(file)


def refuse_foreign(file: Path, key: str) -> None:
    """DataError if a file does not begin with the GGUF magic bytes."""
    with open(file, "rb") as stream:
        head = stream.read(4)
    if head != b"GGUF":
        raise DataError(f"{key}: {file} is not a GGUF file: it begins with {head!r} instead of b'GGUF'")


def require_package(key: str) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(f"{key}: a GGUF file needs {' and '.join(missing)}: {install_command('models')}")


def convert(file: Path, to: Path, key: str = "actor.path") -> None:
    """Write the file's model, tokenizer and generation config into the folder `to`."""
    # transformers' GGUF reader has a progress bar of its own, which `quiet` does not reach: for terminals only.
    with cache.quiet(), redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        model, tokenizer = _read(file, key)
        model.save_pretrained(to, safe_serialization=True)
        tokenizer.save_pretrained(to)


def _read(file: Path, key: str) -> tuple[Any, Any]:
    """A new model with the file's weights, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        stored = _stored(file)
        # Alone in a folder: transformers must not read what lies beside the file, such as an adapter.
        with tempfile.TemporaryDirectory(prefix="gspo-gguf-") as alone:
            (Path(alone) / "model.gguf").symlink_to(file.resolve())
            how: Any = {"gguf_file": "model.gguf", "trust_remote_code": False}
            config = AutoConfig.from_pretrained(alone, **how)
            with torch.device("meta"):
                check_size(AutoModelForCausalLM.from_config(config, trust_remote_code=False), file.name, stored, 4)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                alone, **how, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(alone, **how)
    except Exception as cause:  # a parser of binary files can raise anything on damaged bytes
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
        raise DataError(
            f"{key}: {file} cannot be converted ({type(cause).__name__}: {first:.200}). It is truncated or damaged, or "
            "of an architecture or quantisation that transformers cannot read: download it again, or set a model "
            "folder with safetensors"
        ) from cause
    source, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise DataError(
            f"{key}: {file} lacks {len(missing)} tensors of {type(source).__name__}, first {missing[0]}: "
            "they would be random; download it again"
        )
    config, generation = source.config, source.generation_config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the folder contains float32 weights
    # A new model, because transformers cannot save one that it has read from GGUF.
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = generation
    return model, tokenizer


def _stored(file: Path) -> Weights:
    """The shapes of the file's tensors. The reader of package `gguf` checks that each of them lies inside the file."""
    from gguf import GGUFReader

    with open(file, "rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        _check_lengths(content)
    reader = GGUFReader(file)
    numbers = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    if reason := absurd({name: value for name, value in numbers.items() if isinstance(value, int)}):
        raise ValueError(reason)
    return {tensor.name: Stored(tuple(map(int, tensor.shape))) for tensor in reader.tensors}


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's types of numbers
_STRING, _ARRAY = 8, 9
_MAX_VALUES = 4_000_000  # of a header: package `gguf` makes an array of each, and models have about 1,500,000


def _check_lengths(content: mmap) -> None:
    """ValueError for a length that leaves the file: the reader of package `gguf` would loop over 2⁶⁴ missing values."""
    left = _MAX_VALUES

    def number(at: int, size: int) -> int:
        if at + size > len(content):
            raise ValueError("its header leaves the file")
        return int.from_bytes(content[at : at + size], "little")

    def spend(count: int) -> None:
        nonlocal left
        if (left := left - count) < 0:
            raise ValueError(f"its header has more than {_MAX_VALUES:,} values")

    def end(at: int, kind: int, depth: int = 0) -> int:
        """Where a value ends."""
        if kind == _STRING:
            return at + 8 + number(at, 8)
        if kind != _ARRAY or depth > 4:
            return at + _SIZES[kind]
        inner, count = number(at, 4), number(at + 4, 8)
        at += 12
        number(at + count * _SIZES.get(inner, 8), 0)  # a string or an array has at least 8 bytes
        spend(count)
        if inner in _SIZES:
            return at + count * _SIZES[inner]
        for _ in range(count):
            at = end(at, inner, depth + 1)
            number(at, 0)
        return at

    at = 24
    spend(number(16, 8))
    for _ in range(number(16, 8)):
        at = end(at, _STRING)  # the key
        at = end(at + 4, number(at, 4))
        number(at, 0)
    number(at + 24 * number(8, 8), 0)  # a tensor's entry has at least 24 bytes
