"""`from gspo.trl import GSPOTrainer`: TRL's GRPOTrainer with prompts computed once, GSPO's settings, and our reports.

config.py     GSPOConfig, and what replaces TRL's defaults for sequence ratios
internals.py  the versions of TRL that are supported, and when TRL's own path is taken
logprobs.py   log-probs of completions from packed rows
objective.py  the losses that TRL does not have
trainer.py    the trainer
"""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    from gspo.trl.config import GSPOConfig
    from gspo.trl.trainer import GSPOTrainer

__getattr__ = face(__name__)
