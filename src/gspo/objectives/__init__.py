"""Objectives: pure functions from tensors to tensors. No config, logging, I/O, collectives or .item()."""

from typing import TYPE_CHECKING

from gspo.objectives.loss import Objective as Objective
from gspo.objectives.loss import loss as loss  # at once: the function stands before the module of its name
from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.objectives import advantage, aggregate, correction, own
    from gspo.objectives.aggregate import (
        TokenLayout, at_tokens, denominator, fold, keep_trained, mean_tokens, sum_tokens, token_layout, turn_cuts,
    )
    from gspo.objectives.surrogate import (
        bounded, cispo, clip, clip_bounds, clip_fractions, effective_sample_size, kl, log_s_summary, sapo,
        sequence_log_ratio, sequence_token_log_ratio, token_log_ratio, value_loss,
    )
    # fmt: on

__getattr__ = face(__name__)
