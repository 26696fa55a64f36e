"""Reinforcement-learning post-training for language models with GSPO at its centre."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.report import Run
    from gspo.train import Trainer

if not hasattr(os, "waitid"):
    raise ImportError("gspo needs Linux, or macOS with Python 3.13 or newer; on Windows, install it inside WSL")

__version__ = "0.2.0"
__all__ = ["Run", "Trainer"]


def __getattr__(name: str) -> Any:
    # `import gspo` stays light: torch is imported only when Trainer is used.
    if name == "Run":
        from gspo.report import Run

        return Run
    if name == "Trainer":
        from gspo.train import Trainer

        return Trainer
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")
