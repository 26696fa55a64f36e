"""Trainer and sampler of a config without training, for `gspo doctor --probe` and `--selftest`.

The processes are those of a run, placed by the same plan, in a temporary run directory: one rank of the trainer, and
one server if the config samples on servers. They always run on this machine, also for a config with Ray or Slurm; an
error says if this machine has too few GPUs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gspo.config import Loaded
from gspo.config.layout import flags_of, layout_of
from gspo.launcher.plan import config_file
from gspo.launcher.start import launch
from gspo.system.gpus import visible_gpus


def run_beside_sampler(
    loaded: Loaded, words: Sequence[str], here: Callable[[Loaded, Path], int], *, with_server: bool = False
) -> int:
    """Call `here` in this process if no server is needed; else launch `gspo WORDS --config FILE` and a server.

    Returns the exit code.
    """
    with tempfile.TemporaryDirectory(prefix="gspo-doctor-", ignore_cleanup_errors=True) as folder:
        small = one_of_each(loaded, Path(folder), visible_gpus(), with_server=with_server)
        path = small.config.run_path.absolute()
        command = [sys.executable, "-m", "gspo", *words, "--config", str(config_file(path))]
        code = launch(small, command)
        return here(small, path) if code is None else code


def one_of_each(loaded: Loaded, folder: Path, num_gpus: int, *, with_server: bool = False) -> Loaded:
    """The config with one rank and at most one server, on this machine, with `folder` for its run directory.

    `with_server`: add a server even if the config samples in process, unless the machine has a single GPU.
    """
    here = {"fileroot": str(folder), "n_nodes": 1, "n_gpus_per_node": None}
    config = loaded.config.model_copy(update={"cluster": loaded.config.cluster.model_copy(update=here)})
    # One server is enough for the checks; its tensor parallelism stays as in the run.
    sampler = layout_of(config, num_gpus).sampler
    if sampler is None:
        backend = "local:d1" if with_server and num_gpus != 1 else "local"
    else:
        # A list of addresses must have one entry per server, so the number of servers stays.
        given = flags_of(config).get("url")
        backend = str(replace(sampler, data=sampler.data if isinstance(given, list) else 1))
    rounds = config.rollout.sampler_precision != "none"  # in process alone
    rollout = {"backend": "local" if rounds else backend, "max_head_offpolicyness": 0}
    small = {
        "scheduler": config.scheduler.model_copy(update={"type": "local"}),
        "rollout": config.rollout.model_copy(update=rollout),
        "actor": config.actor.model_copy(update={"backend": "fsdp:d1"}),
        "strict": False,  # its warnings are about a run
    }
    return replace(loaded, config=config.model_copy(update=small))
