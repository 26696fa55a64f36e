"""From sequences to micro-batches: a forest of segments in one row, cut and balanced by tokens.

A model gets the best of three layouts that it computes right (`probe.py` measures this at load). `shared`: a group's
prompt is computed once. `packed`: every sequence repeats its prompt; all sequences are in one row. `padded`: as
`packed`, but the model is called with one sequence per row, [B, T], padded on the right: for models that keep state
outside the attention. All three are the same `Packed` object below; only the call of the trunk differs.

This file, the attention and the policy share one layout: a packed micro-batch is a *forest of segments*, laid end to
end in one row of N tokens. A segment has a parent (or −1) that comes before it in the row. A token attends to all
tokens of its ancestor segments and causally to its own segment; its position is the length of its ancestors plus its
offset. A group is a prompt segment with one child per completion. Episodes that branch are deeper trees.

*Targets* are the M tokens whose log-probs are computed: the hidden state at row index source[m] predicts target m. The
last prompt token predicts the first token of each of its completions: one hidden state, several targets. Untrained
spans (tool output) are inputs and never targets. Tokens after the last trained token of a completion do not enter the
model; the last trained token is a target and not an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.errors import DataError
from gspo.models import TreeLayout
from gspo.types import Kept, Shown, ShownPrompt

Layout = Literal["shared", "packed", "padded"]


@dataclass(frozen=True, eq=False)
class Completion:
    """Tokens after a prompt, which of them are trained, and the caller's number for the sequence.

    Completions of one `family` (the sequences of one episode) are laid out as a tree: their common prefix is computed
    once. Other completions of an item share its prompt only.

    >>> Completion(np.array([4, 9, 2]), np.array([True, True, False]), index=5).num_inputs
    1
    """

    tokens: NDArray[np.integer[Any]]
    mask: NDArray[np.bool_]
    index: int
    family: int | None = None
    kept: Kept | None = None  # of its trained tokens: the kept sets of truncated sampling

    @cached_property
    def num_inputs(self) -> int:
        """Tokens that enter the model: those before the last trained one."""
        trained = np.flatnonzero(self.mask)
        return int(trained[-1]) if len(trained) else 0

    @cached_property
    def is_trained(self) -> bool:
        """Whether any token is trained; if not, the sequence has length 0 and no input."""
        return bool(self.mask.any())


@dataclass(frozen=True, eq=False)
class PackItem:
    """A prompt and the completions that share it.

    >>> item = PackItem(np.array([1, 2, 3]), (Completion(np.array([4, 9]), np.array([True, True]), 0),))
    >>> item.num_tokens(share_prefix=True)
    4
    """

    prompt: NDArray[np.integer[Any]]
    completions: Sequence[Completion]
    shown: ShownPrompt | None = None  # the prompt, if it shows images

    def num_tokens(self, *, share_prefix: bool) -> int:
        trained = [c for c in self.completions if c.is_trained]
        if not share_prefix:
            return len(trained) * len(self.prompt) + sum(c.num_inputs for c in trained)
        # The prompt counts once, or not at all if no completion is trained.
        return min(1, len(trained)) * len(self.prompt) + sum(num_inputs_of(family) for family in families(trained))


@dataclass(frozen=True, eq=False)
class Packed:
    """One micro-batch: N input tokens in S segments, M targets of B sequences. See the module docstring.

    >>> packed = pack([PackItem(np.array([7, 8]), tuple(
    ...     Completion(np.array([5, i]), np.array([True, True]), i) for i in range(2)))])
    >>> packed.tokens.tolist(), packed.positions.tolist(), packed.parent.tolist()
    ([7, 8, 5, 5], [0, 1, 2, 2], [-1, 0, 0])
    >>> packed.source.tolist(), packed.target.tolist(), packed.cu_seqlens.tolist()
    ([1, 2, 1, 3], [5, 0, 5, 1], [0, 2, 4])
    """

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, true positions
    start: Tensor  # [S] int64, first row index of a segment
    length: Tensor  # [S] int64
    parent: Tensor  # [S] int64, −1 at roots
    source: Tensor  # [M] int64, row index of the hidden state that predicts the target
    target: Tensor  # [M] int64
    cu_seqlens: Tensor  # [B+1] int64; targets of sequence b are cu_seqlens[b] : cu_seqlens[b+1], in order
    index: Tensor  # [B] int64, the caller's number of each sequence
    # Truncated sampling only: the log-prob of target m is over its kept set. The sets are `kept_ids`, end to end.
    kept_counts: Tensor | None = None  # [M] int64; 0: the whole vocabulary
    kept_ids: Tensor | None = None  # [Σ kept_counts] int64
    shown: Shown | None = None  # the prompts with images; None: text alone

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return len(self.target)

    @cached_property
    def is_filler(self) -> bool:
        """Whether this is a dummy micro-batch (see `filler`), whose result is not used."""
        return len(self.index) == 1 and int(self.index[0]) < 0

    @cached_property
    def layout(self) -> TreeLayout:
        """The attention's view of the segments, with its index plans: made once, used by every layer and pass."""
        return TreeLayout(*(x.cpu().numpy() for x in (self.start, self.length, self.parent)))

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """One sequence per row, padded on the right: token ids [B, T], and [N] where each token is in [B·T].

        Only for root segments. The padding needs no mask: nothing in a causal model sees what comes after it.
        """
        return self.rows(range(len(self.length)))[:2]

    def rows(self, segments: Sequence[int], width: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Segments as padded rows, ids [B, T] with T ≥ `width`; of their n tokens, the places in [B·T] and in [N]."""
        which = torch.as_tensor(segments, dtype=torch.int64, device=self.length.device)  # [B]
        start, length = self.start[which], self.length[which]  # [B]
        num_rows, width = max(1, len(which)), max(width, int(length.max()) if len(which) else 1)
        row = torch.repeat_interleave(length)  # [n]
        offset = torch.arange(len(row), device=row.device) - (length.cumsum(0) - length)[row]  # [n]
        at, place = row * width + offset, start[row] + offset  # [n]
        ids = self.tokens.new_zeros(num_rows * width).index_copy_(0, at, self.tokens[place])  # [B·T]
        return ids.view(num_rows, width), at, place

    @cached_property
    def by_source(self) -> tuple[Tensor, Tensor, Tensor]:
        """[U] distinct sources, [M] indices of targets sorted by source, [U+1] where each source's targets begin.

        With kept sets, U = M and nothing is sorted: two targets of one source may have different sets.
        """
        if self.kept_counts is not None:
            all_m = torch.arange(self.num_targets + 1, device=self.source.device)
            return self.source, all_m[:-1], all_m
        # stable: targets with the same source keep their order.
        source, order = torch.sort(self.source, stable=True)
        rows, counts = torch.unique_consecutive(source, return_counts=True)
        return rows, order, torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def to(self, device: torch.device | str) -> Packed:
        """The same micro-batch on another device; `layout` stays on the host and is reused."""
        if self.tokens.device == torch.device(device):
            return self
        tensors = {
            name: value for name in self.__dataclass_fields__ if isinstance(value := getattr(self, name), Tensor)
        }
        moved = replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})
        moved.__dict__["layout"] = self.layout
        return moved


def families(completions: Sequence[Completion]) -> list[list[Completion]]:
    """The completions grouped by family, in order of first appearance; one without a family is a group of its own."""
    found: dict[Any, list[Completion]] = {}
    for place, completion in enumerate(completions):
        # The key is (family, None), or (None, place), which no other completion has.
        found.setdefault((completion.family, None if completion.family is not None else place), []).append(completion)
    return list(found.values())


def num_inputs_of(family: Sequence[Completion]) -> int:
    """Input tokens of a family; a common prefix counts once."""
    return sum(len(tokens) for tokens, _, _ in _tree(family)) if len(family) > 1 else family[0].num_inputs


def _tree(family: Sequence[Completion]) -> list[tuple[NDArray[np.integer[Any]], int, list[int]]]:
    """The inputs of a family as segments (tokens, parent segment or −1, positions in `family` that contain it).

    The inputs of a completion are the segments that contain it, end to end. Parents come before children.
    """
    segments: list[tuple[NDArray[np.integer[Any]], int, list[int]]] = []

    def grow(members: list[int], begin: int, parent: int) -> None:
        """Add segments for members that are equal up to `begin`."""
        while members:
            first = members[0]
            inputs = family[first].tokens[: family[first].num_inputs]
            if len(inputs) == begin:
                members = members[1:]
                continue
            # The next segment: all members with the same next token, up to where the first of them differs or ends.
            same = [m for m in members if family[m].num_inputs > begin and family[m].tokens[begin] == inputs[begin]]
            end = min(_common(inputs, family[m].tokens[: family[m].num_inputs]) for m in same)
            segments.append((inputs[begin:end], parent, same))
            grow(same, end, len(segments) - 1)
            members = [m for m in members if m not in same]

    grow(list(range(len(family))), 0, -1)
    return segments


def _common(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """Length of the common prefix."""
    num = min(len(a), len(b))
    unequal = np.flatnonzero(a[:num] != b[:num])
    return int(unequal[0]) if len(unequal) else num


def forest(
    segments: Sequence[tuple[NDArray[np.integer[Any]], int]],
    sequences: Sequence[tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]], int]],
    shown: Shown | None = None,
) -> Packed:
    """Pack any tree: segments (tokens, parent) and sequences (sources, targets, index)."""
    length = np.array([len(tokens) for tokens, _ in segments], dtype=np.int64)  # [S]
    parent = np.array([up for _, up in segments], dtype=np.int64)  # [S]
    start = np.cumsum(length) - length  # [S]
    # The layout computes the true positions, and checks that parents come before children.
    layout = TreeLayout(start, length, parent)
    lengths = np.array([0, *(len(targets) for _, targets, _ in sequences)])  # [B + 1]
    packed = Packed(
        tokens=_flat([tokens for tokens, _ in segments]),
        positions=torch.from_numpy(layout.positions),
        start=torch.from_numpy(start),
        length=torch.from_numpy(length),
        parent=torch.from_numpy(parent),
        source=_flat([sources for sources, _, _ in sequences]),
        target=_flat([targets for _, targets, _ in sequences]),
        cu_seqlens=torch.from_numpy(np.cumsum(lengths)),
        index=torch.tensor([index for _, _, index in sequences], dtype=torch.int64),
        shown=shown,
    )
    packed.__dict__["layout"] = layout  # fills the cached property: the layout was computed above
    return packed


def pack(items: Sequence[PackItem], *, share_prefix: bool = True, vocab_size: int | None = None) -> Packed:
    """One micro-batch of groups. Sequences come in the order of items and their completions.

    `share_prefix=False` repeats the prompt in every sequence (each a root segment): plain packing, for comparison and
    for models that fail the probe. A completion without trained tokens is a sequence of length 0 and has no input.
    """
    segments: list[tuple[NDArray[np.integer[Any]], int]] = []
    sequences: list[tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]], int]] = []
    end = 0  # row length so far
    shown: list[ShownPrompt | None] = []  # of each segment: its prompt, if that shows images
    num_shown: list[int] = []  # of each segment: tokens that are the prompt

    def append(tokens: NDArray[np.integer[Any]], parent: int) -> int:
        nonlocal end
        segments.append((tokens, parent))
        shown.append(item.shown)
        num_shown.append(len(item.prompt) if parent < 0 else 0)
        end += len(tokens)
        return end - len(tokens)

    for item in items:
        _check(item, vocab_size)
        num_prompt = len(item.prompt)
        # A prompt with one trained completion has nothing to share: prompt and completion are one segment.
        share = share_prefix and sum(c.is_trained for c in item.completions) > 1
        # The prompt: a segment of its own if several completions share it.
        root, prompt_end = -1, 0
        if share:
            root = len(segments)
            prompt_end = append(item.prompt, -1) + num_prompt
        # Families of several completions (episodes that branch): their inputs are a tree below the prompt.
        branches: dict[int, NDArray[np.int64]] = {}  # by index: row index of each input of a completion in a tree
        for family in families([c for c in item.completions if c.is_trained]) if share else ():
            if len(family) == 1:
                continue
            base, rows = len(segments), [np.zeros(0, np.int64) for _ in family]
            for tokens, parent, members in _tree(family):
                begin = append(tokens, root if parent < 0 else base + parent)
                for m in members:
                    rows[m] = np.concatenate([rows[m], begin + np.arange(len(tokens))])
            branches |= {c.index: row for c, row in zip(family, rows, strict=True)}
        for completion in item.completions:
            # Sources: the hidden state of the token before a target predicts it.
            trained = np.flatnonzero(completion.mask)  # [trained] positions in the completion
            sources = trained  # [trained] row index of the hidden state that predicts each; set below if there are any
            if completion.is_trained:
                inputs = completion.tokens[: completion.num_inputs]
                if not share:
                    begin = append(np.concatenate([item.prompt, inputs]), -1)
                    sources = trained + (begin + num_prompt - 1)
                elif completion.index in branches:
                    # Entry p predicts completion token p: first the last prompt token, then the inputs in their order.
                    sources = np.concatenate([[prompt_end - 1], branches[completion.index]])[trained]
                else:
                    # A one-token completion has no input and no segment; its source is the last prompt token.
                    begin = append(inputs, root) if len(inputs) else end
                    sources = np.where(trained == 0, prompt_end - 1, begin + trained - 1)
            sequences.append((sources, completion.tokens[trained], completion.index))
    packed = forest(segments, sequences, Shown.of(shown, num_shown))
    return _with_kept(packed, [c for item in items for c in item.completions])


def _with_kept(packed: Packed, completions: Sequence[Completion]) -> Packed:
    """Add the kept sets of the targets, if any completion has them."""
    kept = Kept.concatenate([c.kept for c in completions], [int(c.mask.sum()) for c in completions])
    if kept is None:
        return packed
    return replace(packed, kept_counts=_flat([kept.counts]), kept_ids=_flat([kept.ids]))


def filler() -> Packed:
    """A dummy one-token micro-batch, so that an idle rank still takes part in FSDP's all-gathers."""
    token = np.zeros(1, dtype=np.int64)
    return pack([PackItem(token, (Completion(token, np.ones(1, dtype=np.bool_), index=-1),))])


def _check(item: PackItem, vocab_size: int | None) -> None:
    if not len(item.prompt) and any(c.is_trained for c in item.completions):
        raise DataError("empty prompt: the first token of a completion needs a token before it, for example BOS")
    for completion in item.completions:
        if len(completion.tokens) != len(completion.mask):
            raise DataError(
                f"sequence {completion.index}: {len(completion.tokens)} tokens but a mask of {len(completion.mask)}"
            )
        if completion.kept is not None and len(completion.kept.counts) != int(completion.mask.sum()):
            raise DataError(
                f"sequence {completion.index}: {len(completion.kept.counts)} kept sets for "
                f"{int(completion.mask.sum())} trained tokens"
            )
    if vocab_size is None:
        return
    for tokens in (item.prompt, *(c.tokens for c in item.completions)):
        if len(tokens) and not 0 <= (low := int(tokens.min())) <= (high := int(tokens.max())) < vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}: "
                "the tokenizer does not belong to this model; set tokenizer_path"
            )


