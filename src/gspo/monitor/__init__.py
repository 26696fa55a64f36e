"""For people, while a run trains: metrics, samples, display."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.monitor.display import Display, Lines, LivePanel, curve_svgs, in_notebook, make_display
    from gspo.monitor.loggers import Loggers
    from gspo.monitor.metrics import (
        measured_noise, noise_metrics, ratio_metrics, step_metrics, supervised_metrics, time_metrics, token_mean,
    )
    from gspo.monitor.samples import images_of, question_of, sample_rows, shown_text, token_tensors, turns_of
    # fmt: on

__getattr__ = face(__name__)
