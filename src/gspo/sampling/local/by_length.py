"""The stepper that uses transformers' own cache, or no cache at all.

A cache is an object with tensors somewhere inside: keys and values, convolution and recurrent states, lists of them.
Transformers can reorder the rows of most caches but cannot join two. So the tensors are found by a walk over the
object, and the meaning of their dimensions by comparing caches that differ only in their number of rows or of tokens.

Rows of different length share a cache if every tensor either does not depend on the length or has one dimension that
counts tokens: this is padded on the left, and the attention mask hides the padding.

Prompts of equal length share a forward [rows, tokens], so no prompt is padded and no state leaks between rows. A prompt
is computed once, and its cache is repeated for the rows of its group; finished rows leave the cache. To decode, rows
with equally many tokens share a batch, or all rows if the cache allows it: then keys and values are padded on the left
and hidden by the mask. Without a cache every token computes whole sequences: slow, but right for any causal model.

Shapes: B rows of a batch, L tokens of a forward, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gspo.errors import RolloutError
from gspo.models import Vision, routed
from gspo.sampling.local.packed import Finished, KeptRow, Step, StoredPrompt, first_of_each
from gspo.sampling.local.rows import Rows
from gspo.types import PromptKey, Request, Shown

Path = tuple[Any, ...]
Part = tuple[Any, Tensor]  # a cache, and which of its rows [n]
PROMPT = 2  # tokens of the shorter prompt of `learn`: less than any sliding window, whose tensors stop growing


class CacheLayout:
    """Where the tensors of a model's cache are, and which dimension of each counts rows and tokens."""

    def __init__(self, *, mixes_lengths: bool) -> None:
        self.mixes_lengths = mixes_lengths  # whether rows of different length may share a cache
        self.is_known = False
        self._row_dims: dict[Path, int | None] = {}  # None: the tensor is the same for every row
        self.token_dims: dict[Path, int] = {}  # empty: the cache does not grow with the sequence (a recurrent state)
        self._counters: list[Path] = []  # integers that count tokens

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
                self.token_dims[path] = dim
            elif self._row_dims[path] is None and not torch.equal(leaf, longer):
                raise RolloutError(f"its cache counts tokens in a tensor at {_name(path)}")
        elif leaf != longer and path not in self._counters:
            if longer != leaf + 1:
                raise RolloutError(f"its cache does not count tokens one by one at {_name(path)}")
            self._counters.append(path)

    def gather(self, parts: Sequence[Part], length: int) -> Any:
        """A new cache with these rows, in this order; none is changed. `length`: tokens of the longest row."""
        found = [dict(leaves_of(cache)) for cache, _ in parts]
        num_rows = next(
            leaf.shape[dim] for path, leaf in found[0].items() if (dim := self._row_dims.get(path)) is not None
        )
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
            if path in self.token_dims:
                tensors = _fitted(tensors, self.token_dims[path], length)
            rows = [tensor.index_select(dim, at) for tensor, (_, at) in zip(tensors, parts, strict=True)]
            new[id(leaf)] = rows[0] if len(rows) == 1 else torch.cat(rows, dim)
        cache = copy.deepcopy(parts[0][0], new)
        for path in self._counters:
            _set(cache, path, length)
        return cache


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


_CACHE_NAMES = ("past_key_values", "cache_params", "state")  # of outputs and arguments


@dataclass(slots=True)
class _Batch:
    slots: NDArray[np.int64]  # [B] row slots
    length: int  # tokens of the longest row in the cache
    cache: Any


