"""`python -m gspo.launcher.serve.own`: one sampler server, the in-process sampler behind HTTP.

It serves after a trainer has sent it weights, and it ends with the process that started it. The token comes from the
environment only (GSPO_SAMPLER_TOKEN). See docs/samplers.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gspo.config import layout_of, load
from gspo.errors import ConfigError, GspoError
from gspo.faults import reached
from gspo.models import end_tokens
from gspo.sampling import (
    SamplerEngine,
    SamplerServer,
    context_limit,
    register,
    sampler_identity,
    sequence_logp,
    unregister,
)
from gspo.system import Launched, die_with_parent
from gspo.train import local_sampler, make_tokenizer, published_dtype, sends_adapter, set_threads, whole_model


def serve(
    config_path: Path,
    index: int,
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    threads: int | None = None,
    latency_s: float = 0.0,
) -> None:
    """Load the model, register, and serve until SIGTERM."""
    Launched.read().required_token()
    reached("sampler.start")
    config = load(config_path).config
    if config.rollout.sampler_precision != "none":
        raise ConfigError("rollout.sampler_precision rounds the in-process sampler's weights only; set it to none")
    # On CPU all servers share the cores of this machine.
    servers_here = 1 if torch.cuda.is_available() else max(layout_of(config, 0).num_samplers, 1)
    set_threads(config.model_copy(update={"threads": threads or config.threads}), servers_here)
    tokenizer = make_tokenizer(config)
    model = whole_model(config, tokenizer, published_dtype(config), with_adapter=sends_adapter(config))
    # Version −1: the weights of the policy arrive from the trainer.
    sampler = local_sampler(config, model, tokenizer, -1, partial(print, flush=True))
    identity = sampler_identity(
        model,
        seed=config.seed,
        ends=end_tokens(model, tokenizer),
        max_context=context_limit(model, config.gconfig.max_tokens),
        dtype=model.dtype,
    )
    engine = SamplerEngine(
        sampler,
        identity=identity,
        score=partial(sequence_logp, model),
        vocabulary=tokenizer.get_vocab(),
        latency_s=latency_s,
    )
    register_and_serve(
        engine,
        index,
        folder,
        host=host,
        port=port,
        words=f"{config.actor.path}, {torch.get_num_threads()} threads",
    )


def register_and_serve(
    engine: SamplerEngine,
    index: int,
    folder: Path,
    *,
    host: str,
    port: int,
    words: str,
    watch: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Register in `folder` and serve until SIGTERM. `watch` runs in a thread; its argument stops the server."""
    try:
        server = SamplerServer(engine, Launched.read().required_token(), host=host, port=port)
    except OSError as cause:
        raise ConfigError(f"the sampler server cannot listen on {host}:{port} ({cause}); see --host") from cause

    # Before registering, so that a signal after the registration always removes it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if watch is not None:
        threading.Thread(target=watch, args=(server.stop,), name="watch", daemon=True).start()
    reached("sampler.register")
    register(folder, index, server.url)
    print(f"sampler {index} at {server.url}, {words}", flush=True)
    try:
        server.wait()  # wait: none, it serves until the launcher ends it
    finally:
        # First, so that the trainer sends no request to a server that is closing.
        unregister(folder, index)
        server.close()


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The command line of every kind of sampler server."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, type=Path, help="the run's resolved config")
    parser.add_argument("--index", required=True, type=int, help="number of this server in the run, from 0")
    parser.add_argument(
        "--register", required=True, type=Path, metavar="DIR", help="folder in which it registers when it is ready"
    )
    parser.add_argument("--host", default="127.0.0.1", help="name or address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    return parser


def run_server(work: Callable[[], None]) -> int:
    """Run a server that ends with its parent process; returns the exit code."""
    die_with_parent(os.getppid())
    try:
        work()
    except GspoError as error:
        print(f"gspo: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def main() -> int:
    parser = make_parser("python -m gspo.launcher.serve.own", "One sampler server.")
    parser.add_argument(
        "--threads",
        type=int,
        help="CPU threads (default: `threads` of the config, OMP_NUM_THREADS, else this server's share of the cores)",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=float(os.environ.get("GSPO_SAMPLER_LATENCY", "0")),
        metavar="S",
        help="seconds to sleep at every decoding step, to measure with a slow sampler (also GSPO_SAMPLER_LATENCY)",
    )
    args = parser.parse_args()
    where = {"host": args.host, "port": args.port, "threads": args.threads, "latency_s": args.latency}
    return run_server(partial(serve, args.config, args.index, args.register, **where))


if __name__ == "__main__":
    sys.exit(main())
