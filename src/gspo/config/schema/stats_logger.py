"""`stats_logger`: where metrics go besides the run directory."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class WandB(Section):
    mode: Literal["disabled", "offline", "online"] = key(
        "disabled",
        "offline: write to RUN/wandb for `wandb sync`; online: send while training. The project is $WANDB_PROJECT or "
        "experiment_name. Needs gspo[wandb].",
    )


class StatsLogger(Section):
    wandb: WandB = key(WandB, "Weights & Biases.")
    tensorboard: bool = key(False, "Also write TensorBoard events to RUN/tensorboard. Needs gspo[tensorboard].")
    trackio: bool = key(False, "Also write a Trackio database to RUN/trackio or $TRACKIO_DIR. Needs gspo[trackio].")