class LengthStepper:
    """Implements `packed.Stepper`. `layout` describes the model's cache; None: compute without a cache."""

    def __init__(
        self,
        model: Any,
        routers: Sequence[nn.Module],
        prefill_tokens: int,
        vision: Vision | None,
        layout: CacheLayout | None,
        rows: Rows,
        counts: Counter[str],
    ) -> None:
        self._model, self._routers, self._prefill_tokens = model, routers, prefill_tokens
        self._vision, self._layout, self._rows, self._counts = vision, layout, rows, counts
        self._accepts = inspect.signature(model.forward).parameters
        self.prompts: dict[PromptKey, StoredPrompt] = {}
        self.kept: dict[tuple[int, int], KeptRow] = {}  # stays empty
        self._batches: list[_Batch] = []
        self._fresh: list[int] = []  # slots of rows whose cache is still that of their prompt

    def num_bytes(self) -> int:
        caches = [*(batch.cache for batch in self._batches), *(p.cache for p in self.prompts.values())]
        return sum(num_bytes(cache) for cache in {id(c): c for c in caches}.values())

    def _forward(
        self,
        tokens: NDArray,
        cache: Any = None,
        start_b: NDArray | None = None,
        delta_b: NDArray | int = 0,
        requests: Sequence[Request] = (),
    ) -> tuple[Tensor, NDArray | None, Any]:
        """Feed tokens [B, L]: logits [B, V] of the last, routes [B, L, …], cache. `start_b` [B]: tokens in `cache`.

        `delta_b` [B] shifts positions after images. `requests` [B] are those of whole sequences.
        """
        device = self._model.device
        options: dict[str, Any] = {"use_cache": self._layout is not None}
        start_b = np.zeros(len(tokens), dtype=np.int64) if start_b is None else start_b
        # Passed even where a model could derive them: some derive wrong ones from a cache without keys.
        if "position_ids" in self._accepts:
            options["position_ids"] = torch.from_numpy((start_b + delta_b)[:, None] + np.arange(tokens.shape[1]))
        options |= self._images(tokens, requests)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        # Shorter rows have padding on the left. A recurrent state has none.
        if (start_b < start_b.max()).any() and self._layout is not None and self._layout.token_dims:
            seen = np.arange(start_b.max() + 1) >= start_b.max() - start_b[:, None]  # [B, cached tokens + 1]
            options["attention_mask"] = torch.from_numpy(seen.astype(np.int64)).to(device)
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = 1
        if cache is not None:
            options[next(name for name in _CACHE_NAMES if name in self._accepts)] = cache
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        with routed(self._routers) if self._routers else nullcontext() as recorder:
            output = self._model(input_ids=ids, **options)
        routes = None if recorder is None else recorder.routes()  # [B·L, layers, top_k]
        routes = None if routes is None else routes.reshape(*tokens.shape, *routes.shape[1:])
        if self._layout is not None:
            cache = next((output[name] for name in _CACHE_NAMES if name in output), None)
            if cache is None:
                raise RolloutError("the model returns no cache")
        return output.logits[:, -1], routes, cache

    def _images(self, tokens: NDArray, requests: Sequence[Request]) -> dict[str, Any]:
        """The arguments for whole sequences [B, L] that begin with prompts with images; empty for text alone."""
        row = Shown.of([r.shown for r in requests], [len(r.prompt) for r in requests])
        if row is None:
            return {}
        assert self._vision is not None  # the engine checks every request
        num_rows, length = tokens.shape
        placed = self._vision.lay_out(
            tokens.reshape(-1),
            np.tile(np.arange(length), num_rows),
            np.arange(num_rows) * length,
            np.full(num_rows, length),
            row,
        )
        self._counts["prefill_images"] += len(row.prompts)
        found: dict[str, Any] = {"mm_encoder_outputs": {"image": self._vision.encoder_output(row.prompts, placed)}}
        if placed.positions is not None:
            positions = torch.from_numpy(placed.positions).view(-1, num_rows, length)  # [D, B, L]
            found["position_ids"] = positions if len(positions) > 1 else positions[0]
        if placed.types is not None:
            found["token_type_ids"] = torch.from_numpy(placed.types).view(num_rows, length)
        return found

    def _whole(self, sequences: Sequence[NDArray]) -> Iterator[tuple[list[int], NDArray]]:
        """Batches of whole sequences of equal length: their indices and tokens [B, L], at most `prefill_tokens`."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        while order:
            length = len(sequences[order[0]])
            most = max(1, self._prefill_tokens // length)
            part = [i for i in order[:most] if len(sequences[i]) == length]
            order = order[len(part) :]
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += len(part) * length
            yield part, np.stack([sequences[i] for i in part])

    def prefill(self, requests: Sequence[Request]) -> None:
        if self._layout is not None and not self._layout.is_known:
            self._layout.learn(self._probe_cache)
        # A continued row computes its prompt and its tokens together: not every cache takes several tokens at once.
        fresh = [r for r in requests if r.prefix is None or not len(r.prefix.tokens)]
        prompts = first_of_each(r for r in fresh if r.key not in self.prompts)
        for part, tokens in self._whole([np.array(r.prompt) for r in prompts]):
            logits, routes, cache = self._forward(tokens, requests=[prompts[i] for i in part])
            for row, index in enumerate(part):
                chosen = None if routes is None else routes[row]
                self.prompts[prompts[index].key] = StoredPrompt(logits[row], chosen, cache=cache, index=row)

    def _probe_cache(self, num_rows: int, num_tokens: int, cache: Any) -> Any:
        if cache is None:
            return self._forward(np.ones((num_rows, num_tokens), dtype=np.int64))[2]
        return self._forward(np.ones((num_rows, 1), dtype=np.int64), cache, np.full(num_rows, num_tokens))[2]

    def join(self, slots: NDArray) -> None:
        for slot in slots:
            request = self._request(int(slot))
            if request.shown is not None and self._vision is not None:
                self._rows.delta[slot] = self._vision.delta(request.shown)
        if self._layout is None:
            return
        self._fresh += [int(s) for s in slots if self._rows.count[s] == 0]
        continued = [int(s) for s in slots if self._rows.count[s] > 0]
        sequences = [self._tokens(slot)[:-1] for slot in continued]
        for part, tokens in self._whole(sequences):
            cache = self._forward(tokens, requests=[self._request(continued[i]) for i in part])[2]
            self._add(_Batch(np.array([continued[i] for i in part]), tokens.shape[1], cache))

    def _request(self, slot: int) -> Request:
        request = self._rows.requests[slot]
        assert request is not None
        return request

    def _tokens(self, slot: int) -> NDArray:
        return np.concatenate([self._request(slot).prompt, self._rows.tokens[slot, : self._rows.count[slot]]])

    def _add(self, batch: _Batch) -> None:
        """Join a batch of equal length, or of any length where the cache allows it."""
        assert self._layout is not None
        for other in self._batches:
            if other.length == batch.length or self._layout.mixes_lengths:
                parts = [(b.cache, np.arange(len(b.slots))) for b in (other, batch)]
                other.slots = np.concatenate([other.slots, batch.slots])
                other.length = max(other.length, batch.length)
                other.cache = self._gather(parts, other.length)
                return
        self._batches.append(batch)

    def _gather(self, parts: Sequence[tuple[Any, NDArray]], length: int) -> Any:
        assert self._layout is not None
        on_device: list[Part] = [(cache, torch.from_numpy(at).to(self._model.device)) for cache, at in parts]
        return self._layout.gather(on_device, length)

    def _cached(self, slots: NDArray) -> NDArray:
        """Tokens of each row that are in the cache: all but the last."""
        return self._rows.prompt_len[slots] + self._rows.count[slots] - 1

    def _start_fresh(self) -> None:
        """Repeat the caches of prompts for the rows that have drawn their first token."""
        by_cache: dict[int, list[tuple[int, StoredPrompt]]] = {}
        for slot in self._fresh:
            stored = self.prompts[self._request(slot).key]
            by_cache.setdefault(id(stored.cache), []).append((slot, stored))
        for members in by_cache.values():
            slots = np.array([slot for slot, _ in members])
            length = int(self._rows.prompt_len[slots[0]])
            cache = self._gather([(members[0][1].cache, np.array([stored.index for _, stored in members]))], length)
            self._add(_Batch(slots, length, cache))
        self._fresh = []

    def step(self) -> Step:
        rows, steps = self._rows, list[Step]()
        if self._layout is None:
            living = rows.living()
            for part, tokens in self._whole([self._tokens(int(slot)) for slot in living]):
                logits, routes, _ = self._forward(tokens, requests=[self._request(int(living[i])) for i in part])
                steps.append(Step(living[part], logits, None if routes is None else routes[:, -1]))
        else:
            self._start_fresh()
            for batch in self._batches:
                last = rows.tokens[batch.slots, rows.count[batch.slots] - 1]  # [B]
                cached, delta = self._cached(batch.slots), rows.delta[batch.slots]  # [B] each
                logits, routes, batch.cache = self._forward(last[:, None], batch.cache, cached, delta)
                batch.length += 1
                steps.append(Step(batch.slots, logits, None if routes is None else routes[:, 0]))
        self._counts["decode_forwards"] += len(steps)
        self._counts["decode_rows"] += sum(len(step.slots) for step in steps)
        routes = [step.routes for step in steps if step.routes is not None]
        return Step(
            np.concatenate([step.slots for step in steps]),
            torch.cat([step.logits for step in steps]),
            np.concatenate(routes) if routes else None,
        )

    def keep(self, finished: Sequence[Finished], dropped: Sequence[PromptKey]) -> None:
        """Keeps nothing: not every cache of transformers takes several tokens after the first ones."""

    def leave(self, slots: NDArray, moves: tuple[list[int], list[int]], dropped: Sequence[PromptKey]) -> None:
        for prompt in dropped:
            self.prompts.pop(prompt, None)  # a prompt of continued rows only is not stored
        target_of = dict(zip(*moves, strict=True))
        finished = set(slots.tolist())
        self._fresh = [target_of.get(slot, slot) for slot in self._fresh if slot not in finished]
        for batch in self._batches:
            stay = np.flatnonzero(~np.isin(batch.slots, slots))
            some_left = len(stay) < len(batch.slots)
            batch.slots = np.array([target_of.get(slot, slot) for slot in batch.slots[stay].tolist()], dtype=np.int64)
            if len(stay) and some_left:
                batch.length = int(self._cached(batch.slots).max())
                batch.cache = self._gather([(batch.cache, stay)], batch.length)
        self._batches = [batch for batch in self._batches if len(batch.slots)]
