"""Training: `Trainer(config, reward=…, dataset=…, workflow=…).train()`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.train.loop import Summary, Trainer, run

__all__ = ["Summary", "Trainer", "run"]


def __getattr__(name: str) -> Any:
    # Torch is imported when training is, not when the package is looked at.
    if name in __all__:
        from gspo.train import loop

        return getattr(loop, name)
    raise AttributeError(name)
