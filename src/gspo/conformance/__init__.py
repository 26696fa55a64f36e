"""`gspo conformance`: test vectors for GSPO and its family, and what the loss function of anybody does with them."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.conformance import explain, paper, show, targets
    from gspo.conformance.adapters import adapted, implementation
    from gspo.conformance.check import check_all, check_case
    from gspo.conformance.loading import Package, Stub
    from gspo.conformance.suite import Batch, Implementation, VECTORS, case_named, load
    # fmt: on

__getattr__ = face(__name__)
