"""The interface of a stepper, and the one of continuous batching: rows of any length in one packed forward.

A stepper computes the logits of the next token of every running row, in its own way: `packed.py` stores keys and values
itself, `by_length.py` uses transformers' caches or none. The scheduler owns requests, draws and stop rules.

`PackedStepper` serves models whose only state between tokens is keys and values of attention that goes through
transformers' attention interface (`attention.py`). A row that an episode will probably continue is kept: its own keys
and values are appended to those of its prompt, and the next turn, whose prompt begins with these tokens, computes only
its new ones.

Shapes: N tokens of a forward, V vocabulary, P prompt tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo.errors import RolloutError
from gspo.models import routed
from gspo.sampling.local.attention import DecodePlan, ExtendPlan, Grid, KVStore, Plan, PrefillPlan, active, make_grid
from gspo.sampling.local.rows import Rows
from gspo.types import PromptKey, Request, Sample, Shown

if TYPE_CHECKING:
    from gspo.models import Placement, Vision


@dataclass(slots=True)
class StoredPrompt:
    """A prompt that was computed once for all of its rows."""

    logits: Tensor  # [V] at its last token; the first token of every row is drawn from them
    routes: NDArray | None  # [P, layers, top_k] experts of its positions; None for a dense model
    slot: int = 0  # `packed`: its group slot
    delta: int = 0  # `packed`: rotary position of the first token after it, minus its length
    cache: Any = None  # `by_length`: the cache that holds it
    index: int = 0  # `by_length`: its row in that cache


def first_of_each(requests: Iterable[Request]) -> list[Request]:
    """One request for each prompt, in order of first appearance."""
    found: dict[PromptKey, Request] = {}
    for request in requests:
        found.setdefault(request.key, request)
    return list(found.values())


@dataclass(slots=True)
class KeptRow:
    """The keys and values of an episode's last turn, for its next one."""

    tokens: tuple[int, ...]  # whose keys and values are stored: prompt and completion without the last token
    slot: int  # its group slot
    routes: NDArray | None  # [len(tokens), layers, top_k]; None for a dense model


class Finished(NamedTuple):
    """A row that has just finished; the table of rows still holds its tokens."""

    slot: int
    request: Request
    sample: Sample


class Step(NamedTuple):
    """The result of one token: N rows."""

    slots: NDArray  # [N] row slots
    logits: Tensor  # [N, V]
    routes: NDArray | None  # [N, layers, top_k]


class Stepper(Protocol):
    """The state of a stepper belongs to one table of rows; a new table gets a new stepper."""

    prompts: dict[PromptKey, StoredPrompt]
    kept: dict[tuple[int, int], KeptRow]  # by (submission, sample)

    def prefill(self, requests: Sequence[Request]) -> None:
        """Compute the prompts of these requests that are needed and not stored yet; use up the rows kept for them."""
        ...

    def join(self, slots: NDArray) -> None:
        """These rows run from now on. Those that continue have tokens already."""
        ...

    def step(self) -> Step:
        """Feed the last token of every running row."""
        ...

    def keep(self, finished: Sequence[Finished], dropped: Sequence[PromptKey]) -> None:
        """Keep these rows in `kept`, if the stepper can. No request needs the dropped prompts any more."""
        ...

    def leave(self, slots: NDArray, moves: tuple[list[int], list[int]], dropped: Sequence[PromptKey]) -> None:
        """These rows are finished; then rows moved (from, to) in the table; no request needs the dropped prompts."""
        ...

    def num_bytes(self) -> int: ...


class Engine(NamedTuple):
    """A stepper that may be chosen for a model."""

    name: str
    attention: str  # the attention implementation while it runs
    start: Callable[[Rows, Counter[str]], Stepper]  # for a table of rows; counts what it computes
    is_packed: bool = False  # a forward is one sequence [1, tokens]


