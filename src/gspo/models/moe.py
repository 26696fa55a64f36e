"""Mixture of experts: record which experts a forward pass chose, and replay given ones.

A *route* is the top-k experts that one router chose for one input token. The routes of a pass are [N, layers, top_k]:
N input tokens in the order in which they enter the model, and the layers that have experts, in the model's order. Only
indices are stored.

Forward hooks on the routers record one pass (`routed`). A replayed pass keeps the router's own logits and computes the
scores of the given experts from them with the router's own formula. So the gradient reaches the router as before, and
replaying a pass's own routes changes no bit. The formula (renormalised or not, softmax before or after the choice) is
found by comparison with the router's first output, not read from its config. No load-balancing loss is added:
transformers adds one only to its own `labels=` loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo.errors import DataError

# Routers that return (logits, scores, indices); a test covers each. Other mixtures train without recording.
RECORDABLE = frozenset(
    f"{family}TopKRouter"
    for family in (
        *("Qwen3Moe", "Mixtral", "Olmoe", "Qwen2Moe", "FlexOlmo", "GptOss"),
        *("Qwen3Next", "Qwen3_5Moe", "MiniMax", "Jamba", "GraniteMoeHybrid"),
    )
)
UNKNOWN = -1  # no route is given for this row: the router chooses

# From logits [N, E] and experts [N, k] to scores [N, k].
Form = Callable[[Tensor, Tensor], Tensor]


def routers(model: nn.Module) -> list[nn.Module]:
    """The recordable routers of a model in the order of its layers; empty for a dense model."""
    return [module for module in model.modules() if type(module).__name__ in RECORDABLE]


def route_shape(routers: Sequence[nn.Module]) -> tuple[int, int, Any]:
    """(layers, experts per token, smallest dtype for an expert's index); (0, 0, …) for a dense model."""
    most = max((_size(router, "top_k") for router in routers), default=0)
    return len(routers), most, np.uint8 if num_experts(routers) <= 256 else np.int16


def num_experts(routers: Sequence[nn.Module]) -> int:
    """Number of experts of the largest layer."""
    return max((_size(router, "num_experts") for router in routers), default=0)


def _size(router: nn.Module, name: str) -> int:
    return int(getattr(router, name))


class RouteRecorder:
    """The routes of one forward pass, recorded while it runs."""

    def __init__(self, routers: Sequence[nn.Module], replay: Tensor | None) -> None:
        self.routers, self.replay = routers, replay
        self.chosen: list[Tensor] = [torch.empty(0)] * len(routers)  # the router's own choice, [N, k] per layer
        self.used: list[Tensor] = [torch.empty(0)] * len(routers)  # the same, or the replayed experts
        self.at: Tensor | None = None  # [N] where the tokens are among the router's rows, if those have padding

    def own_routes(self) -> NDArray[Any]:
        """[N, layers, top_k] the routers' own choices; uint8 if it can hold every index, else int16."""
        return self._array(self.chosen)

    def routes(self) -> NDArray[Any]:
        """[N, layers, top_k] the experts that were used."""
        return self._array(self.used)

    def _array(self, by_layer: list[Tensor]) -> NDArray[Any]:
        rows = torch.stack(by_layer, 1)  # [rows, layers, k]
        rows = rows if self.at is None else rows.index_select(0, self.at)
        return rows.cpu().numpy().astype(route_shape(self.routers)[2])

    def _choose(self, layer: int, router: nn.Module, _: Any, output: Any) -> Any:
        used = chosen = output[2]  # [N, k]
        if self.replay is not None:
            given = self.replay[:, layer]  # [N, k]
            if self.at is not None:
                # The router chooses for the padding, whose result is not used.
                given = torch.full_like(chosen, UNKNOWN).index_copy_(0, self.at, given.to(chosen.dtype))  # [rows, k]
            if given.shape != chosen.shape:
                raise ValueError(
                    f"replayed routes have shape {tuple(given.shape)}, but the router chose {tuple(chosen.shape)}"
                )
            used = torch.where(given < 0, chosen, given.to(chosen.dtype))
        self.chosen[layer], self.used[layer] = chosen.detach(), used
        # A hook that returns None keeps the router's output. With gradients the scores are computed here, so that a
        # recomputed layer has the same graph.
        if self.replay is None and not torch.is_grad_enabled():
            return None
        return _scored(router, output, used, must=self.replay is not None)

    def _again(self, layer: int, router: nn.Module, _: Any, output: Any) -> Any:
        return _scored(router, output, self.used[layer], must=self.replay is not None)

    @contextlib.contextmanager
    def hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        # Hooks only while the block runs: the sampler can share this model.
        handles = [r.register_forward_hook(partial(hook, layer)) for layer, r in enumerate(self.routers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_ACTIVE: ContextVar[RouteRecorder | None] = ContextVar("routing recorder", default=None)


@contextlib.contextmanager
def routed(routers: Sequence[nn.Module], replay: Tensor | None = None) -> Iterator[RouteRecorder]:
    """Record the one forward pass inside; with `replay` [N, layers, top_k] it uses those experts.

    For rows of UNKNOWN the router chooses. A pass with gradients always computes its scores by the replay formula, so
    that gradient checkpointing recomputes (`recomputing`) the same graph with the same experts.
    """
    recorder = RouteRecorder(routers, replay)
    before = _ACTIVE.set(recorder)
    try:
        with recorder.hooked(recorder._choose):
            yield recorder
    finally:
        _ACTIVE.reset(before)


@contextlib.contextmanager
def padded_routes(at: Tensor) -> Iterator[None]:
    """The recorded pass has padded rows: its N tokens are at `at` [N] among the rows that a router sees."""
    recorder = _ACTIVE.get()
    if recorder is not None:
        recorder.at = at
    yield


def recomputing() -> contextlib.AbstractContextManager[None]:
    """Context in which gradient checkpointing recomputes a layer: it uses the experts of the current pass."""
    recorder = _ACTIVE.get()
    return contextlib.nullcontext() if recorder is None else recorder.hooked(recorder._again)


def check_replay(model: Any) -> None:
    """DataError if routes cannot be replayed on this model; runs the model on two tokens."""
    found = routers(model)
    if not found:
        raise DataError(
            f"actor.routing_replay: {type(model).__name__} has no router that can be replayed (known: "
            f"{', '.join(sorted(RECORDABLE))}); set actor.routing_replay: none"
        )
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad(), routed(found) as recorder:
        model(input_ids=tokens, use_cache=False)
    # A second pass with its own routes: it raises if the score formula of a router is unknown.
    own = torch.from_numpy(recorder.routes().astype(np.int64)).to(model.device)
    with torch.no_grad(), routed(found, own):
        model(input_ids=tokens, use_cache=False)


def routes_mismatch(routes: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether two routes are different sets of experts, [..., top_k] → [...]; the order inside does not matter.

    >>> routes_mismatch(np.array([[0, 3], [1, 2]]), np.array([[3, 0], [1, 4]])).tolist()
    [False, True]
    """
    return (np.sort(routes, -1).astype(np.int16) != np.sort(others, -1).astype(np.int16)).any(-1)


def _softmax(logits: Tensor, at: Tensor) -> Tensor:
    # In float32, as all of these routers compute it, even in a float64 model.
    return torch.softmax(logits, -1, dtype=torch.float32).gather(-1, at)


def _renormalised(logits: Tensor, at: Tensor) -> Tensor:
    scores = _softmax(logits, at)
    return scores / scores.sum(-1, keepdim=True)


def _softmax_after(logits: Tensor, at: Tensor) -> Tensor:
    # Softmax over the chosen logits only: the scores sum to 1.
    return torch.softmax(logits.gather(-1, at), -1)


_FORMS: tuple[Form, ...] = (_renormalised, _softmax, _softmax_after)
# Found once per router. Weak keys: an entry does not keep a deleted model in memory.
_FORM_OF: WeakKeyDictionary[nn.Module, Form | None] = WeakKeyDictionary()


def _scored(router: nn.Module, output: tuple[Tensor, Tensor, Tensor], used: Tensor, *, must: bool) -> Any:
    """The router's output with the experts `used` [N, k], and their scores from its differentiable logits [N, E]."""
    logits, scores, chosen = output
    if router not in _FORM_OF:
        # Equal in every bit: replaying a pass's own routes must not change its result.
        with torch.no_grad():
            same = [f for f in _FORMS if torch.equal(f(logits, chosen).to(scores.dtype), scores)]
        _FORM_OF[router] = same[0] if same else None
    form = _FORM_OF[router]
    if form is None:
        if must:
            raise DataError(
                f"actor.routing_replay: {type(router).__name__} computes its scores in a way that replay cannot "
                "reproduce; set actor.routing_replay: none"
            )
        return None
    return logits, form(logits, used).to(scores.dtype), used
