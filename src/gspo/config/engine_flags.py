"""External inference engines: the Python environment they run in, and their flags.

Every key below an engine's name (`vllm`) is a flag of the engine by its own name, except `python`, `url` and `env`.
This module starts no process and imports no engine. Torch-free.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.config.backends import ENGINES
from gspo.errors import ConfigError
from gspo.system import by_name, clone

_OWN = ("python", "url", "env")
_FOLDER = ".venv-{}"  # made by `make setup-vllm`


def flags(engine: str, options: Mapping[str, Any], model: str) -> list[str]:
    """The engine's flags as command-line arguments; ConfigError for a flag that gspo sets.

    >>> flags("vllm", {"max_model_len": 4096, "enforce_eager": True, "enable_chunked_prefill": False, "env": {}}, "m")
    ['--max-model-len=4096', '--enforce-eager', '--no-enable-chunked-prefill']
    >>> flags("vllm", {"override_generation_config": {"a": 1}, "seed": None, "middleware": ["a", "b"]}, "m")
    ['--override-generation-config={"a": 1}', '--middleware', 'a', 'b']
    """
    words, decided = list[str](), ENGINES[engine].decided
    for name, value in options.items():
        # Both spellings are accepted: max_model_len and max-model-len.
        plain = str(name).replace("-", "_")
        if name in _OWN or value is None or (decided.get(plain) == "actor.path" and value == model):
            continue
        # A flag that the run depends on would break it if the user changed it.
        if plain in decided:
            remedy = f"set {decided[plain]} instead" if decided[plain] else "gspo sets this flag; remove it"
            raise ConfigError(f"{engine}.{name} is {value!r}: {remedy}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", plain):
            raise ConfigError(f"{engine}.{name}: {name!r} is not a flag name; write max_model_len for --max-model-len")
        flag = "--" + plain.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def environment_of(engine: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of the engine's process: the key `env`."""
    given = options.get("env") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{engine}.env must be a mapping of variables, got {given!r}")
    return {str(name): str(int(value) if isinstance(value, bool) else value) for name, value in given.items()}


def url_of(engine: str, options: Mapping[str, Any], index: int, count: int) -> str | None:
    """The address of server `index` if the user starts the servers; None if the run starts them."""
    given = options.get("url")
    if given is None:
        return None
    urls = [given] if isinstance(given, str) else given
    if not isinstance(urls, list) or len(urls) != count or not all(isinstance(url, str) for url in urls):
        raise ConfigError(
            f"{engine}.url is {given!r}; it must have {count} addresses, one for each server of rollout.backend"
        )
    if not re.fullmatch(r"http://[^/\s]+/?", urls[index]):
        raise ConfigError(f"{engine}.url has {urls[index]!r}; an address has the form http://host:8000")
    return urls[index].rstrip("/")


def python_of(engine: str, options: Mapping[str, Any]) -> Path:
    """The Python that has the engine: the key `python`, .venv-NAME here or beside the package, or our own Python."""
    if (given := options.get("python")) is not None:
        found = shutil.which(os.path.expanduser(str(given)))
        if found is None:
            raise ConfigError(
                f"{engine}.python is {given!r}, which is not a program; set it to the Python that has {engine}"
            )
        return Path(found)
    # The engine often needs other versions of torch than gspo, so it may have its own environment.
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (python := root / _FOLDER.format(engine) / "bin" / "python").is_file():
            return python
    if importlib.util.find_spec(engine) is not None:
        return Path(sys.executable)
    own = _FOLDER.format(engine)
    how = f"python3 -m venv {own} && {own}/bin/pip install {engine}"
    if ENGINES[engine].setup and clone() is not None:
        how = ENGINES[engine].setup
    raise ConfigError(
        f"rollout.backend is {engine}, but {engine} is not installed: run `{how}`, or set {engine}.python to the "
        "interpreter of an environment that has it"
    )


def check_engine(engine: str, options: Mapping[str, Any], model: str, *, on_cpu: bool, count: int) -> None:
    """Refuse what can be refused before a process starts. `on_cpu`: the servers would see no GPU."""
    flags(engine, options, model)
    environment_of(engine, options)
    # The user starts the servers: nothing has to be installed here.
    if url_of(engine, options, 0, count) is not None:
        return
    entry, python = ENGINES[engine], python_of(engine, options)
    if entry.no_machine and (why := by_name(entry.no_machine)(python, on_cpu)):
        raise ConfigError(f"rollout.backend is {engine}, but {why}")
