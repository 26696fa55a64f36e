"""Split a mini-batch into micro-batches and over ranks: pure functions, so that every rank computes the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gspo.errors import DataError
from gspo.learner.policy.packing import Completion, Layout, PackItem, families, num_inputs_of

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
            # The first row of a micro-batch is its longest.
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
    # The mean size of a part, rounded up.
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
    # Tokens left for completions in a part, after its prompt.
    room = max(1, max_tokens - (num_prompt if share_prefix else 0))
    num = max(2, -(-sum(each) // room))
    trained = sum(any(c.is_trained for c in family) for family in together)
    # The loop ends at the latest with one trained unit per part.
    while (parts := _balance(each, min(num, trained), room)) is None:
        num += 1
    return [replace(item, completions=tuple(c for i in part for c in together[i])) for part in parts if part]