class PackedStepper:
    """Implements `Stepper`. `prefill_tokens`: most tokens of a prefill with more than one sequence."""

    def __init__(
        self,
        model: Any,
        routers: Sequence[nn.Module],
        prefill_tokens: int,
        vision: Vision | None,
        rows: Rows,
        counts: Counter[str],
    ) -> None:
        self._model, self._routers, self._prefill_tokens = model, routers, prefill_tokens
        self._vision = vision
        self._rows, self._counts = rows, counts
        self.prompts: dict[PromptKey, StoredPrompt] = {}
        self.kept: dict[tuple[int, int], KeptRow] = {}
        self.store = KVStore()
        self._grid: Grid | None = None
        self._routes: NDArray | None = None  # [N, layers, top_k] of the last forward

    def num_bytes(self) -> int:
        return self.store.num_bytes()

    def _forward(
        self, tokens: NDArray, positions: NDArray, plan: Plan, keep: int | Tensor, images: Any = None
    ) -> Tensor:
        """Logits [kept, V] of one packed forward of tokens [N] at positions [N]; `keep`: which of them get logits.

        Prompts with images have their tower's output, and may have positions [1 or 3, N].
        """
        device = self._model.device
        at = torch.from_numpy(positions.astype(np.int64)).to(device)
        more = {} if images is None else {"mm_encoder_outputs": {"image": images}}
        with active(self.store, plan), routed(self._routers) if self._routers else nullcontext() as recorder:
            output = self._model(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
                position_ids=at[None] if at.dim() == 1 else at[:, None] if len(at) > 1 else at,
                use_cache=False,
                logits_to_keep=keep,
                **more,
            )
        self._routes = None if recorder is None else recorder.routes()
        return output.logits[0]  # [kept, V]

    def prefill(self, requests: Sequence[Request]) -> None:
        """Store keys and values of whole prompts, several per forward; logits only at their last positions."""
        kept = self._take_kept(requests)
        new = first_of_each(r for r in requests if r.key not in self.prompts)
        if not new:
            return
        # Sorted: `PrefillPlan` needs equal lengths next to each other.
        fresh = sorted((r for r in new if r.key not in kept), key=lambda r: len(r.prompt))
        slots = self._free_slots(len(fresh), {row.slot for row in kept.values()})
        self.store.reserve(groups=max(slots, default=-1) + 1, prompt_len=max(len(r.prompt) for r in new))
        self._prefill([(r, KeptRow((), slot, None)) for r, slot in zip(fresh, slots, strict=True)])
        continued = [(r, kept[r.key]) for r in new if r.key in kept]
        self._prefill(sorted(continued, key=lambda item: (len(item[0].prompt) - len(item[1].tokens), item[1].slot)))
        self._check_windows()

    def _take_kept(self, requests: Sequence[Request]) -> dict[PromptKey, KeptRow]:
        """For each prompt that continues a kept row: that row. Other rows of these episodes are dropped."""
        found: dict[PromptKey, KeptRow] = {}
        for request in requests:
            row = self.kept.pop((request.id.submission, request.id.sample), None)
            if row is None or request.shown is not None or request.key in self.prompts:
                continue
            # The row must be shorter: the logits of the prompt's last token are needed.
            if len(row.tokens) < len(request.prompt) and request.prompt[: len(row.tokens)] == row.tokens:
                found.setdefault(request.key, row)
        return found

    def _free_slots(self, num: int, taken: Collection[int] = ()) -> list[int]:
        """The lowest free group slots."""
        used = {*taken, *(g.slot for g in self.prompts.values()), *(row.slot for row in self.kept.values())}
        return [slot for slot in range(len(used) + num) if slot not in used][:num]

    def _prefill(self, items: Sequence[tuple[Request, KeptRow]]) -> None:
        """Compute prompts from where their stored rows end; sorted by the number of new tokens, all stored or none."""
        items = list(items)
        while items:
            # Each forward takes at least one prompt, and more of them up to the limit of tokens.
            num, total = 0, 0
            while num < len(items):
                new = len(items[num][0].prompt) - len(items[num][1].tokens)
                if num and total + new > self._prefill_tokens:
                    break
                num, total = num + 1, total + new
            part, items = items[:num], items[num:]
            begins = np.array([len(row.tokens) for _, row in part])
            lengths = np.array([len(r.prompt) for r, _ in part]) - begins
            ends = np.cumsum(lengths)  # [prompts]
            # One run per distinct length: (first token, number of prompts, length).
            values, first, counts = np.unique(lengths, return_index=True, return_counts=True)
            runs = [(int(ends[i] - lengths[i]), int(c), int(n)) for n, i, c in zip(values, first, counts, strict=True)]
            tokens = np.concatenate([np.array(r.prompt[b:]) for (r, _), b in zip(part, begins, strict=True)])  # [N]
            positions = np.concatenate([b + np.arange(n) for b, n in zip(begins, lengths, strict=True)])  # [N]
            placed, images, deltas = self._images([r for r, _ in part], tokens, positions, lengths)
            logits = self._forward(
                tokens,
                positions if placed is None or placed.positions is None else placed.positions,
                PrefillPlan(
                    runs, [row.slot for _, row in part], begins if begins.any() else None, placed and placed.blocks
                ),
                torch.from_numpy(ends - 1).to(self._model.device),
                images,
            )
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += total
            # [new tokens, layers, top_k] per prompt
            routes = [None] * num if self._routes is None else np.split(self._routes, ends[:-1])
            for (request, row), last, chosen, delta in zip(part, logits, routes, deltas, strict=True):
                if chosen is not None and row.routes is not None:
                    chosen = np.concatenate([row.routes, chosen])  # [P, layers, top_k]
                self.prompts[request.key] = StoredPrompt(last, chosen, row.slot, delta)

    def _images(
        self, part: Sequence[Request], tokens: NDArray, positions: NDArray, lengths: NDArray
    ) -> tuple[Placement | None, Any, list[int]]:
        """Of the prompts of a prefill: where their images go, the tower's output, the shift of later positions.

        A prompt with images continues no kept row, so its tokens are whole.
        """
        row = Shown.of([r.shown for r in part], lengths)
        if row is None:
            return None, None, [0] * len(part)
        assert self._vision is not None  # the engine checks every request
        placed = self._vision.lay_out(tokens, positions, np.cumsum(lengths) - lengths, lengths, row)
        by_key = {prompt.key: self._vision.delta(prompt) for prompt in row.prompts}
        images = self._vision.encoder_output(row.prompts, placed)
        self._counts["prefill_images"] += len(row.prompts)
        return placed, images, [by_key.get(r.key, 0) for r in part]

    def _check_windows(self) -> None:
        """RolloutError if layers hide keys by a mask only: this engine makes its own mask, from the window it gets."""
        config = self._model.config.get_text_config()
        kinds, windows = getattr(config, "layer_types", None), self.store.windows
        if kinds:
            wrong = any((w is not None) != (kinds[i] == "sliding_attention") for i, w in windows.items())
        else:
            has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
            wrong = bool(has_window) and all(w is None for w in windows.values())
        if wrong:
            raise RolloutError("its layers do not pass their sliding window to the attention interface")

    def join(self, slots: NDArray) -> None:
        """Prefill the completion tokens of continued rows, except the last, which is their next input."""
        rows = self._rows
        for slot in slots:
            request = rows.requests[slot]
            assert request is not None
            stored = self.prompts[request.key]
            rows.group[slot], rows.delta[slot] = stored.slot, stored.delta
        self._grid = None  # the layout of groups has changed
        most = int(rows.count[slots].max())
        # Room for some tokens at once: the store grows by half, so starting from one token would mean many copies.
        self.store.reserve(rows=rows.used, own_len=max(most, min(int(rows.tokens.shape[1]), 32)))
        continued = [int(s) for s in slots if rows.count[s] > 1]
        while continued:
            segments, tokens, positions, start = [], [], [], 0
            while continued and (not segments or start + rows.count[continued[0]] <= self._prefill_tokens):
                slot = continued.pop(0)
                length, prompt_len = int(rows.count[slot]) - 1, int(rows.prompt_len[slot])
                segments.append((start, length, slot, int(rows.group[slot]), prompt_len))
                tokens.append(rows.tokens[slot, :length])
                positions.append(prompt_len + rows.delta[slot] + np.arange(length))
                start += length
            # The logits are not used. 1 keeps those of one position; 0 would keep all.
            self._forward(np.concatenate(tokens), np.concatenate(positions), ExtendPlan(segments), 1)
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += start

    def step(self) -> Step:
        rows, used = self._rows, self._rows.used
        living, alive = rows.living(), rows.alive[:used]
        # The grid is valid until rows join, leave or move.
        if self._grid is None:
            self._grid = make_grid(rows.group[:used], alive)
        count, prompt_len = rows.count[:used], rows.prompt_len[:used]  # [N] each
        # Free slots get the length of the longest row, so that they need no mask. Their output is not used.
        own_len = np.where(alive, count, count[living].max()) - 1  # [N] stored own tokens
        prompt_len = np.where(alive, prompt_len, prompt_len[living].max())  # [N]
        tokens = np.where(alive, rows.tokens[np.arange(used), own_len], 0)  # [N]
        self.store.reserve(own_len=int(own_len.max()) + 1)
        # `keep` 0: logits of every position.
        positions = prompt_len + own_len + rows.delta[:used]  # [N]
        logits = self._forward(tokens, positions, DecodePlan(self._grid, prompt_len, own_len), 0)  # [N, V]
        self._counts["decode_forwards"] += 1
        self._counts["decode_rows"] += used
        routes = None if self._routes is None else self._routes[living]
        logits = logits if len(living) == used else logits[torch.from_numpy(living).to(logits.device)]
        return Step(living, logits, routes)

    def keep(self, finished: Sequence[Finished], dropped: Sequence[PromptKey]) -> None:
        unused = set(dropped)
        copies: list[tuple[int, int]] = []  # group slots (from, to)
        ends: list[tuple[int, int, int, int]] = []  # (row slot, group slot, prompt tokens, own tokens)
        # One row per episode: of requests that finish together, the last.
        for episode, (slot, request, sample) in {
            (f.request.id.submission, f.request.id.sample): f for f in finished
        }.items():
            self.kept.pop(episode, None)
            # Without the experts of every position, the next turn could not report those of its prompt.
            if self._routers and sample.extras.routes is None:
                continue
            prompt = self.prompts[request.key]
            # One row takes over the group slot of a prompt that no request needs; other rows get a copy.
            if request.key in unused:
                unused.remove(request.key)
                target = prompt.slot
            else:
                target = self._free_slots(1)[0]
                copies.append((prompt.slot, target))
            # The last token was drawn and not fed: it has no keys and values.
            tokens = request.prompt + tuple(sample.tokens[:-1].tolist())
            routes = sample.extras.routes
            self.kept[episode] = KeptRow(tokens, target, None if routes is None else routes.inputs)
            ends.append((slot, target, len(request.prompt), len(sample.tokens) - 1))
        if ends:
            rows, groups, prompt_lens, own_lens = np.array(ends).T
            self.store.reserve(groups=int(groups.max()) + 1, prompt_len=int((prompt_lens + own_lens).max()))
            if copies:
                source, target = map(list, zip(*copies, strict=True))
                self.store.move(self.store.prompt, source, target, int(prompt_lens.max()))
            self.store.append_own(rows, groups, prompt_lens, own_lens)

    def leave(self, slots: NDArray, moves: tuple[list[int], list[int]], dropped: Sequence[PromptKey]) -> None:
        del slots  # a free slot needs no clearing: its keys are masked, and the next row overwrites them
        self._grid = None
        for prompt in dropped:
            del self.prompts[prompt]
        source, target = moves
        if source:
            self.store.move(self.store.own, source, target, int(self._rows.count[target].max()))
        self._compact_groups()

    def _compact_groups(self) -> None:
        """Compact the table of groups when half of it is empty: an empty group slot still costs a matrix product."""
        groups = sorted((*self.prompts.values(), *self.kept.values()), key=lambda g: g.slot)
        if not groups or groups[-1].slot + 1 < 2 * len(groups):
            return
        # Groups at slots ≥ len(groups) move into the holes below.
        holes = sorted(set(range(len(groups))) - {g.slot for g in groups})
        moving = [g for g in groups if g.slot >= len(groups)]
        source = [g.slot for g in moving]
        self.store.move(self.store.prompt, source, holes)
        new_slot = np.arange(max(source, default=0) + 1)  # new slot of each old slot
        new_slot[source] = holes
        for group, slot in zip(moving, holes, strict=True):
            group.slot = slot
        living = self._rows.living()
        self._rows.group[living] = new_slot[self._rows.group[living]] if len(moving) else self._rows.group[living]
