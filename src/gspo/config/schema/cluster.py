"""`cluster` and `scheduler`: machines, and where processes run."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class Cluster(Section):
    fileroot: str = key("runs", "Root of all run directories: <fileroot>/<experiment_name>/<trial_name>.")
    n_nodes: int = key(1, "Number of machines.", low=1)
    n_gpus_per_node: int | None = key(None, "Number of GPUs on each machine.", unset="all GPUs of the machine", low=0)


class Slurm(Section):
    sbatch: list[str] = key([], "More sbatch options, for example [--time=24:00:00, --mem=64G].")
    setup: list[str] = key([], "Shell lines that run before anything starts, for example [module load cuda].")


class Scheduler(Section):
    type: Literal["local", "ray", "slurm"] | None = key(None, "Where processes run.", unset="local")
    restarts: int = key(
        3, "How many times a killed process is restarted: each sampler, and with ray and slurm also the trainer.", low=0
    )
    slurm: Slurm = key(Slurm, "Options of the Slurm job.")
