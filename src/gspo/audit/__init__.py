"""`gspo audit` and `TRLCallback`: runs of TRL, verl and ms-swift, explained and shown by our report."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.audit.callback import TRLCallback
    from gspo.audit.disk import audit_files
    from gspo.audit.findings import loaded_of
    from gspo.audit.trl import from_trl
    from gspo.audit.verl import from_verl
    # fmt: on

__getattr__ = face(__name__)
