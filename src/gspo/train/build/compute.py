"""Where and how a run computes: device, dtype, threads, ranks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from gspo.config.backends import TRAINERS, parse_backend
from gspo.config.schema import Config
from gspo.learner.ranks.world import World, joined
from gspo.system.launched import Launched
from gspo.system.program import StopRequest


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = config.actor.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, name)


def set_threads(config: Config, processes_here: int = 1) -> int:
    """Set the number of threads. It is part of a run's identity, because sums over threads round differently.

    `threads`, else OMP_NUM_THREADS, which PyTorch's users set, else the cores shared by the processes on this machine.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not (threads := config.threads or (int(asked) if asked.isdecimal() else 0)):
        # The affinity mask, because a container or scheduler may allow fewer cores than the machine has.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max((cores or 1) // processes_here, 1)
    torch.set_num_threads(threads)
    return torch.get_num_threads()


def num_ranks(config: Config) -> int | None:
    """Ranks that actor.backend asks for; None: as many as were started."""
    backend = config.actor.backend
    return parse_backend(backend, TRAINERS).data if ":" in backend or "." in backend else None


def sharding(config: Config) -> dict[str, Any]:
    """Keyword arguments of `learner.policy.sharding.shard`: the dtypes of a run with several ranks."""
    kinds = config.actor.fsdp.model_dump()
    return {name: None if kind is None else getattr(torch, kind) for name, kind in kinds.items()}


def published_dtype(config: Config) -> torch.dtype | None:
    """The dtype of published weights: the dtype in which several ranks compute; None: the model's own."""
    return sharding(config)["param_dtype"] if has_ranks(config) else None


def has_ranks(config: Config) -> bool:
    """Whether several ranks train. The trainer and its sampler servers get the same answer."""
    return (num_ranks(config) or Launched.read().num_ranks) > 1


def join_ranks(config: Config, stop: StopRequest) -> AbstractContextManager[World]:
    """The ranks that train together; an error on one rank ends all."""
    return joined(num_ranks(config), config.stall_timeout, stop)
