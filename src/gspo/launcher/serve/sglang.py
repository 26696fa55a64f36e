"""`python -m gspo.launcher.serve.sglang`: one sampler server in front of an SGLang server. EXPERIMENTAL: never run.

SGLang needs CUDA, and this was written on machines without it. Command line and routes follow SGLang's documentation;
see docs/engines.md.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gspo.config import engine_flags as engines
from gspo.config.layout import Layout
from gspo.config.schema import Config
from gspo.launcher.serve import engine
from gspo.launcher.serve.local import make_parser, run_server
from gspo.launcher.serve.model import as_folder, identity_for, model_folder
from gspo.sampling.engines.base import EngineAddress
from gspo.sampling.engines.sglang import SglangSampler
from gspo.train.build.compute import device_and_dtype


def serve(config_path: Path, index: int, folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
    config, layout = engine.read_engine_config(config_path, "sglang")
    url = engines.url_of("sglang", config.sglang, index, layout.num_samplers)
    source = model_folder(config, folder / f"sglang_model_{index}", weights=url is None)
    identity = identity_for(config, source)
    with tempfile.TemporaryDirectory(prefix="gspo-sglang-") as private:
        if url is None:
            # SGLang listens on TCP, where every user of the machine could connect, so requests carry a key.
            own_port, key = _free_port(), secrets.token_hex(32)
            address = EngineAddress(f"http://127.0.0.1:{own_port}", key=key)
            start = command(config, layout, source, identity["max_context"], own_port, key_file(Path(private), key))
        else:
            address, start = EngineAddress(url, key=os.environ.get("SGLANG_API_KEY")), None
        can_sleep = bool(config.sglang.get("enable_memory_saver"))
        make = partial(engine.connect_engine, SglangSampler, config, identity, address, can_sleep)
        engine.serve_engine(config, index, folder, address, start, make, identity, host=host, port=port)


def command(config: Config, layout: Layout, source: str, max_context: int, port: int, key_file: Path) -> engine.Start:
    """The command line of SGLang's server: flags that the run needs, then the config's `sglang` section."""
    assert layout.sampler is not None
    options = {
        "context_length": max_context,
        "dtype": str(device_and_dtype(config)[1]).removeprefix("torch."),
    }
    # The user's flags have priority over these two defaults.
    options |= config.sglang
    argv = [str(engines.python_of("sglang", config.sglang)), "-m", "sglang.launch_server", "--model-path", source]
    if config.tokenizer_path not in (None, config.actor.path):
        argv += ["--tokenizer-path", as_folder(str(config.tokenizer_path), "tokenizer_path")]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--config", str(key_file)]
    argv += ["--tp-size", str(layout.sampler.tensor), "--max-running-requests", str(engine.max_running(config))]
    argv += engines.flags("sglang", options, config.actor.path)
    return engine.Start(argv, engines.environment_of("sglang", config.sglang))


def key_file(folder: Path, key: str) -> Path:
    """Write the API key to a file that only its owner can read: other users can read a command line."""
    path = folder / "key.yaml"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"api-key: {key}\n")
    return path


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser(
        "python -m gspo.launcher.serve.sglang", "One sampler server, in front of one SGLang server."
    ).parse_args(argv)
    return run_server(partial(serve, args.config, args.index, args.register, host=args.host, port=args.port))


if __name__ == "__main__":
    sys.exit(main())
