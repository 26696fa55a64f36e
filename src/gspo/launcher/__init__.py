"""Start the processes of a run: on this machine, on Ray, or as a Slurm job. See docs/launching.md."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.launcher.plan import config_file, make_launch_plan
    from gspo.launcher.serve import engine, model, own, vllm
    from gspo.launcher.serve.model import as_folder, without_weights
    from gspo.launcher.start import LAUNCHERS, launch, require_machine, with_scheduler
    # fmt: on

__getattr__ = face(__name__)
