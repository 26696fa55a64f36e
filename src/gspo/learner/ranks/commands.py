"""What rank 0 sends to the other ranks: a command with JSON and arrays, as one byte message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as _load
from safetensors.numpy import save as _save

Arrays = Mapping[str, NDArray[Any]]


class Command(NamedTuple):
    """What the other ranks must do next: train on a batch, help to save, end."""

    what: str
    content: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def pack_message(content: Mapping[str, Any], arrays: Arrays) -> NDArray[np.uint8]:
    """JSON and arrays as bytes.

    >>> unpack_message(pack_message({"step": 3}, {"x": np.array([1.5])}))
    ({'step': 3}, {'x': array([1.5])})
    """
    text = np.frombuffer(json.dumps(content).encode(), dtype=np.uint8)
    # safetensors stores arrays only, so the JSON is a byte array with an empty name.
    whole = {"": text, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
    # frombuffer gives a read-only array; a tensor made from it must be writable.
    return np.frombuffer(_save(whole), dtype=np.uint8).copy()


def unpack_message(message: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    arrays = {name: array.copy() for name, array in _load(message.tobytes()).items()}  # copies are writable
    return json.loads(arrays.pop("").tobytes()), arrays
