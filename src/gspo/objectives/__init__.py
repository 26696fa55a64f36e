"""Objectives: pure functions from tensors to tensors. No config, logging, I/O, collectives or .item()."""

from gspo.objectives.aggregate import denominator
from gspo.objectives.layout import TokenLayout, mean_tokens, token_layout
from gspo.objectives.loss import Objective, loss

__all__ = ["Objective", "TokenLayout", "denominator", "loss", "mean_tokens", "token_layout"]
