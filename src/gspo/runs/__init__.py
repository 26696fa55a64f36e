"""The run directory: checkpoints, resume, export."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.runs import checkpoint, directory
    from gspo.runs.checkpoint import load_pending_groups, verify
    from gspo.runs.directory import (
        RunDir, RunLock, Saver, State, _other_identity, changed_code, code_digest, resume,
    )
    from gspo.runs.export import SHARD, base_name, open_repository, push, refuse_used, write_model
    # fmt: on

__getattr__ = face(__name__)
