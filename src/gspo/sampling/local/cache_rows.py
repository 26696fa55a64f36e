"""Rows of a transformers cache: select, repeat and join them, whatever the cache holds.

A cache is an object with tensors somewhere inside: keys and values, convolution and recurrent states, lists of them.
Transformers can reorder the rows of most caches but cannot join two. So the tensors are found by a walk over the
object, and the meaning of their dimensions by comparing caches that differ only in their number of rows or of tokens.

Rows of different length share a cache if every tensor either does not depend on the length or has one dimension that
counts tokens: this is padded on the left, and the attention mask hides the padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gspo.errors import RolloutError

Path = tuple[Any, ...]
Part = tuple[Any, Tensor]  # a cache, and which of its rows [n]
PROMPT = 2  # tokens of the shorter prompt of `learn`: less than any sliding window, whose tensors stop growing


class CacheLayout:
    """Where the tensors of a model's cache are, and which dimension of each counts rows and tokens."""

    def __init__(self, *, mixes_lengths: bool) -> None:
        self.mixes_lengths = mixes_lengths  # whether rows of different length may share a cache
        self.is_known = False
        self._row_dims: dict[Path, int | None] = {}  # None: the tensor is the same for every row
        self._token_dims: dict[Path, int] = {}
        self._counters: list[Path] = []  # integers that count tokens

    @property
    def has_tokens(self) -> bool:
        """Whether the cache grows with the sequence; a recurrent state does not."""
        return bool(self._token_dims)

    def learn(self, run: Callable[[int, int, Any], Any]) -> None:
        """`run(rows, tokens, cache)` feeds a prompt, or one token that follows these; it returns the cache."""
        few, more, longer = run(2, PROMPT, None), run(3, PROMPT, None), run(2, PROMPT + 1, None)
        # Twice: some tensors exist only after the first decoded token.
        for step in range(2):
            many, grown = dict(leaves_of(more)), dict(leaves_of(longer))
            for path, leaf in leaves_of(few):
                if isinstance(leaf, Tensor):
                    self._row_dims[path] = _dim_that_differs(path, leaf, many.get(path), (2, 3))
                if self.mixes_lengths:
                    self._learn_length(path, leaf, grown.get(path))
            few = run(2, PROMPT + step, few)
            more, longer = run(3, PROMPT + step, more), run(2, PROMPT + 1 + step, longer)
        self.is_known = True

    def _learn_length(self, path: Path, leaf: Any, longer: Any) -> None:
        if isinstance(leaf, Tensor):
            size = leaf.shape
            dim = _dim_that_differs(path, leaf, longer, None)
            if dim is not None:
                if longer.shape[dim] != size[dim] + 1:
                    raise RolloutError(f"its cache does not grow by one per token at {_name(path)}")
                self._token_dims[path] = dim
            elif self._row_dims[path] is None and not torch.equal(leaf, longer):
                raise RolloutError(f"its cache counts tokens in a tensor at {_name(path)}")
        elif leaf != longer and path not in self._counters:
            if longer != leaf + 1:
                raise RolloutError(f"its cache does not count tokens one by one at {_name(path)}")
            self._counters.append(path)

    def gather(self, parts: Sequence[Part], length: int) -> Any:
        """A new cache with these rows, in this order; none is changed. `length`: tokens of the longest row."""
        found = [dict(leaves_of(cache)) for cache, _ in parts]
        num_rows = self._num_rows(found[0])
        # deepcopy takes the new tensors from here, and copies everything else: flags, nesting.
        new: dict[int, Any] = {}
        for path, leaf in found[0].items():
            if not isinstance(leaf, Tensor):
                continue
            # Some states appear only after many tokens: the first dimension counts their rows.
            if path not in self._row_dims:
                if leaf.shape[0] != num_rows:
                    raise RolloutError(f"its cache has no batch dimension at {_name(path)}")
                self._row_dims[path] = 0
            dim = self._row_dims[path]
            if dim is None:
                new[id(leaf)] = leaf.clone()
                continue
            tensors = [leaves[path] for leaves in found]
            if path in self._token_dims:
                tensors = _fitted(tensors, self._token_dims[path], length)
            rows = [tensor.index_select(dim, at) for tensor, (_, at) in zip(tensors, parts, strict=True)]
            new[id(leaf)] = rows[0] if len(rows) == 1 else torch.cat(rows, dim)
        cache = copy.deepcopy(parts[0][0], new)
        for path in self._counters:
            _set(cache, path, length)
        return cache

    def _num_rows(self, found: Mapping[Path, Any]) -> int:
        return next(leaf.shape[dim] for path, leaf in found.items() if (dim := self._row_dims.get(path)) is not None)


def _fitted(tensors: Sequence[Tensor], dim: int, length: int) -> list[Tensor]:
    """The last `length` tokens of each, or all that a sliding window keeps; shorter ones are padded on the left."""
    size = max(min(tensor.shape[dim], length) for tensor in tensors)
    fitted = []
    for tensor in tensors:
        missing = size - tensor.shape[dim]
        if missing > 0:
            pad = [0, 0] * (tensor.dim() - dim - 1) + [missing, 0]  # F.pad counts dimensions from the last
            tensor = F.pad(tensor, pad)
        fitted.append(tensor.narrow(dim, tensor.shape[dim] - size, size))
    return fitted


def _set(item: Any, path: Path, value: int) -> None:
    for key in path[:-1]:
        item = item[key] if isinstance(item, dict | list) else getattr(item, key)
    if isinstance(item, dict | list):
        item[path[-1]] = value
    else:
        setattr(item, path[-1], value)


def leaves_of(item: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every tensor and integer inside, with the keys, indices and attribute names that lead to it."""
    if isinstance(item, Tensor):
        # torch.tensor([]) stands for a state that does not exist yet.
        if item.dim() != 1 or item.numel():
            yield path, item
    elif type(item) is int:
        yield path, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from leaves_of(value, (*path, key))
    elif isinstance(item, list | tuple):
        for index, value in enumerate(item):
            yield from leaves_of(value, (*path, index))
    # Objects of transformers only: a cache may refer to its config or to a torch device.
    elif type(item).__module__.startswith("transformers.") and hasattr(item, "__dict__"):
        for name, value in vars(item).items():
            if name != "config":
                yield from leaves_of(value, (*path, name))


def num_bytes(cache: Any) -> int:
    return sum(leaf.nbytes for _, leaf in leaves_of(cache) if isinstance(leaf, Tensor))


def _dim_that_differs(path: Path, tensor: Tensor, other: Any, sizes: tuple[int, int] | None) -> int | None:
    """The one dimension in which two tensors differ; None if there is none. `sizes`: what theirs must be."""
    if not isinstance(other, Tensor) or tensor.dim() != other.dim():
        raise RolloutError(f"its cache has another form for another batch at {_name(path)}")
    differ = [i for i, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b]
    if not differ:
        return None
    if len(differ) > 1 or sizes not in (None, (tensor.shape[differ[0]], other.shape[differ[0]])):
        raise RolloutError(f"its cache has no batch dimension at {_name(path)}")
    return differ[0]


def _name(path: Path) -> str:
    return ".".join(map(str, path))
