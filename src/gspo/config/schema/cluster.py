"""`cluster` and `scheduler`: machines, and where processes run."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class Cluster(Section):
    fileroot: str = key("runs", "Root of all run directories: <fileroot>/<experiment_name>/<trial_name>.")
    n_nodes: int = key(1, "Number of machines.", low=1)
    n_gpus_per_node: int | None = key(None, "Number of GPUs on each machine.", unset="all GPUs of the machine", low=0)


class Slurm(Section):
    time: str | None = key(None, "Time limit in sbatch's format, for example 24:00:00.", unset="the partition's limit")
    sbatch: list[str] = key([], "More sbatch options, for example [--mem=64G, --exclusive].")
    setup: list[str] = key([], "Shell lines that run before anything starts, for example [module load cuda].")
    cpus_per_node: int | None = key(None, "CPUs on each machine.", unset="one for each process on it", low=1)
    save_before: int = key(120, "The run saves and queues itself again this many seconds before the time limit.", low=1)


class Scheduler(Section):
    type: Literal["local", "ray", "slurm"] | None = key(None, "Where processes run.", unset="local")
    restarts: int = key(
        3, "How many times a killed process is restarted: each sampler, and with ray and slurm also the trainer.", low=0
    )
    start_timeout: float = key(
        300.0, "The run fails if the Ray cluster does not answer or has no room for this many seconds.", above=0
    )
    slurm: Slurm = key(Slurm, "Options of the Slurm job.")
