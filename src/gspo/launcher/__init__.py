"""Start the processes of a run: on this machine, on Ray, or as a Slurm job. See docs/launching.md."""
