"""Training: `Trainer(config, reward=…, dataset=…, workflow=…).train()`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.train.trainer import Summary, Trainer, run

__all__ = ["Summary", "Trainer", "run"]


def __getattr__(name: str) -> Any:
    # Import torch only when one of these names is used: `import gspo.train` stays light.
    if name in __all__:
        from gspo.system.program import wait_without_spinning

        wait_without_spinning()  # before torch is imported
        from gspo.train import trainer

        return getattr(trainer, name)
    raise AttributeError(name)