def _flat(parts: Sequence[NDArray[np.integer[Any]]]) -> Tensor:
    # The empty array allows an empty list of parts.
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False))


def by_sequence(packed: Packed, values: Tensor) -> dict[int, NDArray[Any]]:
    """One value per target, [M], as one array per sequence number; empty for a filler."""
    if packed.is_filler:
        return {}
    array, cuts = values.detach().cpu().numpy(), packed.cu_seqlens.cpu().numpy()
    return {i: array[cuts[b] : cuts[b + 1]] for b, i in enumerate(packed.index.tolist())}


def gather(per_sequence: Mapping[int, NDArray[Any]], index: NDArray[np.int64]) -> Tensor:
    """The arrays of the sequences `index`, end to end, [M]: the inverse of `by_sequence`."""
    return torch.from_numpy(np.concatenate([per_sequence[int(i)] for i in index]))


# A group is cut over ranks only if the largest part becomes smaller than this fraction of the uncut one.
_WORTH = 0.95


def micro_batches(
    items: Sequence[PackItem], max_tokens: int | None, *, min_batches: int = 1, layout: Layout = "shared"
) -> list[list[PackItem]]:
    """Split a mini-batch into micro-batches of at most `max_tokens` input tokens and of similar size.

    A group that fits stays whole; a larger one is cut, and its prompt is repeated. A single sequence longer than
    `max_tokens` (actor.mb_spec.max_tokens_per_mb) cannot be cut and gets its own micro-batch: the limit is a memory
    target, and the sampler's context limits the sequence. Padding counts. The result is a pure function of the
    arguments; every sequence index appears in exactly one micro-batch.
    """
    if max_tokens is not None and max_tokens < 1:
        raise DataError(
            f"a micro-batch needs at least one token, got {max_tokens}: raise actor.mb_spec.max_tokens_per_mb"
        )
    if layout == "padded":
        return _by_length(single_sequences(items), max_tokens, min_batches)
    share_prefix = layout == "shared"
    pieces = [piece for item in items for piece in _cut(item, max_tokens, share_prefix)]
    sizes = [piece.num_tokens(share_prefix=share_prefix) for piece in pieces]
    limit = max_tokens if max_tokens is not None else sum(sizes)
    # Start with the smallest number that can fit, at most one micro-batch per piece that is not empty.
    num = max(1, min_batches, -(-sum(sizes) // max(1, limit)))
    num = min(num, max(1, sum(size > 0 for size in sizes)))
    # The loop ends: with one piece per bin `_balance` succeeds, even if a piece exceeds the limit.
    while (bins := _balance(sizes, num, limit)) is None:
        num += 1
    return [[pieces[i] for i in chosen] for chosen in bins if chosen]


def single_sequences(items: Sequence[PackItem]) -> list[PackItem]:
    """The items with one completion each."""
    return [replace(item, completions=(completion,)) for item in items for completion in item.completions]


def _by_length(rows: list[PackItem], max_tokens: int | None, min_batches: int) -> list[list[PackItem]]:
    """Rows of similar length together: a micro-batch of B rows costs B times its longest row."""
    sizes = [row.num_tokens(share_prefix=False) for row in rows]
    # Longest first; equal lengths in the order of their index, so that every rank gets the same micro-batches.
    order = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: (-sizes[i], i))
    empty = [row for row, size in zip(rows, sizes, strict=True) if not size]  # nothing trained: they cost nothing
    if not order:
        return [empty] if empty else []

    def cut(limit: int) -> list[list[int]]:
        """Consecutive rows, as many as fit. For sorted rows no other cut has fewer micro-batches."""
        batches: list[list[int]] = []
        for i in order:
            if batches and (len(batches[-1]) + 1) * sizes[batches[-1][0]] <= limit:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    limit = len(order) * sizes[order[0]]  # of one micro-batch with all rows
    limit = limit if max_tokens is None else min(max_tokens, limit)
    num = min(max(len(cut(limit)), min_batches), len(order))
    # The smallest limit with that many micro-batches makes them similar in size.
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= num else (middle + 1, high)
    batches = cut(high)
    # Rows of equal length can jump over the wanted number: halve the longest.
    while len(batches) < num:
        most = max(range(len(batches)), key=lambda b: len(batches[b]))
        half = len(batches[most]) // 2
        batches[most : most + 1] = [batches[most][:half], batches[most][half:]]
    made = [[rows[i] for i in batch] for batch in batches]
    return [*made[:-1], made[-1] + empty]


def split_over_ranks(items: Sequence[PackItem], num: int, *, layout: Layout = "shared") -> list[list[PackItem]]:
    """The items in `num` parts, one per rank, with the largest part as small as possible; some may be empty.

    A group above the mean size of a part is cut, its prompt repeated in each piece, if that makes the largest part
    smaller. It stays whole if the repeated prompts cost more. A pure function of the arguments, so every rank computes
    the same parts.
    """
    share_prefix = layout == "shared"
    if layout == "padded":
        # Nothing ties the sequences of a group together. Every rank gets rows of all lengths, long ones first.
        items = single_sequences(items)
    share = -(-sum(item.num_tokens(share_prefix=share_prefix) for item in items) // num)
    best: tuple[int, list[list[PackItem]]] | None = None
    # Try finer and finer cuts of large groups. Each cut repeats prompts, so it must be better by a margin.
    for num_pieces in range(1, num + 1):
        pieces = [piece for item in items for piece in _pieces(item, num_pieces, share, share_prefix)]
        sizes = [piece.num_tokens(share_prefix=share_prefix) for piece in pieces]
        bins = _balance(sizes, num, sum(sizes))
        assert bins is not None  # the limit is the sum
        largest = max(sum(sizes[i] for i in chosen) for chosen in bins)
        if best is None or largest < _WORTH * best[0]:
            best = largest, [[pieces[i] for i in chosen] for chosen in bins]
    assert best is not None
    return best[1]


def _pieces(item: PackItem, num: int, share: int, share_prefix: bool) -> list[PackItem]:
    """The item, or, if it has more than `share` tokens, its completions in `num` pieces of similar size."""
    together = _together(item, share, share_prefix)
    # A piece without trained tokens would be empty.
    num = min(num, sum(any(c.is_trained for c in family) for family in together))
    if num < 2 or item.num_tokens(share_prefix=share_prefix) <= share:
        return [item]
    each = [_cost(family, 0 if share_prefix else len(item.prompt), share_prefix) for family in together]
    bins = _balance(each, num, sum(each))
    assert bins is not None
    return [replace(item, completions=tuple(c for i in chosen for c in together[i])) for chosen in bins if chosen]


def _together(item: PackItem, room: int, share_prefix: bool) -> list[list[Completion]]:
    """The units that a cut keeps together: families that fit into `room`, else single completions."""
    if not share_prefix:
        return [[c] for c in item.completions]
    together = families(item.completions)
    return [part for f in together for part in ([f] if _cost(f, 0, True) <= room else [[c] for c in f])]


def _cost(family: Sequence[Completion], num_prompt: int, share_prefix: bool) -> int:
    """Input tokens of a family, plus `num_prompt` for each of its trained completions."""
    trained = [c for c in family if c.is_trained]
    if share_prefix and trained:
        return len(trained) * num_prompt + num_inputs_of(trained)
    return sum(num_prompt + c.num_inputs for c in trained)


def _balance(sizes: Sequence[int], num: int, limit: int) -> list[list[int]] | None:
    """Largest first into the least loaded of `num` bins; None if a bin with more than one piece exceeds `limit`."""
    bins: list[list[int]] = [[] for _ in range(num)]
    loads = [0] * num
    # Equal sizes in the order of their index, so that every rank gets the same bins.
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        b = loads.index(min(loads))
        # A piece that exceeds the limit alone is accepted: it cannot be cut further.
        if loads[b] and sizes[i] and loads[b] + sizes[i] > limit:
            return None
        bins[b].append(i)
        loads[b] += sizes[i]
    return [sorted(chosen) for chosen in bins]


def _cut(item: PackItem, max_tokens: int | None, share_prefix: bool) -> list[PackItem]:
    """The item, or the smallest number of parts of similar size that fit."""
    num_prompt = len(item.prompt)
    total = item.num_tokens(share_prefix=share_prefix)
    if max_tokens is None or total <= max_tokens or len(item.completions) < 2:
        return [item]
    together = _together(item, max_tokens - num_prompt, share_prefix)
    # A part contains its prompt once (shared) or once per completion (plain).
    each = [_cost(family, 0 if share_prefix else num_prompt, share_prefix) for family in together]
    room = max(1, max_tokens - (num_prompt if share_prefix else 0))
    num = max(2, -(-sum(each) // room))
    trained = sum(any(c.is_trained for c in family) for family in together)
    # The loop ends at the latest with one trained unit per part.
    while (parts := _balance(each, min(num, trained), room)) is None:
        num += 1
    return [replace(item, completions=tuple(c for i in part for c in together[i])) for part in parts if part]
