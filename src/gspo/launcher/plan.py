"""From a config to processes: their commands, machines and GPUs. Pure: nothing is started, read or written here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gspo.config import ENGINES, Config, Layout, layout_of
from gspo.errors import ConfigError
from gspo.sampling import weight_folders
from gspo.system import Launched

# Words of a command line that the launcher replaces when it starts the process: the address of its machine, and the
# host:port of the store where the ranks of several machines meet.
ADDRESS, RENDEZVOUS = "{address}", "{rendezvous}"


@dataclass(frozen=True)
class Process:
    """One process of a plan: its command, its additional environment variables, its machine and GPUs."""

    role: Literal["trainer", "sampler"]
    index: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    gpus: tuple[int, ...] = ()
    ranks: int = 0  # trainer only: ranks that it starts
    max_stopped_s: float = 60.0  # seconds it may stay stopped (SIGSTOP) before it is killed
    publishes: tuple[Path, ...] = ()  # folders with weights that are removed after its end

    @property
    def name(self) -> str:
        return f"{self.role}_{self.index}"


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of a run. `path` is the run directory, `folder` the launcher's subfolder of it."""

    layout: Layout
    path: Path
    processes: tuple[Process, ...]

    @property
    def folder(self) -> Path:
        return self.path / "launch"

    @property
    def config_file(self) -> Path:
        return config_file(self.path)

    @property
    def sampler_folder(self) -> Path:
        return self.path / "samplers"

    @property
    def trainers(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.role == "trainer")

    @property
    def samplers(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.role == "sampler")

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of the machines that run a process."""
        return tuple(sorted({p.node for p in self.processes}))


def config_file(path: Path) -> Path:
    """The resolved config, which samplers and Slurm jobs read."""
    return path / "launch" / "config.yaml"


def make_launch_plan(config: Config, command: Sequence[str], num_gpus: int) -> LaunchPlan:
    """The processes of `command`, a trainer's command line, on machines with `num_gpus` GPUs each.

    cluster.n_gpus_per_node overrides `num_gpus`.
    """
    layout, path = layout_of(config, num_gpus), config.run_path.absolute()
    _refuse_too_few_gpus(config, layout)
    if layout.num_nodes > 1 and config.scheduler.type not in ("ray", "slurm"):
        raise ConfigError(
            f"cluster.n_nodes is {layout.num_nodes}, but the local launcher uses one machine; set scheduler.type to "
            "ray or slurm (--on ray)"
        )
    rank_places, sampler_places = _places(layout)
    trainers = tuple(
        replace(trainer, max_stopped_s=config.stall_timeout)
        for trainer in _trainers(layout, path, command, rank_places)
    )
    env = _launched(layout).write()
    samplers = tuple(
        Process("sampler", index, _sampler_argv(layout, path, index), env, node, gpus)
        for index, (node, gpus) in enumerate(sampler_places)
    )
    return LaunchPlan(layout, path, trainers + samplers)


def _refuse_too_few_gpus(config: Config, layout: Layout) -> None:
    total = layout.num_nodes * layout.gpus_per_node
    if layout.sampler is not None and ENGINES[layout.sampler.name].needs_cuda and not total:
        raise ConfigError(
            f"rollout.backend is {config.rollout.backend}, but no GPU is visible on this machine; set "
            "cluster.n_gpus_per_node to the GPUs of a machine of the cluster, or rollout.backend: auto"
        )
    if total and layout.gpus_wanted > total:
        raise ConfigError(
            f"rollout.backend {config.rollout.backend} and actor.backend {config.actor.backend} take "
            f"{layout.gpus_wanted} GPUs, but only {layout.num_nodes} × {layout.gpus_per_node} are available; set both "
            "to auto or to smaller sizes, or set cluster.n_nodes and cluster.n_gpus_per_node"
        )


def _trainers(
    layout: Layout, path: Path, command: Sequence[str], places: Sequence[tuple[int, int | None]]
) -> tuple[Process, ...]:
    """One process per machine with ranks: torch's elastic launcher, which starts the ranks of that machine."""
    launched = _launched(layout)
    if layout.num_samplers:
        launched = replace(launched, num_samplers=layout.num_samplers, sampler_folder=path / "samplers")
    env = launched.write()
    nodes = list(dict.fromkeys(node for node, _ in places))
    out = []
    for index, node in enumerate(nodes):
        gpus = tuple(gpu for where, gpu in places if where == node and gpu is not None)
        ranks = sum(where == node for where, _ in places)
        argv = tuple(command)
        # One rank runs the command directly; several are started by gspo.launcher.ranks.
        if layout.ranks > 1:
            # Ranks on one machine need no rendezvous address; RENDEZVOUS is a placeholder that the Ray launcher
            # replaces.
            meet = ("--nodes", str(len(nodes)), "--rendezvous", RENDEZVOUS) if len(nodes) > 1 else ()
            meet += ("--is-host",) if meet and index == 0 else ()
            logs = ("--logs", str(path / "launch" / "ranks"))
            argv = (sys.executable, "-m", "gspo.launcher.ranks", "--ranks", str(ranks), *meet, *logs, "--", *command)
        publishes = weight_folders(path) if layout.num_samplers and index == 0 else ()  # rank 0 publishes
        out.append(Process("trainer", index, argv, env, node, gpus, ranks, publishes=publishes))
    return tuple(out)


