"""`gspo plan`: a run of a given size, simulated."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.planner.command import job_of, lengths_of_run, row_of
    from gspo.planner.search import PlannedJob, best_bound, best_plan, plans
    from gspo.planner.simulation import (
        GPUS, LEADER, MODELS, Result, SamplerCost, SerialCost, SharedCores, TrainerCost, Work, lognormal_lengths,
        parse_gpus, recorded_lengths, simulate,
    )
    # fmt: on

__getattr__ = face(__name__)
