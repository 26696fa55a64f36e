"""An objective of your own: a function that `loss` calls where a preset has its ratio, gate and advantage.

    def objective(logp, proximal_logp, advantage, layout, eps_clip, eps_clip_higher):
        log_s = sequence_log_ratio(token_log_ratio(logp, proximal_logp, layout), layout)  # [B]
        value, clipped = clip(log_s, *clip_bounds(advantage, eps_clip, eps_clip_higher))  # [B] each
        return -advantage * value, clipped

A function asks for what it needs by the names of its parameters (`INPUTS`); other names are settings. It returns the
loss of each sequence, [B], or of each token, or a pair of that and a bool tensor of what was clipped. Everything
around it is as for a preset: behavior correction, KL, entropy, aggregation of tokens, the denominator, statistics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algorithms import COMMON_SETTINGS, clip_range_of
from gspo.objectives.aggregate import TokenLayout, Values, token_layout
from gspo.objectives.loss import with_defaults
from gspo.system import described

INPUTS: Mapping[str, str] = {
    "logp": "log π_θ of each token, differentiated",
    "proximal_logp": "log π_old",
    "behavior_logp": "log μ, of the sampler",
    "advantage": "one per sequence, [B]; the mean over the sequence where it differs between tokens",
    "token_advantage": "the same per token",
    "layout": "which token belongs to which sequence (`TokenLayout`)",
}


@dataclass(frozen=True)
class Signature:
    """What a function asks for."""

    inputs: tuple[str, ...]  # of INPUTS
    settings: Mapping[str, bool]  # its other parameters; True: it has no default


def signature_of(function: Callable[..., Any]) -> Signature:
    """The parameters of an objective; ValueError if it cannot be called by their names, or has no `logp`."""
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: its parameters cannot be read ({error}); write it as a Python function") from error
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ValueError(
                f"{name} has the parameter {p}; an objective is called with the parameters that it names: "
                f"{', '.join(INPUTS)}, and settings"
            )
    if "logp" not in (p.name for p in parameters):
        raise ValueError(f"{name} has no parameter logp, the log-probs that it must differentiate; add it")
    inputs = tuple(p.name for p in parameters if p.name in INPUTS)
    return Signature(inputs, {p.name: p.default is p.empty for p in parameters if p.name not in INPUTS})


def merged(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings around an objective, with defaults where none is given, and those that are its parameters."""
    known = {**COMMON_SETTINGS, "level": "sequence", "aggregation": "sequence_mean", "max_new_tokens": None}
    asked, eps = {*signature_of(function).settings}, {*(clip_range_of(given) or ())}
    asked |= eps if asked & eps else set()  # ε_low and ε_high come together
    theirs = {key: given[key] for key in asked if key in given and key not in known}
    around = {key: value for key, value in given.items() if key not in theirs}
    return with_defaults(name_of(function), known, around) | theirs


def call(
    function: Callable[..., Any],
    logp: Tensor,
    proximal_logp: Tensor,
    behavior_logp: Tensor | None,
    advantage: Values,
    layout: TokenLayout,
    settings: Mapping[str, Any],
) -> tuple[Values, Values | None]:
    """(The function's loss, what it clipped or None), each per token or per sequence; log-probs are token-shaped."""
    asked, dtype = signature_of(function), logp.dtype
    missing = [name for name, is_required in asked.settings.items() if is_required and name not in settings]
    missing += ["behavior_logp"] if "behavior_logp" in asked.inputs and behavior_logp is None else []
    if missing:
        raise ValueError(f"{name_of(function)} needs {', '.join(missing)}, which the caller of the loss has not given")
    given: dict[str, Any] = {"logp": logp, "proximal_logp": proximal_logp.detach().to(dtype), "layout": layout}
    given["behavior_logp"] = None if behavior_logp is None else behavior_logp.detach().to(dtype)
    if "advantage" in asked.inputs:
        given["advantage"] = advantage.mean(layout)  # [B]
    if "token_advantage" in asked.inputs:
        given["token_advantage"] = advantage.at_tokens(layout)  # token-shaped
    found = function(
        **{name: given[name] for name in asked.inputs},
        **{name: settings[name] for name in asked.settings if name in settings},
    )
    value, clipped = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if isinstance(clipped, Tensor) and clipped.dtype != torch.bool:
        raise ValueError(f"{name_of(function)} returned what was clipped as {clipped.dtype}; it must be torch.bool")
    loss = _shaped(function, "the loss", value, layout)
    return Values(loss.x.to(dtype), loss.per_token), None if clipped is None else _shaped(
        function, "what was clipped", clipped, layout
    )


