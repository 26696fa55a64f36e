"""Objectives: pure functions from tensors to tensors. No config, logging, I/O, collectives or .item().

`loss` is an objective on the tensors of any trainer. The parts of the presets are for objectives of your own
(`own.py`): log-ratios, gates, and what brings tokens to sequences and back.
"""

from gspo.objectives.aggregate import denominator
from gspo.objectives.surrogate import cispo, clip, clip_bounds, sapo
from gspo.objectives.surrogate import kl
from gspo.objectives.aggregate import TokenLayout, at_tokens, keep_trained, mean_tokens, sum_tokens, token_layout
from gspo.objectives.loss import Objective, loss
from gspo.objectives.surrogate import bounded, sequence_log_ratio, sequence_token_log_ratio, token_log_ratio

__all__ = [
    "Objective", "TokenLayout", "at_tokens", "bounded", "cispo", "clip", "clip_bounds", "denominator", "keep_trained",
    "kl", "loss", "mean_tokens", "sapo", "sequence_log_ratio", "sequence_token_log_ratio", "sum_tokens", "token_layout",
    "token_log_ratio",
]  # fmt: skip
