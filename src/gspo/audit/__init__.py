"""`gspo audit` and `TRLCallback`: what runs of TRL, verl and ms-swift do, in a run directory that `gspo report` opens.

`gspo.audit.TRLCallback` is imported on first use: it needs transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.audit.callback import TRLCallback as TRLCallback

__all__ = ["TRLCallback"]


def __getattr__(name: str) -> Any:
    if name != "TRLCallback":
        raise AttributeError(f"module 'gspo.audit' has no attribute {name!r}")
    from gspo.audit.callback import TRLCallback

    return TRLCallback
