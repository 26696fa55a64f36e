"""The table of running samples: one row slot each, with its tokens so far, as numpy columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.types import Extras, FinishReason, Kept, Request, Routes, Sample


class Rows:
    """One row slot per running sample. Slots 0…`used`−1 are part of a forward; free ones among them are padding.

    The last token of a row is the input of the next forward: a row with `count` tokens has `count − 1` stored keys.
    """

    def __init__(self, multiple: int, route: tuple[int, int, Any] = (0, 0, np.uint8)) -> None:
        self.multiple = multiple  # `used` is a multiple of it, to limit the number of matrix shapes
        self.used = 0
        self.requests: list[Request | None] = []
        # One entry per row slot: [R]. Below, one entry per slot and token: [R, T].
        self.alive = np.zeros(0, dtype=np.bool_)
        self.group = np.zeros(0, dtype=np.int64)  # group slot of its prompt (`packed` only)
        self.prompt_len = np.zeros(0, dtype=np.int64)
        self.delta = np.zeros(0, dtype=np.int64)  # rotary position minus number of tokens before; 0 without images
        self.count = np.zeros(0, dtype=np.int64)  # completion tokens, a prefix included
        self.rule = np.zeros(0, dtype=np.int64)  # index of its sampling rule
        self.key = np.zeros((0, 4), dtype=np.int64)  # submission, sample, turn, attempt
        self.tokens = np.zeros((0, 0), dtype=np.int32)  # [R, T]
        self.logp = np.zeros((0, 0), dtype=np.float32)  # [R, T]
        self.versions = np.zeros((0, 0), dtype=np.int32)  # [R, T]
        # [R, T, layers, top_k] experts at the position that predicted each token; empty for a dense model.
        self.routes: NDArray[Any] = np.zeros((0, 0, *route[:2]), dtype=route[2])
        self.kept: list[list[NDArray[np.int32]]] = []  # per slot: the kept set of each token; empty if not recorded

    _COLUMNS = ("alive", "group", "prompt_len", "delta", "count", "rule", "key", "tokens", "logp", "versions", "routes")

    def living(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.alive[: self.used])

    def padded(self, num: int) -> int:
        return -(-num // self.multiple) * self.multiple

    def reserve(self, rows: int, length: int) -> None:
        rows, have, width = self.padded(rows), len(self.alive), self.tokens.shape[1]
        if length > width:
            # At least by half, so that the number of copies stays small.
            length = max(length, width + width // 2)
            for name in ("tokens", "logp", "versions", "routes"):
                column = getattr(self, name)
                setattr(self, name, np.pad(column, ((0, 0), (0, length - width), *((0, 0),) * (column.ndim - 2))))
        if rows > have:
            for name in self._COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.pad(column, ((0, rows - have), *((0, 0),) * (column.ndim - 1))))
            self.requests += [None] * (rows - have)
            self.kept += [[] for _ in range(rows - have)]

    def join(self, requests: list[Request], rules: list[int]) -> NDArray[np.int64]:
        """Put requests into free slots, lowest first. A prefix becomes the first tokens of its row."""
        # Each row gets room for its longest completion, so `append` never has to grow the table.
        self.reserve(int(self.alive.sum()) + len(requests), max(r.params.max_new_tokens for r in requests))
        slots = np.flatnonzero(~self.alive)[: len(requests)]
        for slot, request in zip(slots, requests, strict=True):
            self.requests[slot], self.kept[slot] = request, []
            if request.prefix is not None:
                num = len(request.prefix.tokens)
                self.tokens[slot, :num] = request.prefix.tokens
                self.logp[slot, :num] = request.prefix.behavior_logp
                self.versions[slot, :num] = request.prefix.versions
                before = request.prefix.extras
                if before.routes is not None:
                    self.routes[slot, :num] = before.routes.own
                if request.params.record_kept:
                    self.kept[slot] = (before.kept or Kept.whole(num)).sets()
        self.alive[slots] = True
        self.rule[slots] = rules
        self.prompt_len[slots], self.delta[slots] = [len(r.prompt) for r in requests], 0
        self.count[slots] = [0 if r.prefix is None else len(r.prefix.tokens) for r in requests]
        self.key[slots] = [(r.id.submission, r.id.sample, r.id.turn, r.id.attempt) for r in requests]
        self.used = max(self.used, self.padded(int(slots[-1]) + 1))
        return slots

    def append(
        self, slots: NDArray[np.int64], tokens: NDArray, logp: NDArray, version: int, routes: NDArray | None = None
    ) -> None:
        at = self.count[slots]  # [rows] index of the new token
        self.tokens[slots, at], self.logp[slots, at], self.versions[slots, at] = tokens, logp, version
        if routes is not None:
            self.routes[slots, at] = routes
        self.count[slots] = at + 1

    def keep(self, slots: NDArray[np.int64], sets: list[NDArray[np.int32]]) -> None:
        """Record the kept sets of the tokens that `append` gets next."""
        for slot, ids in zip(slots, sets, strict=True):
            self.kept[slot].append(ids)

    def take(self, slot: int, finish: FinishReason, prompt_routes: NDArray[Any] | None) -> Sample:
        """The sample of a row with its tokens so far; the slot is free afterwards."""
        request, num = self.requests[slot], int(self.count[slot])
        assert request is not None
        self.requests[slot], self.alive[slot] = None, False
        # New tokens are trained on and belong to the request's turn; those of a prefix keep their own values.
        mask, turns = np.ones(num, dtype=np.bool_), np.full(num, request.id.turn, dtype=np.int16)
        if request.prefix is not None:
            kept = len(request.prefix.tokens)
            mask[:kept], turns[:kept] = request.prefix.mask, request.prefix.turns
            if kept:  # tokens of earlier weights keep their routes, or have none
                prompt_routes = (before := request.prefix.extras.routes) and before.prompt
        # Copies: another row will reuse this slot.
        tokens, logp = self.tokens[slot, :num].copy(), self.logp[slot, :num].copy()
        versions = self.versions[slot, :num].copy()
        sets, self.kept[slot] = self.kept[slot], []
        # A row whose logits were not finite has a set without a token.
        kept = Kept.of(sets[:num]) if request.params.record_kept else None
        routes = None if prompt_routes is None else Routes(prompt_routes, self.routes[slot, :num].copy())
        return Sample(request.id, tokens, logp, versions, mask, turns, finish, Extras(routes, kept))

    def compact(self) -> tuple[list[int], list[int]]:
        """If fewer slots suffice, move the last rows into the first free slots. Returns the moves as (from, to)."""
        living = self.living()
        used = self.padded(len(living))
        if used >= self.used:
            return [], []
        # Rows beyond the new end of the table move into free slots below it.
        source = living[living >= used]
        target = np.flatnonzero(~self.alive[:used])[: len(source)]
        for name in self._COLUMNS:
            column = getattr(self, name)
            column[target] = column[source]
        self.alive[source] = False
        for i, j in zip(source, target, strict=True):
            self.requests[j], self.requests[i] = self.requests[i], None
            self.kept[j], self.kept[i] = self.kept[i], []
        self.used = used
        return source.tolist(), target.tolist()
