"""The stepper of continuous batching: rows of any length in one packed forward, with our own store of keys and values.

A prompt's keys and values are stored once for all rows of its group (`cache.py`). It serves models whose only state
between tokens is keys and values of attention that goes through transformers' attention interface.

Shapes: N tokens of a forward, V vocabulary, P prompt tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo.errors import RolloutError
from gspo.models.moe import routed
from gspo.sampling.local.cache import DecodePlan, ExtendPlan, Grid, KVStore, Plan, PrefillPlan, active, make_grid
from gspo.sampling.local.rows import Rows
from gspo.sampling.local.stepper import Step, StoredPrompt, first_of_each
from gspo.types import PromptKey, Request


class PackedStepper:
    """Implements `stepper.Stepper`. `prefill_tokens`: most tokens of a prefill with more than one sequence."""

    def __init__(
        self, model: Any, routers: Sequence[nn.Module], prefill_tokens: int, rows: Rows, counts: Counter[str]
    ) -> None:
        self._model, self._routers, self._prefill_tokens = model, routers, prefill_tokens
        self._rows, self._counts = rows, counts
        self.prompts: dict[PromptKey, StoredPrompt] = {}
        self.store = KVStore()
        self._grid: Grid | None = None
        self._routes: NDArray | None = None  # [N, layers, top_k] of the last forward

    def num_bytes(self) -> int:
        return self.store.num_bytes()

    def _forward(self, tokens: NDArray, positions: NDArray, plan: Plan, keep: int | Tensor) -> Tensor:
        """Logits [kept, V] of one packed forward of tokens [N] at positions [N]; `keep`: which of them get logits."""
        device = self._model.device
        with active(self.store, plan), routed(self._routers) if self._routers else nullcontext() as recorder:
            output = self._model(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
                position_ids=torch.from_numpy(positions.astype(np.int64))[None].to(device),
                use_cache=False,
                logits_to_keep=keep,
            )
        self._routes = None if recorder is None else recorder.routes()
        return output.logits[0]  # [kept, V]

    def prefill(self, requests: Sequence[Request]) -> None:
        """Store keys and values of whole prompts, several per forward; logits only at their last positions."""
        prompts = first_of_each(r for r in requests if r.key not in self.prompts)
        if not prompts:
            return
        # New prompts take the lowest free group slots.
        taken = {g.slot for g in self.prompts.values()}
        free = [slot for slot in range(len(taken) + len(prompts)) if slot not in taken]
        self.store.reserve(groups=max([*taken, *free]) + 1, prompt_len=max(len(r.prompt) for r in prompts))
        # `PrefillPlan` needs prompts of equal length next to each other.
        prompts = sorted(prompts, key=lambda r: len(r.prompt))
        while prompts:
            # Each forward takes at least one prompt, and more of them up to the limit of tokens.
            num, total = 1, len(prompts[0].prompt)
            while num < len(prompts) and total + len(prompts[num].prompt) <= self._prefill_tokens:
                total += len(prompts[num].prompt)
                num += 1
            part, prompts = prompts[:num], prompts[num:]
            slots, free = free[:num], free[num:]
            lengths = np.array([len(r.prompt) for r in part])
            ends = np.cumsum(lengths)  # [prompts]
            # One run per distinct length: (first token, number of prompts, length).
            values, first, counts = np.unique(lengths, return_index=True, return_counts=True)
            runs = [(int(ends[i] - lengths[i]), int(c), int(n)) for n, i, c in zip(values, first, counts, strict=True)]
            # Logits are computed at the last token of each prompt only.
            logits = self._forward(
                np.concatenate([np.array(r.prompt) for r in part]),
                np.concatenate([np.arange(n) for n in lengths]),
                PrefillPlan(runs, slots),
                torch.from_numpy(ends - 1).to(self._model.device),
            )
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += total
            # [P, layers, top_k] per prompt
            routes = [None] * num if self._routes is None else np.split(self._routes, ends[:-1])
            for request, slot, row, chosen in zip(part, slots, logits, routes, strict=True):
                self.prompts[request.key] = StoredPrompt(row, chosen, slot)
        self._check_windows()

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
            rows.group[slot] = self.prompts[request.key].slot
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
                positions.append(prompt_len + np.arange(length))
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
        logits = self._forward(tokens, prompt_len + own_len, DecodePlan(self._grid, prompt_len, own_len), 0)  # [N, V]
        self._counts["decode_forwards"] += 1
        self._counts["decode_rows"] += used
        routes = None if self._routes is None else self._routes[living]
        # Only running rows draw a token; padding slots do not.
        logits = logits if len(living) == used else logits[torch.from_numpy(living).to(logits.device)]
        return Step(living, logits, routes)

    def leave(self, slots: NDArray, moves: tuple[list[int], list[int]], dropped: Sequence[PromptKey]) -> None:
        del slots  # a free slot needs no clearing: its keys are masked, and the next row overwrites them
        self._grid = None
        for prompt in dropped:
            del self.prompts[prompt]
        source, target = moves
        if source:
            self.store.move_rows(source, target, int(self._rows.count[target].max()))
        self._compact_groups()

    def _compact_groups(self) -> None:
        """Compact the table of groups when half of it is empty: an empty group slot still costs a matrix product."""
        groups = sorted(self.prompts.values(), key=lambda g: g.slot)
        if not groups or groups[-1].slot + 1 < 2 * len(groups):
            return
        # Groups at slots ≥ len(groups) move into the holes below.
        holes = sorted(set(range(len(groups))) - {g.slot for g in groups})
        moving = [g for g in groups if g.slot >= len(groups)]
        source = [g.slot for g in moving]
        self.store.move_groups(source, holes)
        new_slot = np.arange(max(source, default=0) + 1)  # new slot of each old slot
        new_slot[source] = holes
        for group, slot in zip(moving, holes, strict=True):
            group.slot = slot
        living = self._rows.living()
        self._rows.group[living] = new_slot[self._rows.group[living]] if len(moving) else self._rows.group[living]
