"""Parse the strings of `rollout.backend`, `actor.backend` and AReaL's `allocation_mode`: "vllm:d4t2"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

SAMPLERS = ("auto", "local", "vllm", "sglang")
TRAINERS = ("auto", "fsdp")

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
    if name in ("megatron", "archon"):
        raise ValueError(f"the AReaL engine {name} is not supported; use {names[-1]}:dN on N GPUs")
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
    if name == "local" and (sizes.get("tensor", 1) > 1 or sizes.get("pipeline", 1) > 1):
        raise ValueError(
            f"{text!r}: a copy of the local sampler is one process; use local:d{sizes.get('data', 1)} or vllm"
        )
    if name == "auto" and sizes:
        raise ValueError(f"{text!r}: auto chooses the sizes; write auto without sizes, or name an engine")
    return Backend(name, **sizes)


def parse_allocation_mode(text: str) -> tuple[Backend, Backend]:
    """Parse AReaL's "sglang:d4p1t1+fsdp:d4" (or "sglang.d4p1t1+d4p1t1") into a sampler and a trainer."""
    if "|" in text:
        raise ValueError(
            f"{text!r}: a sampler server on the GPUs of the trainer (|) is not supported; "
            "write + for separate GPUs, or rollout.backend: local to sample in the trainer's process"
        )
    sampler, plus, trainer = (part.strip() for part in text.strip().partition("+"))
    if not plus:
        raise ValueError(f"{text!r} has no trainer; write sampler+trainer as in sglang:d4+fsdp:d4")
    if trainer.lower() in ("eval", "cpu"):
        raise ValueError(f"{text!r}: to evaluate without training use `gspo eval`")
    if re.fullmatch(r"([a-z][0-9]+)+", trainer.lower()):  # AReaL allows sizes without the name fsdp
        trainer = "fsdp:" + trainer
    return parse_backend(sampler, SAMPLERS), parse_backend(trainer, TRAINERS)
