"""Expert routes of a mixture of experts in one training step: recorded, replayed if configured, and compared.

π_old's routes are those of the forward pass before the first update, or the sampler's if its log-probs are used as
π_old. Two changes are measured at the positions that predict a trained token, each as the fraction of (token, layer)
pairs whose *set* of experts differs: π_θ against π_old (mini-batches 2…K), and trainer against sampler at equal weights
(mini-batch 1 and recomputed ones). Under replay these metrics count the expert changes that replay suppressed.

Replay (actor.routing_replay) covers every input token of a pass, the prompt included. `proximal` gives mini-batches
2…K the routes of π_old's own forward pass (mini-batch 1 is that pass). `rollout` gives the sampler's routes to every
pass, π_old's included; a shared prompt takes those of the group's first sequence in the micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.errors import RolloutError
from gspo.learner.credit import Batch
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Packed
from gspo.models import UNKNOWN, RouteRecorder, route_shape, routed, routers, routes_mismatch

Replay = Literal["none", "proximal", "rollout"]
Floats = NDArray[np.float64]


class Routing:
    """Records and replays the routes of one step's passes; does nothing for a dense model."""

    def __init__(self, policy: PolicyModule, batch: Batch, replay: Replay) -> None:
        self._routers, self._batch, self._replay = routers(policy.model), batch, replay
        self._proximal: dict[Packed, NDArray[Any]] = {}  # π_old's routes, [N, layers, top_k] per micro-batch
        shape = batch.num_sequences, len(self._routers)
        # (π_θ against π_old [n, layers], the same in any layer [n], trainer against sampler [n, layers]).
        # Filled as passes end; NaN where nothing was compared.
        self.flips = np.full(shape, np.nan), np.full(shape[0], np.nan), np.full(shape, np.nan)
        if replay == "rollout" and any(s.extras.routes is None for s in batch.samples if s.mask.any()):
            raise RolloutError(
                "actor.routing_replay: rollout needs the sampler's routes, but samples have none; sample in process "
                "(rollout.backend: auto), or set actor.routing_replay: proximal"
            )

    @property
    def has_routers(self) -> bool:
        return bool(self._routers)

    def at_start(self, packed: Packed) -> contextlib.AbstractContextManager[None]:
        """Context of a forward pass with the weights at the start of the batch."""
        return self._around(packed, self._keep)

    def in_minibatch(self, packed: Packed, k: int) -> contextlib.AbstractContextManager[None]:
        """Context of the trained forward pass of mini-batch k; it must end before the backward pass."""
        return self._around(packed, self._against_sampler if k == 0 else self._against_start)

    @contextlib.contextmanager
    def _around(self, packed: Packed, then: Callable[[Packed, RouteRecorder, NDArray[Any]], None]) -> Iterator[None]:
        # The tokens of a filler belong to no sequence.
        if not self._routers or packed.is_filler:
            yield
            return
        sampled = self._sampled(packed)
        with routed(self._routers, self._given(packed, sampled)) as recorder:
            yield
        then(packed, recorder, sampled)

    def _keep(self, packed: Packed, recorder: RouteRecorder, sampled: NDArray[Any]) -> None:
        self._proximal[packed] = recorder.routes()
        self._against_sampler(packed, recorder, sampled)

    def _against_start(self, packed: Packed, recorder: RouteRecorder, sampled: NDArray[Any]) -> None:
        # The routers' own choices: under replay the experts in use are given and never differ. Without a recomputed
        # π_old, the sampler's routes are π_old's.
        index = packed.index.cpu().numpy()
        self.flips[0][index], self.flips[1][index] = _flips(
            packed, recorder.own_routes(), self._proximal.get(packed, sampled)
        )

    def _given(self, packed: Packed, sampled: NDArray[Any]) -> torch.Tensor | None:
        # `proximal` has nothing to replay in the passes that define π_old's routes. A `Packed` is a key by identity:
        # π_old's pass and the training pass use the same object.
        if self._replay == "none" or (self._replay == "proximal" and packed not in self._proximal):
            return None
        given = sampled if self._replay == "rollout" else self._proximal[packed].astype(np.int64)
        return torch.from_numpy(given).to(packed.tokens.device)

    def _against_sampler(self, packed: Packed, recorder: RouteRecorder, sampled: NDArray[Any]) -> None:
        self.flips[2][packed.index.cpu().numpy()], _ = _flips(packed, recorder.own_routes(), sampled)

    def _sampled(self, packed: Packed) -> NDArray[np.int64]:
        """The sampler's routes of a micro-batch's input tokens, [N, layers, top_k]."""
        sampled = [self._batch.samples[i].extras.routes for i in packed.index.tolist()]
        by_position = [None if routes is None else routes.inputs for routes in sampled]
        return routes_in_row(packed, by_position, route_shape(self._routers)[:2])


def routes_in_row(
    packed: Packed, by_position: Sequence[NDArray[Any] | None], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Routes of sequences, by position in prompt + completion, laid out like a micro-batch's input tokens: [N, *shape].

    UNKNOWN where a sequence has none. A segment that several sequences share takes those of the first.
    """
    out = np.full((packed.num_tokens, *shape), UNKNOWN, dtype=np.int64)
    start, length, parent, source, cuts, positions = (
        x.cpu().numpy()
        for x in (packed.start, packed.length, packed.parent, packed.source, packed.cu_seqlens, packed.positions)
    )
    segment_of = np.repeat(np.arange(len(start)), length)  # [N]
    # Backwards, so that the first sequence writes last and its routes stay in shared segments.
    for b in reversed(range(len(by_position))):
        routes = by_position[b]
        if routes is None or cuts[b] == cuts[b + 1]:  # no routes, or no targets
            continue
        # The source of the last target is the last input of the sequence, so it is in the deepest segment.
        segment = int(segment_of[source[cuts[b + 1] - 1]])
        while segment >= 0:  # from the last input position up to the root of its tree
            here = slice(start[segment], start[segment] + length[segment])
            out[here] = routes[positions[here]]
            segment = int(parent[segment])
    return out


def _flips(packed: Packed, routes: NDArray[Any], others: NDArray[Any]) -> tuple[Floats, Floats]:
    """Per sequence the fraction of trained tokens whose route differs, [B, layers], and in any layer, [B]."""
    source, cuts = packed.source.cpu().numpy(), packed.cu_seqlens.cpu().numpy()
    changed = routes_mismatch(routes[source], others[source])  # [M, layers]
    known = np.asarray((others[source] >= 0).all(-1))  # [M, layers]
    flips, tokens = np.full((len(cuts) - 1, changed.shape[1]), np.nan), np.full(len(cuts) - 1, np.nan)
    for b, (begin, end) in enumerate(pairwise(cuts.tolist())):
        # Sequences with unknown routes stay NaN: a fraction of a part would not be comparable.
        if end > begin and known[begin:end].all():
            flips[b], tokens[b] = changed[begin:end].mean(0), changed[begin:end].any(1).mean()
    return flips, tokens
