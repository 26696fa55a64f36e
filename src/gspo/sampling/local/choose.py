"""Which engine samples a model in process: the first whose log-probs equal those of a plain forward.

1. Continuous batching (`packed.py`), if all layers are attention through transformers' interface.
2. Transformers' cache (`by_length.py`) with PyTorch's attention or the model's own: all rows in one batch, or only
   rows of equal length.
3. No cache: whole sequences at every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gspo.errors import RolloutError
from gspo.sampling.local.attention import ATTENTION
from gspo.sampling.local.cache_rows import CacheLayout
from gspo.sampling.local.packed import PackedStepper
from gspo.sampling.local.stepper import Engine

if TYPE_CHECKING:
    from gspo.models.vision.tower import Vision

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MIXABLE = _LAYER_TYPES | {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}


def engines(model: Any, routers: Sequence[nn.Module], prefill_tokens: int, vision: Vision | None) -> list[Engine]:
    """The engines for a model, fastest first."""
    by_length = partial(_by_length, model, routers, prefill_tokens, vision)
    attentions = ("sdpa", "eager") if getattr(model, "_supports_sdpa", False) else ("eager",)
    # Other kinds (chunked, compressed attention) count positions from the start of the batch, padding included.
    can_mix = layer_kinds(model) <= _MIXABLE
    return [
        Engine("continuous batching", ATTENTION, partial(PackedStepper, model, routers, prefill_tokens, vision), True),
        *(
            Engine(name, attention, partial(by_length, CacheLayout(mixes_lengths=mixes)))
            for name, mixes in (("transformers' cache", True), ("transformers' cache by length", False))
            for attention in attentions
            if can_mix or not mixes
        ),
        Engine("no cache", "eager", partial(by_length, None)),
    ]


def _by_length(*how: Any) -> Any:
    from gspo.sampling.local.by_length import LengthStepper

    return LengthStepper(*how)


def refuse_encoder_decoder(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise RolloutError(
            f"{type(model).__name__} is an encoder-decoder model: gspo samples and trains causal language models only; "
            "set actor.path to a decoder-only model"
        )


def layer_kinds(model: Any) -> set[str]:
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def state_outside_attention(model: Any) -> str:
    """Why rows cannot be packed into one sequence: layers that mix positions outside attention. Empty if they can."""
    kinds = layer_kinds(model) - _LAYER_TYPES
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "it has convolutions over positions"
    return ""


def choose(
    model: Any, candidates: Iterable[Engine], measure: Callable[[Engine], float], say: Callable[[str], None]
) -> Engine:
    """The first engine whose log-probs differ from a plain forward by rounding only.

    `measure` returns the largest difference, and raises if an engine cannot run the model. An engine with a difference
    above rounding is still chosen if no other one is much better, up to a limit. RolloutError if there is none.
    """
    # float64: many models compute norms, rotations or states in float32.
    rounding, limit = {torch.float32: (1e-4, 5e-3), torch.float64: (2e-5, 5e-3)}.get(model.dtype, (0.2, 0.2))
    gaps: dict[Engine, float] = {}
    reasons: list[str] = []
    for engine in candidates:
        try:
            outside = state_outside_attention(model) if engine.is_packed else ""
            if outside:
                raise RolloutError(outside)
            gap = measure(engine)
        except Exception as error:
            # `_advance` has named the error of a model's own code; the reason here is what the code raised.
            cause = error.__cause__ or error
            what = str(cause) if isinstance(cause, RolloutError) else f"{type(cause).__name__}: {cause}"
            reasons.append(f"{engine.name} cannot run it ({what.splitlines()[0][:200]})")
            continue
        gaps[engine] = gap
        if gap <= rounding:
            break
        reasons.append(f"{engine.name} differs from a plain forward by {gap:.2g}")
    # NaN compares as False: it is never within the limit.
    within = {engine: gap for engine, gap in gaps.items() if gap <= limit}
    if not within:
        raise RolloutError(
            f"{type(model).__name__} cannot be sampled in process: {'; '.join(dict.fromkeys(reasons))} "
            f"(allowed {limit:g}); "
            "use a server (rollout.backend: vllm:d1)"
        )
    best = min(within.values())
    engine = next(e for e, gap in within.items() if gap <= max(rounding, 3 * best))
    say(_line(type(model).__name__, engine, within[engine], reasons))
    return engine


def _line(name: str, engine: Engine, gap: float, reasons: Sequence[str]) -> str:
    line = f"sampler: {name} is sampled in process with {engine.name}; log-probs equal a plain forward within {gap:.1g}"
    if reasons:
        line += f" ({'; '.join(dict.fromkeys(reasons))})"
    if engine.name == "no cache":
        line += "; every token computes whole sequences: a server is faster (rollout.backend: vllm:d1)"
    return line
