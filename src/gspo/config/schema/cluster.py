"""`cluster` and `scheduler`: machines, and where processes run."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class Cluster(Section):
    n_nodes: int = key(1, "Machines to use.", low=1)
    n_gpus_per_node: int | None = key(None, "GPUs on each machine.", unset="what the machine has", low=0)
    fileroot: str = key("runs", "Root of all run directories: <fileroot>/<experiment_name>/<trial_name>.")


class Slurm(Section):
    time: str | None = key(None, "Time limit as sbatch takes it, 24:00:00.", unset="the partition's")
    cpus_per_node: int | None = key(None, "CPUs on each machine.", unset="one per process there", low=1)
    save_before: int = key(120, "Seconds before the time limit at which the run saves and is queued again.", low=1)
    sbatch: list[str] = key([], "Further sbatch options: [--mem=64G, --exclusive].")
    setup: list[str] = key([], "Lines of shell before anything starts: [module load cuda].")


class Scheduler(Section):
    type: Literal["local", "ray", "slurm"] | None = key(None, "Where processes run.", unset="local")
    restarts: int = key(
        3, "How often a killed process is started again: each sampler, and under ray and slurm the trainer.", low=0
    )
    start_timeout: float = key(
        300.0, "Seconds until a Ray cluster that does not answer, or has no room for the plan, fails the run.", above=0
    )
    slurm: Slurm = key(Slurm, "What sbatch is asked for.")
