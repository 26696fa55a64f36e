"""The little language of `rollout.backend`, `actor.backend` and AReaL's `allocation_mode`: "vllm:d4t2"."""

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
    """An engine and how many copies (data), and GPUs per copy (tensor, pipeline), it has.

    >>> parse_backend("vllm:d4t2", SAMPLERS)
    Backend(name='vllm', data=4, tensor=2, pipeline=1)
    """

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        """GPUs, or processes, that it takes."""
        return math.prod((self.data, self.tensor, self.pipeline))

    def __str__(self) -> str:
        dims = "".join(
            f"{letter}{size}"
            for letter, size in (("d", self.data), ("p", self.pipeline), ("t", self.tensor))
            if size > 1 or letter == "d"
        )
        return self.name if self.name == "auto" else f"{self.name}:{dims}"


def parse_backend(text: str, names: tuple[str, ...]) -> Backend:
    """Read "name" or "name:d4t2"; ValueError with one sentence for what cannot run here."""
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a backend; write {', '.join(names)}, with sizes as in {names[-1]}:d4")
    name = match["name"]
    if name in ("megatron", "archon"):
        raise ValueError(f"{name} is an engine of AReaL's that does not run here; use {names[-1]}:dN on N GPUs")
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
            raise ValueError(
                f"{text!r}: {dim} parallelism is an AReaL engine's; spread over more copies with d instead"
            )
    if name == "fsdp" and (sizes.get("tensor", 1) > 1 or sizes.get("pipeline", 1) > 1):
        world = math.prod(sizes.values())
        raise ValueError(f"{text!r}: fsdp shards over data-parallel ranks only; use fsdp:d{world}")
    if name == "local" and (sizes.get("tensor", 1) > 1 or sizes.get("pipeline", 1) > 1):
        raise ValueError(
            f"{text!r}: the local sampler is one process a copy; use local:d{sizes.get('data', 1)} or vllm"
        )
    if name == "auto" and sizes:
        raise ValueError(f"{text!r}: auto chooses the sizes itself; write auto, or name the engine")
    return Backend(name, **sizes)


def parse_allocation_mode(text: str) -> tuple[Backend, Backend]:
    """Read AReaL's "sglang:d4p1t1+fsdp:d4" (or "sglang.d4p1t1+d4p1t1") as a sampler and a trainer."""
    if "|" in text:
        raise ValueError(
            f"{text!r}: a sampler server on the trainer's own GPUs (|) is not offered; "
            "write + for separate GPUs, or rollout.backend: local to sample in the trainer's process"
        )
    sampler, plus, trainer = (part.strip() for part in text.strip().partition("+"))
    if not plus:
        raise ValueError(f"{text!r} has no trainer; write sampler+trainer as in sglang:d4+fsdp:d4")
    if trainer.lower() in ("eval", "cpu"):
        raise ValueError(f"{text!r}: evaluation alone is the verb `gspo eval`, not an allocation")
    if re.fullmatch(r"([a-z][0-9]+)+", trainer.lower()):  # AReaL's fsdp may go unnamed
        trainer = "fsdp:" + trainer
    return parse_backend(sampler, SAMPLERS), parse_backend(trainer, TRAINERS)
