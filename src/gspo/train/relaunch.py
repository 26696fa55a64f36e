"""A script whose config needs several processes, Ray or Slurm replaces itself by a launcher.

If no launcher started the process, `Trainer.train()` replaces it by `python -m gspo.launcher`, which runs the script's
command line again, once per rank, with GSPO_LAUNCHED set. The launcher is on a higher floor than training, so it is
called by its command line and not imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gspo.config import Loaded, dump
from gspo.config.layout import layout_of
from gspo.errors import ConfigError
from gspo.monitor.notebook import in_notebook
from gspo.system.gpus import visible_gpus
from gspo.system.launched import Launched


def is_launched() -> bool:
    """Whether gspo's launcher or torchrun started this process. Then it is a rank and starts no further processes."""
    return bool(Launched.read().is_launched or os.environ.get("RANK"))


def relaunch(loaded: Loaded) -> None:
    """Return if this process should train; otherwise replace it by the launcher and never return."""
    config = loaded.config
    if is_launched():
        return
    elsewhere = config.scheduler.type in ("ray", "slurm")
    layout = layout_of(config, visible_gpus())
    if layout.is_one_process and not elsewhere:
        return
    # An interactive session has no command line that a launcher could run again.
    if hasattr(sys, "ps1") or in_notebook():
        if not elsewhere and config.rollout.backend == config.actor.backend == "auto":
            return  # auto, at a prompt: what can be done here
        raise ConfigError(
            f"{layout}, scheduler.type {config.scheduler.type}: that takes processes of their own, which an "
            "interactive session cannot start; put the lines into a script, or use `gspo train`"
        )
    run = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
    file = run.absolute() / "launch" / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The config object may have been changed in Python, so the launcher gets the resolved one as a file.
    file.write_text(dump(loaded), encoding="utf-8")
    again = [sys.executable, *sys.orig_argv[1:]]
    # execv discards buffered output.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "gspo.launcher", "--config", str(file), "--", *again])
