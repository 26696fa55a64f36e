"""Keys that earlier versions of gspo had and AReaL did not, as migration rules. Old run directories hold them."""

from __future__ import annotations

from collections.abc import Iterable

from gspo.config.migrate import translate
from gspo.config.migrate.rule import Rule, only, translates


def rules() -> Iterable[Rule]:
    """The table, in the order of application."""
    groups = (
        translates(
            "scheduler.slurm.partition",
            "`scheduler.slurm.sbatch: [--partition=…]`",
            translate.sbatch_option("partition"),
        ),
        translates(
            "scheduler.slurm.account", "`scheduler.slurm.sbatch: [--account=…]`", translate.sbatch_option("account")
        ),
        translates(
            "reward.format_regex",
            "`reward.functions: [{name: regex, pattern: …, label: format}]`",
            translate.format_regex,
        ),
        only(
            "critic.value_loss_coef",
            (None, 1.0),
            "it only scales the gradient of the critic; change critic.optimizer.lr instead",
        ),
    )
    return (rule for group in groups for rule in group)
