"""What can sample for a run (ENGINES), and the strings that choose it: `rollout.backend: vllm:d4t2`.

Other code asks the table; it compares with no engine's name (tests/config/test_engines.py). Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Engine:
    """One sampler backend. Names of the form module:name are imported when they are used.

    name            of `rollout.backend`: NAME:dN starts N servers; of the key with its flags; of its Python package
    sampler         implements `sampling.api.Sampler`
    server          the module of one sampler server, started with `python -m`
    in_process      NAME without a size samples in the trainer's process
    several_gpus    one server may have several GPUs (tN, pN)
    sleeps          on one GPU, it releases the GPU while the trainer works
    needs_cuda      there is no build for CPUs
    returns_kept    returns log-probs of truncated sampling, with the tokens that it keeps
    takes_broadcast receives weights without a file
    no_routes       (flags, GPUs) → why it returns no expert routes, or ""; without this check it returns them
    takes_adapter   (flags, rank, whether experts have one) → whether it loads a LoRA adapter alone; without it: always
    no_machine      (its Python, whether on the CPU) → why it cannot run on this machine, or ""

    The rest is for an external engine, a program that is not gspo's:

    flags           description of the key with its flags; empty for gspo's own sampler
    decided         its flags that gspo sets and that cannot be overridden: the key that decides the value, or ""
    setup           the command that installs it in a clone of the repository
    """

    name: str
    sampler: str
    server: str
    in_process: bool = False
    several_gpus: bool = False
    sleeps: bool = False
    needs_cuda: bool = False
    returns_kept: bool = True
    takes_broadcast: bool = True
    no_routes: str = ""
    takes_adapter: str = ""
    no_machine: str = ""
    flags: str = ""
    decided: Mapping[str, str] = field(default_factory=dict[str, str])
    setup: str = ""

    @property
    def is_external(self) -> bool:
        return bool(self.flags)


_LOCAL = Engine(
    "local",
    sampler="gspo.sampling.local.engine:LocalSampler",
    server="gspo.launcher.serve.own",
    in_process=True,
)
_VLLM = Engine(
    "vllm",
    sampler="gspo.sampling.engines.vllm:VllmSampler",
    server="gspo.launcher.serve.vllm",
    several_gpus=True,
    sleeps=True,
    no_routes="gspo.sampling.engines.vllm:why_no_routes",
    takes_adapter="gspo.sampling.engines.vllm:takes_adapter",
    no_machine="gspo.sampling.engines.vllm:why_no_machine",
    flags="Flags of vLLM servers, by vLLM's own names (max_model_len). Also python: the interpreter that has vLLM; "
    "env: environment variables; url: the address of servers that you run yourself.",
    decided={
        "model": "actor.path",
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
    setup="make setup-vllm",
)

ENGINES = {engine.name: engine for engine in (_LOCAL, _VLLM)}
EXTERNAL = {name: engine for name, engine in ENGINES.items() if engine.is_external}
OWN = _LOCAL  # the engine of `rollout.backend: auto`

SAMPLERS = ("auto", *ENGINES)
TRAINERS = ("auto", "fsdp")

# Engines of AReaL that gspo has no backend for.
_REFUSED = {
    "megatron": "the AReaL engine megatron is not supported; use {last}:dN on N GPUs",
    "archon": "the AReaL engine archon is not supported; use {last}:dN on N GPUs",
    "sglang": "sglang is not supported: no release of gspo has run it; use vllm:dN, or local:dN (gspo's own servers)",
}

_FORM = re.compile(r"(?P<name>[a-z_]+)(?:[:.](?P<dims>(?:[a-z][0-9]{1,6})+))?")
_DIMS = {"d": "data", "t": "tensor", "m": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True)
class Backend:
    """An engine, its number of copies (data), and the GPUs of one copy (tensor × pipeline).

    >>> parse_backend("vllm:d4t2", SAMPLERS)
    Backend(name='vllm', data=4, tensor=2, pipeline=1)
    """

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        """GPUs that it needs; on a CPU, processes."""
        return math.prod((self.data, self.tensor, self.pipeline))

    def __str__(self) -> str:
        dims = "".join(
            f"{letter}{size}"
            for letter, size in (("d", self.data), ("p", self.pipeline), ("t", self.tensor))
            if size > 1 or letter == "d"
        )
        return self.name if self.name == "auto" else f"{self.name}:{dims}"


def parse_backend(text: str, names: tuple[str, ...]) -> Backend:
    """Parse "name" or "name:d4t2"; ValueError with the reason if gspo cannot run it."""
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a backend; write one of {', '.join(names)}, with sizes as in {names[-1]}:d4")
    name = match["name"]
    if name in _REFUSED:
        raise ValueError(_REFUSED[name].format(last=names[-1]))
    if name not in names:
        raise ValueError(f"unknown backend {name!r}; use one of {', '.join(names)}")
    sizes: dict[str, int] = {}
    for letter, size in re.findall(r"([a-z])([0-9]+)", match["dims"] or ""):
        dim = _DIMS.get(letter)
        if dim is None or int(size) < 1 or dim in sizes:
            raise ValueError(f"{text!r}: {letter}{size} is not a size; write each of d, t, p once, and at least 1")
        sizes[dim] = int(size)
    for dim in ("context", "expert"):
        if sizes.pop(dim, 1) > 1:
            raise ValueError(f"{text!r}: {dim} parallelism is not supported; use more copies (d) instead")
    if name == "fsdp" and (sizes.get("tensor", 1) > 1 or sizes.get("pipeline", 1) > 1):
        world = math.prod(sizes.values())
        raise ValueError(f"{text!r}: fsdp has data-parallel ranks only; use fsdp:d{world}")
    is_one_process = name in ENGINES and not ENGINES[name].several_gpus
    if is_one_process and (sizes.get("tensor", 1) > 1 or sizes.get("pipeline", 1) > 1):
        raise ValueError(
            f"{text!r}: a copy of the {name} sampler is one process; use {name}:d{sizes.get('data', 1)} or vllm"
        )
    if name == "auto" and sizes:
        raise ValueError(f"{text!r}: auto chooses the sizes; write auto without sizes, or name an engine")
    return Backend(name, **sizes)
