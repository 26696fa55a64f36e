"""One key of the config: its default, description and bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A field with its sentence and bounds (low and high inclusive, `above` exclusive)."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
