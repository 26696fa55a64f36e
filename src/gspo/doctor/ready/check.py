"""The result of one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gspo.errors import GspoError


@dataclass(frozen=True)
class ReadyCheck:
    """One thing that a run needs. ok: it is here; failed: the run cannot start; unknown: not checked."""

    what: str
    state: Literal["ok", "failed", "unknown"]
    text: str


def attempt(what: str, look: Callable[[], str]) -> ReadyCheck:
    """Ok with the text that `look` returns; failed with the message of its error."""
    try:
        return ReadyCheck(what, "ok", look())
    except GspoError as error:
        return ReadyCheck(what, "failed", str(error))