def _launched(layout: Layout) -> Launched:
    """The launch settings that trainers and samplers share; each process sees only its own GPUs."""
    if layout.is_colocated:
        return Launched(is_launched=True, is_colocated=True)
    return Launched(is_launched=True, num_ranks=layout.ranks if layout.num_samplers else 1)


def _sampler_argv(layout: Layout, path: Path, index: int) -> tuple[str, ...]:
    assert layout.sampler is not None
    module = ENGINES[layout.sampler.name].server
    # On one machine the server listens on loopback only.
    host = ("--host", ADDRESS) if layout.num_nodes > 1 else ()
    return (
        *(sys.executable, "-m", module, "--config", str(config_file(path)), "--index", str(index)),
        *("--register", str(path / "samplers"), *host),
    )


def _places(layout: Layout) -> tuple[list[tuple[int, int | None]], list[tuple[int, tuple[int, ...]]]]:
    """(node, GPU) of each rank and (node, GPUs) of each sampler.

    Ranks take the first GPUs and samplers the next ones. The GPUs of a sampler are on one machine.
    """
    per_node, size = layout.gpus_per_node, layout.gpus_per_sampler
    if not per_node:
        # Without GPUs: spread ranks, then samplers, evenly over the machines.
        spread = [j * layout.num_nodes // (layout.ranks + layout.num_samplers) for j in range(layout.ranks)]
        rest = range(layout.ranks, layout.ranks + layout.num_samplers)
        others = [j * layout.num_nodes // (layout.ranks + layout.num_samplers) for j in rest]
        return [(node, None) for node in spread], [(node, ()) for node in others]
    ranks = [divmod(gpu, per_node) for gpu in range(layout.ranks)]
    samplers: list[tuple[int, tuple[int, ...]]] = []
    # `begin` counts GPUs over all machines. A colocated sampler shares the trainer's GPU.
    begin = 0 if layout.is_colocated else layout.ranks
    for _ in range(layout.num_samplers):
        if begin % per_node + size > per_node:
            begin += per_node - begin % per_node
        node, first = divmod(begin, per_node)
        if node >= layout.num_nodes or size > per_node:
            raise ConfigError(
                f"no machine has {size} free GPUs for another sampler ({layout.num_nodes} × {per_node} GPUs in total; "
                "the GPUs of a sampler must be on one machine); lower rollout.backend or raise cluster.n_nodes"
            )
        samplers.append((node, tuple(range(first, first + size))))
        begin += size
    return [(node, gpu) for node, gpu in ranks], samplers


def plan_text(plan: LaunchPlan, on: str) -> str:
    """The output of `--dry-run`: one paragraph per process."""
    layout = plan.layout
    nodes = "1 machine" if layout.num_nodes == 1 else f"{layout.num_nodes} machines"
    gpus = f" with {layout.gpus_per_node} GPUs each" if layout.gpus_per_node else ", no GPU"
    lines = [f"plan of {plan.path}", f"  on {on}, {nodes}{gpus}: {layout}", ""]
    for process in plan.processes:
        where = [f"node {process.node}"]
        if process.gpus:
            where.append(f"GPU {process.gpus[0]}" + (f"-{process.gpus[-1]}" if len(process.gpus) > 1 else ""))
        if process.ranks:
            where.append("1 rank" if process.ranks == 1 else f"{process.ranks} ranks")
        lines.append(f"{process.name:<12} {', '.join(where)}")
        lines.append("  " + " ".join(f"{key}={shlex.quote(value)}" for key, value in process.env.items()))
        lines.append(f"  {shlex.join(process.argv)}")
    return "\n".join(lines)
