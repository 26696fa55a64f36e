"""Find a model on this machine: a folder, a fetched or embedded model, a .gguf file, a snapshot of the hub. Torch-free.

A hub name costs one short request and no retry: without an answer, the snapshot in the cache is used, or the error
names the key, the nearest known name and the remedy.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from gspo.errors import DataError
from gspo.models import cache, embedded
from gspo.system import by_name

EMBEDDED = "embedded:"
GGUF = ".gguf"
HUB_TIMEOUT_S = 5.0
# Models that examples/fetch.py converts, and their folders in the cache: name, sha256, version of the conversion.
FETCHED = {"smollm2-135m": "smollm2-135m-b179c9523d0e-1"}
_TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.spm")  # of a hub repository


def locate(path: str, key: str = "actor.path", *, weights: bool = True) -> str:
    """The local folder of a model: fetched, converted from a .gguf file, or downloaded. An embedded name stays one.

    `weights` is False if only the config and the tokenizer are used. DataError names `key` if there is no such model.
    """
    if path.endswith(GGUF) and not Path(path).is_dir():
        return str(by_name("gspo.models.gguf:converted")(path, key))
    return find_here(path, key) or _download(path, key, weights)


def find_here(path: str, key: str) -> str | None:
    """The folder or embedded name of a model on this machine; None if it has to be downloaded from the hub."""
    if path.startswith(EMBEDDED):
        embedded.require_known(path, key)
        return path
    if Path(path).is_dir():
        return path
    if path in FETCHED:
        return str(fetched(path, key))
    if not is_hub_name(path):
        raise DataError(f"{key}: there is no folder {path!r} (looked in {Path.cwd()}).{nearest_model(path)}")
    reason = hub_problem(path)
    if reason is None:
        return None
    # Not reachable, or not there: what an earlier run has downloaded. The checks of the folder name what is missing.
    if (found := snapshot(path)) is not None:
        return str(found)
    raise DataError(
        f"{key}: the model {path!r} was not found: there is no such folder, no snapshot in {hub_cache()}, and the hub "
        f"did not provide it ({reason}).{nearest_model(path)} Without network, copy the model to this machine and set "
        f"{key} to the folder, or use embedded:tiny"
    )


def fetched_folder(name: str) -> Path:
    """The cache folder of a fetched model."""
    return cache.root() / FETCHED[name]


def fetched(name: str, key: str = "actor.path") -> Path:
    """The folder of a fetched model; DataError with the command if it is missing or damaged."""
    place = fetched_folder(name)
    if not cache.is_whole(place):
        state = "is damaged" if place.exists() else "was not fetched"
        raise DataError(f"{key}: {name} {state} (looked in {place}): run `python examples/fetch.py {name}`")
    return place


def _download(path: str, key: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    # Only files of these kinds are downloaded, so a repository's pickles and code are not even on this machine.
    wanted = [*_TEXT_FILES, "*.safetensors"] if weights else [*_TEXT_FILES]
    try:
        return snapshot_download(path, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"])
    except Exception as cause:  # many types: of the library, the hub and the HTTP client
        raise DataError(
            f"{key}: the model {path!r} could not be downloaded ({type(cause).__name__}: {str(cause)[:200]})"
        ) from cause


def hub_cache() -> Path:
    """The folder of huggingface_hub's snapshots, by the environment variables that it reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def snapshot(path: str) -> Path | None:
    """The folder of a hub model in the cache; None if there is none with a config.json."""
    try:
        if not is_hub_name(path):
            return None
        repository = hub_cache() / ("models--" + path.replace("/", "--"))
        # The snapshot of `main` is the one that would be loaded; without it, take the newest.
        main = repository / "refs" / "main"
        if main.is_file():
            named = repository / "snapshots" / main.read_text(encoding="utf-8").strip()
            if (named / "config.json").is_file():
                return named
        found = list((repository / "snapshots").glob("*/config.json"))
        return max(found, key=lambda file: file.stat().st_mtime).parent if found else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: expanduser without a home
        return None


@lru_cache
def hub_problem(path: str, kind: str = "model") -> str | None:
    """Why the hub does not provide a model or a dataset, by one request without retries; None: it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(path, repo_type=kind, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # many types: of the hub's client, its HTTP library and the network
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0]:.120}" if lines else type(error).__name__
    return None


def is_hub_name(path: str) -> bool:
    """Whether a path means a model of the hub: `owner/name` or `name`, and nothing of that name is here."""
    if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) is None or ".." in path or path.endswith(GGUF):
        return False
    return path not in FETCHED and not Path(path).is_dir()


def nearest_model(path: str) -> str:
    """A sentence with the most similar model name, after a space; "" if there is none.

    >>> nearest_model("smolm2-135m"), nearest_model("nosuch")
    (' Did you mean smollm2-135m?', '')
    """
    near = get_close_matches(path.lower(), (*FETCHED, *embedded.RECIPES), n=1, cutoff=0.75)
    return f" Did you mean {near[0]}?" if near else ""
