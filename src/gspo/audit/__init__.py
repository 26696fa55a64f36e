"""`gspo audit` and `TRLCallback`: runs of TRL, verl and ms-swift, explained and shown by our report."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.audit.callback import TRLCallback
    from gspo.audit.disk import audit_files
    # fmt: on

__getattr__ = face(__name__)