def _shaped(function: Callable[..., Any], what: str, x: Any, layout: TokenLayout) -> Values:
    """ValueError unless x has one value per sequence or per token: other shapes would broadcast."""
    wanted = f"[{layout.num_sequences}], one per sequence, or {list(layout.shape)}, one per token"
    if not isinstance(x, Tensor):
        raise ValueError(f"{name_of(function)} returned {what} as {type(x).__name__}; it must be a tensor {wanted}")
    # In a packed batch with B = N every sequence has one token, and both meanings are the same.
    if x.shape == (layout.num_sequences,):
        return Values(x, per_token=False)
    if x.shape != layout.shape:
        raise ValueError(f"{name_of(function)} returned {what} with shape {list(x.shape)}; it must be {wanted}")
    return Values(x, per_token=True)


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


_LENGTHS = (3, 1, 4, 2, 5, 3)
_ADVANTAGES = (1.0, -1.0, 0.5, -2.0, 1.5, -0.25)


def probe(function: Callable[..., Any], settings: Mapping[str, Any]) -> bool:
    """Call an objective on small float32 tensors; ValueError for what would fail, or be wrong, during training.

    Returns whether sequences with A = 0 have no gradient, so that they need not be computed.
    """
    name, layout, advantage = name_of(function), _layout(_LENGTHS), torch.tensor(_ADVANTAGES)
    loss, gradient = _tried(function, settings, layout, advantage)
    for what, x in (("loss", loss), ("gradient", gradient)):
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name}: its {what} is {x[~x.isfinite()][0]:g} for finite log-probs and advantages")
    if not bool(gradient.any()):
        raise ValueError(f"{name}: its loss has gradient 0 at every log-prob, so that nothing would be trained")
    again, _ = _tried(function, settings, layout, advantage)
    if not torch.equal(loss, again):
        raise ValueError(f"{name} returned different losses for the same inputs; a resumed run would differ")
    # The trainer decides which sequences share a micro-batch; it must not decide the loss.
    for i, (length, before) in enumerate(zip(_LENGTHS, torch.tensor(_LENGTHS).cumsum(0).tolist(), strict=True)):
        alone, _ = _tried(function, settings, _layout((length,)), advantage[i : i + 1], before - length)
        if not torch.allclose(alone, loss[before - length : before], rtol=1e-4, atol=1e-5):
            raise ValueError(
                f"{name}: the loss of a sequence depends on the other sequences of its micro-batch, so that results "
                "would change with actor.mb_spec and the number of ranks; use values of the own sequence only (the "
                "mean over the batch is taken outside, by actor.loss_aggregation)"
            )
    return not bool(_tried(function, settings, layout, torch.zeros_like(advantage))[1].any())


def _layout(lengths: tuple[int, ...]) -> TokenLayout:
    cuts = torch.tensor([0, *lengths]).cumsum(0)  # [B + 1]
    return token_layout(torch.zeros(sum(lengths)), None, cuts)


def _tried(
    function: Callable[..., Any], settings: Mapping[str, Any], layout: TokenLayout, advantage: Tensor, first: int = 0
) -> tuple[Tensor, Tensor]:
    """(loss at each token, gradient of the sum), from tokens `first`… of the probe's log-probs."""
    draws = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(sum(_LENGTHS), generator=draws) - 0.1
    moves = 0.02 * torch.randn(len(logp), generator=draws)
    moves[: sum(_LENGTHS[:3])] = 0.0  # the first sequences have the ratio 1
    here = slice(first, first + layout.shape[0])
    leaf, old = logp[here].clone().requires_grad_(), (logp - moves)[here]
    # Not a leaf: an operation in place on a leaf would fail with a message about something else.
    loss, _ = call(
        _watched(function), leaf.clone(), old, old.clone(), Values(advantage.clone(), False), layout, settings
    )
    if not loss.x.requires_grad:
        raise ValueError(
            f"{name_of(function)} returned a loss without a gradient; compute it from logp, without detach or no_grad"
        )
    (gradient,) = torch.autograd.grad(loss.x.sum(), leaf, allow_unused=True)
    gradient = torch.zeros_like(leaf) if gradient is None else gradient
    return loss.at_tokens(layout).detach(), gradient


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its errors named and its inputs compared before and after."""

    @functools.wraps(function)
    def watched(**given: Any) -> Any:
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if "layout" in given:
            tensors["layout"] = given["layout"].num_tokens
        versions = {name: x._version for name, x in tensors.items()}
        try:
            found = function(**given)
        except Exception as error:  # whatever the user's code raises
            raise ValueError(f"{name_of(function)} failed on small tensors: {described(error)}") from error
        if changed := [name for name, x in tensors.items() if x._version != versions[name]]:
            raise ValueError(
                f"{name_of(function)} changes its input {changed[0]} in place; compute a new tensor instead"
            )
        return found

    return watched
