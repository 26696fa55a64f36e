"""Objectives: pure functions, tensors in and tensors out. No config, logging, I/O, collectives or .item()."""

from gspo.objectives.aggregate import denominator
from gspo.objectives.loss import Objective, loss
from gspo.objectives.rows import Rows, mean_tokens, rows

__all__ = ["Objective", "Rows", "denominator", "loss", "mean_tokens", "rows"]
