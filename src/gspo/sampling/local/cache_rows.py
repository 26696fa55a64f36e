"""Rows of a transformers cache: select, repeat and join them, whatever the cache holds.

A cache is an object with tensors somewhere inside: keys and values, convolution and recurrent states, lists of them.
Transformers can reorder the rows of most caches but cannot join two. So the tensors are found by a walk over the
object, and the batch dimension of each by comparing two caches that differ only in their number of rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.errors import RolloutError

Path = tuple[Any, ...]
Part = tuple[Any, Tensor]  # a cache, and which of its rows [n]


class CacheLayout:
    """Where the tensors of a model's cache are, and which dimension of each counts the rows."""

    def __init__(self) -> None:
        self._dims: dict[Path, int | None] = {}  # None: the tensor is the same for every row
        self.is_known = False

    def learn(self, run: Callable[[int, Any], Any]) -> None:
        """`run(rows, cache)` feeds that many rows: a prompt if `cache` is None, else one token. Returns the cache."""
        few, more = run(2, None), run(3, None)
        # Twice: some tensors exist only after the first decoded token.
        for _ in range(2):
            many = dict(tensors_of(more))
            for path, tensor in tensors_of(few):
                self._dims[path] = _batch_dim(path, tensor, many.get(path))
            few, more = run(2, few), run(3, more)
        self.is_known = True

    def gather(self, parts: Sequence[Part]) -> Any:
        """A new cache with these rows, in this order. All caches hold equally many tokens; none is changed."""
        found = [dict(tensors_of(cache)) for cache, _ in parts]
        num_rows = self._num_rows(found[0])
        # deepcopy takes the new tensors from here, and copies everything else: lengths, flags, nesting.
        new: dict[int, Any] = {}
        for path, tensor in found[0].items():
            # Some states appear only after many tokens: the first dimension counts their rows.
            if path not in self._dims:
                if tensor.shape[0] != num_rows:
                    raise _no_batch_dimension(path)
                self._dims[path] = 0
            dim = self._dims[path]
            if dim is None:
                new[id(tensor)] = tensor.clone()
            else:
                rows = [leaves[path].index_select(dim, at) for leaves, (_, at) in zip(found, parts, strict=True)]
                new[id(tensor)] = rows[0] if len(rows) == 1 else torch.cat(rows, dim)
        return copy.deepcopy(parts[0][0], new)

    def _num_rows(self, found: Mapping[Path, Tensor]) -> int:
        return next(tensor.shape[dim] for path, tensor in found.items() if (dim := self._dims.get(path)) is not None)


def tensors_of(item: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor inside, with the keys, indices and attribute names that lead to it."""
    if isinstance(item, Tensor):
        # torch.tensor([]) stands for a state that does not exist yet.
        if item.dim() != 1 or item.numel():
            yield path, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from tensors_of(value, (*path, key))
    elif isinstance(item, list | tuple):
        for index, value in enumerate(item):
            yield from tensors_of(value, (*path, index))
    # Objects of transformers only: a cache may refer to its config or to a torch device.
    elif type(item).__module__.startswith("transformers.") and hasattr(item, "__dict__"):
        for name, value in vars(item).items():
            if name != "config":
                yield from tensors_of(value, (*path, name))


def _first_dim(path: Path, tensor: Tensor, num_rows: int) -> int | None:
    if not tensor.dim() or not tensor.numel():
        return None
    if tensor.shape[0] != num_rows:
        raise RolloutError(f"the cache has no batch dimension at {'.'.join(map(str, path))}")
    return 0


def _batch_dim(path: Path, tensor: Tensor, other: Tensor | None) -> int | None:
    """The dimension in which a tensor of 2 rows and its counterpart of 3 rows differ; None if they do not."""
    if other is None or tensor.dim() != other.dim():
        raise _no_batch_dimension(path)
    differ = [i for i, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b]
    if not differ:
        return None
    if len(differ) > 1 or (tensor.shape[differ[0]], other.shape[differ[0]]) != (2, 3):
        raise _no_batch_dimension(path)
    return differ[0]


def _no_batch_dimension(path: Path) -> RolloutError:
    return RolloutError(f"its cache has no batch dimension at {'.'.join(map(str, path))}")
