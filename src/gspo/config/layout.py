"""The processes of a config: trainer ranks and sampler servers. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.algorithms import algorithm_of
from gspo.config.backends import ENGINES, OWN, SAMPLERS, TRAINERS, Backend, Engine, parse_backend
from gspo.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """Ranks that train, servers that sample (None: rank 0 samples in its own process), machines and their GPUs.

    >>> from gspo.config import load
    >>> config = load(None, ["rollout.backend=vllm:d2t2", "actor.backend=fsdp:d4"]).config
    >>> layout_of(config, num_gpus=8)
    Layout(ranks=4, sampler=Backend(name='vllm', data=2, tensor=2, pipeline=1), num_nodes=1, gpus_per_node=8)
    """

    ranks: int
    sampler: Backend | None
    num_nodes: int
    gpus_per_node: int

    @property
    def num_samplers(self) -> int:
        return 0 if self.sampler is None else self.sampler.data

    @property
    def gpus_per_sampler(self) -> int:
        return 0 if self.sampler is None or not self.gpus_per_node else self.sampler.tensor * self.sampler.pipeline

    @property
    def gpus_wanted(self) -> int:
        """GPUs that the processes need, if the run uses GPUs."""
        if self.is_colocated:
            return 1
        return self.ranks + (self.sampler.world if self.sampler is not None else 0)

    @property
    def is_colocated(self) -> bool:
        """Whether trainer and engine share one GPU; the engine then sleeps while the trainer works."""
        one_gpu, sampler = self.num_nodes * self.gpus_per_node == 1, self.sampler
        return one_gpu and sampler is not None and sampler.world == 1 and ENGINES[sampler.name].sleeps

    @property
    def is_one_process(self) -> bool:
        return self.ranks == 1 and self.sampler is None

    def __str__(self) -> str:
        """
        >>> str(Layout(4, Backend("local", 4), 1, 8)), str(Layout(1, None, 1, 0))
        ('4 ranks train, 4 local servers sample', 'one process trains and samples')
        """
        if self.is_one_process:
            return "one process trains and samples"
        ranks = "1 rank trains" if self.ranks == 1 else f"{self.ranks} ranks train"
        if self.sampler is None:
            return f"{ranks}, rank 0 samples"
        servers = f"{self.sampler.name} server{'s' if self.num_samplers > 1 else ''}"
        return f"{ranks}, {self.num_samplers} {servers} sample{'' if self.num_samplers > 1 else 's'}"


def layout_of(config: Config, num_gpus: int) -> Layout:
    """The layout of the two backend strings; `num_gpus` of this machine is used if cluster.n_gpus_per_node is null."""
    cluster, text = config.cluster, config.rollout.backend.strip().lower()
    per_node = num_gpus if cluster.n_gpus_per_node is None else cluster.n_gpus_per_node
    total = cluster.n_nodes * per_node
    sampler, trainer = parse_backend(text, SAMPLERS), parse_backend(config.actor.backend, TRAINERS)
    # A backend without a size gets what the other one leaves.
    asked_ranks = trainer.data if _is_sized(config.actor.backend) else None
    if sampler.name == "auto":
        # Half of the GPUs sample. With one GPU or none, one process samples and trains. A supervised run samples in
        # evaluations only, so all GPUs train.
        free = total // 2 if asked_ranks is None else max(total - asked_ranks, 0)
        free = 0 if config.algorithm is not None and algorithm_of(config.algorithm).supervised else free
        servers = Backend(OWN.name, free) if free else None
    elif ENGINES[sampler.name].in_process and not _is_sized(text):  # with a size (local:d1) it is a server
        servers = None
    else:
        servers = sampler
    ranks = asked_ranks or max(total - (servers.world if servers is not None else 0), 1)
    return Layout(ranks, servers, cluster.n_nodes, per_node)


def engine_of(config: Config) -> Engine:
    """The engine of `rollout.backend`."""
    return ENGINES.get(parse_backend(config.rollout.backend, SAMPLERS).name, OWN)


def flags_of(config: Config) -> Mapping[str, Any]:
    """What the config sets for its engine; empty for gspo's own sampler.

    >>> from gspo.config import load
    >>> flags_of(load(None, ["rollout.backend=vllm:d1", "vllm.dtype=bfloat16"]).config), flags_of(load(None).config)
    ({'dtype': 'bfloat16'}, {})
    """
    engine = engine_of(config)
    return getattr(config, engine.name) if engine.is_external else {}


def _is_sized(backend: str) -> bool:
    return ":" in backend or "." in backend
