"""What belongs to the run itself: loggers, and when to evaluate and save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo.config.schema import Config, Frequency
from gspo.monitor.loggers import Loggers


def make_loggers(config: Config, run: Path, say: Callable[[str], None]) -> Loggers:
    """Where metrics go beside the run directory."""
    stats, named = config.stats_logger, {"project": config.experiment_name, "name": config.trial_name}
    settings: dict[str, dict[str, Any]] = {}
    if stats.tensorboard:
        settings["tensorboard"] = {}
    if stats.wandb.mode != "disabled":
        project = stats.wandb.project or config.experiment_name
        settings["wandb"] = {**named, "project": project, "mode": stats.wandb.mode}
    if stats.trackio:
        settings["trackio"] = named
    return Loggers(run, settings, say)


def checkpoint_frequency(config: Config) -> Frequency:
    """How often a checkpoint is written: `saver` counts steps and epochs, `recover` counts seconds."""
    saver, recover = config.saver, config.recover
    return Frequency(freq_epochs=saver.freq_epochs, freq_steps=saver.freq_steps, freq_secs=recover.freq_secs)


def is_due(frequency: Frequency, step: int, steps_per_epoch: int, seconds_since: float) -> bool:
    """Whether something with this frequency happens after `step`."""
    return bool(
        (frequency.freq_steps and step % frequency.freq_steps == 0)
        or (frequency.freq_epochs and step % (frequency.freq_epochs * steps_per_epoch) == 0)
        or (frequency.freq_secs and seconds_since >= frequency.freq_secs)
    )
