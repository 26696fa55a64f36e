"""Which trainer is the newest: a number per trainer of a run, counted in the folder where its servers register.

A server works for the trainer with the highest number. The wall clock has no part in it, because a clock may step back
between two trainers while the servers live on. Torch-free.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from pathlib import Path

from gspo.system.files import atomic_write

FILE = "session"  # in the folder of the registrations
_DIGITS, _LIMIT = 20, 10**19  # a higher number would leave none for the next trainer


def session_order(session: str) -> tuple[int, str]:
    """The key by which sessions are compared. An id without a number is older than every other.

    >>> session_order("00000000000000000007-ab") < session_order("10-cd"), session_order("zz")
    (True, (0, 'zz'))
    """
    text = session.partition("-")[0]
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 0
    return number if number < _LIMIT else 0, session


class Session:
    """The id of one trainer. Its threads share it."""

    def __init__(self, folder: Path) -> None:
        self._file, self._lock = folder / FILE, threading.Lock()  # wait: none, held for a file of 20 bytes
        self._suffix = secrets.token_hex(4)
        self._take(self._newest() + 1)

    @property
    def id(self) -> str:
        return f"{self._number:0{_DIGITS}d}-{self._suffix}"

    def outbid(self, other: str) -> bool:
        """Take a number above that of the session `other`, which a server works for. False if a newer trainer exists.

        The file decides which trainer is the newest. A server may know a higher number if the file was lost, or from a
        trainer of an earlier version, which took its number from the clock.
        """
        with self._lock:
            if self._newest() > self._number:
                return False
            number = session_order(other)[0]
            if number >= _LIMIT - 1:
                return False
            if number >= self._number:
                self._take(number + 1)
            return True

    def _newest(self) -> int:
        try:
            return session_order(self._file.read_text(encoding="ascii")[:64].strip())[0]
        except (OSError, ValueError):
            return 0

    def _take(self, number: int) -> None:
        self._number = number
        # If it cannot be written, servers that know a higher number are outbid one by one.
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._file) as tmp:
                tmp.write_text(str(number), encoding="ascii")
