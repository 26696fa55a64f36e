"""Which engine samples a model in process: the first whose log-probs equal those of a plain forward.

Rows of two lengths, two rows of one prompt, a continued row, rows that end before others, and second turns of two
episodes; for a vision-language model also prompts with images.

1. Continuous batching (`packed.py`), if all layers are attention through transformers' interface.
2. Transformers' cache (`by_length.py`) with PyTorch's attention or the model's own: all rows in one batch, or only
   rows of equal length.
3. No cache: whole sequences at every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gspo.errors import RolloutError
from gspo.models import text_modules
from gspo.sampling.local.attention import ATTENTION
from gspo.sampling.local.packed import Engine, PackedStepper
from gspo.sampling.native import few_rows
from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams

if TYPE_CHECKING:
    from gspo.models import Vision


class Borrowed:
    """A model whose settings are changed for a block and restored after it. The weights are never copied."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # A part of the model may have its own config object: the attention implementation is set on each of them.
        self._configs = list({id(m.config): m.config for m in text_modules(model) if hasattr(m, "config")}.values())
        # The layers of the trainer's model are in training mode while the model itself is not.
        self._modules = list(model.modules())
        self.native = few_rows.native_for(model)
        self._linears: list[nn.Linear] = []
        self._layers: dict[nn.Module, Any] = {}
        if self.native is not None and self.native.product is not None:
            from gspo.sampling.native.decode import CompiledLayers

            with self.engaged(ATTENTION):
                self._layers = CompiledLayers(model).forwards
        self._linears = few_rows.large_linears(model)

    @property
    def num_compiled(self) -> int:
        """Layers whose decode step is a compiled call."""
        return len(self._layers)

    @contextmanager
    def engaged(self, attention: str) -> Iterator[None]:
        """The model in eval mode with this attention and without gradients; everything is restored afterwards."""
        training = [m for m in self._modules if m.training]
        before = [config._attn_implementation for config in self._configs]
        try:
            for module in training:
                vars(module)["training"] = False  # .eval() uses Module.__setattr__, which is 30 times slower
            for config in self._configs:
                config._attn_implementation = attention
            product = self.native.product if self.native is not None else None
            for module in self._linears:
                vars(module)["forward"] = partial(_linear, module, product)
            for layer, forward in self._layers.items():
                vars(layer)["forward"] = forward
            with torch.no_grad():
                yield
        finally:
            for module in (*self._linears, *self._layers):
                vars(module).pop("forward", None)
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation
            for module in training:  # not .train(): some modules may have been in eval mode
                vars(module)["training"] = True


def _linear(module: nn.Linear, product: few_rows.Product | None, x: Tensor) -> Tensor:
    """x·Wᵀ + b for few rows, x [1, N, in] → [1, N, out]: by the compiled product, or as (W·xᵀ)ᵀ.

    A GEMM repacks its right operand, which is the weights in F.linear. For 32 rows on a CPU the repacking costs a
    quarter of the time (80 → 100 GFLOP/s without it; for a head of 49k words 57 → 79).
    """
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] > few_rows.MAX_ROWS:  # a packed forward is one batch row
        return F.linear(x, module.weight, module.bias)
    if product is not None and x.shape[1] >= few_rows.MIN_ROWS and x.dtype == module.weight.dtype == torch.float32:
        out = product(x[0], module.weight)
        return (out if module.bias is None else out + module.bias).unsqueeze(0)
    columns = x[0].t()  # [in, N]
    if module.bias is None:
        return torch.mm(module.weight, columns).t().unsqueeze(0)
    return torch.addmm(module.bias[:, None], module.weight, columns).t().unsqueeze(0)


# A high temperature: a difference hardly shows in the log-prob of a token that is nearly certain.
_PARAMS = SamplingParams(3, temperature=2.0, ignore_eos=True)


@dataclass(frozen=True)
class ForwardComparison:
    """`context`: the model's context length, at least 10; `image_prompts`: prompts with images, if it takes them."""

    num_vocab: int
    context: int
    vision: Vision | None
    image_prompts: Sequence[Prompt]

    def requests(self, version: int, *, is_packed: bool) -> list[Request]:
        tokens = self._tokens()
        # More tokens for a cache: an error of a recurrent state grows with every token.
        longer = replace(_PARAMS, max_new_tokens=6 if is_packed else min(12, self.context - 4))
        # A continued row. Its given log-probs are not compared.
        prefix = Sample.of(SampleId(0, 2), tokens[:2], [0.0, 0.0], version, "abort")
        requests = [
            Request(SampleId(0, 0), tuple(tokens[:4]), _PARAMS, keep_cache=True),
            Request(SampleId(0, 1), tuple(tokens[5:]), _PARAMS, keep_cache=True),
            Request(SampleId(0, 2), tuple(tokens[:4]), longer, prefix),
            Request(SampleId(0, 3), tuple(tokens[:4]), longer),
        ]
        if self.vision is not None and self.vision.sees_prompts_both_ways:
            requests = []  # on text alone, the plain forward of such a model is not causal
        return requests + [
            Request(SampleId(1 + number, i), shown.tokens, _PARAMS, given, origin=shown)
            for number, shown in enumerate(self.image_prompts)
            for i, given in enumerate((None, replace(prefix, id=SampleId(1 + number, 1))))
        ]

    def second_turns(self, requests: Sequence[Request], samples: Sequence[Sample]) -> list[Request]:
        """The next turns of the first two requests, whose keys and values the sampler has kept."""
        answer = {s.id: tuple(s.tokens.tolist()) for s in samples}
        params, last = replace(_PARAMS, max_new_tokens=2), tuple(self._tokens()[-1:])
        return [Request(r.id._replace(turn=1), r.prompt + answer[r.id] + last, params) for r in requests[:2]]

    def largest_difference(self, model: Any, requests: Sequence[Request], samples: Sequence[Sample]) -> float:
        """Sampled log-probs against those of `model`; NaN if one is not a number, or if nothing can be compared."""
        request_of, gaps = {r.id: r for r in requests}, []
        for sample in samples:
            request, new = request_of[sample.id], sample.tokens.tolist()
            prompt, more = request.prompt, {}
            if request.shown is not None:
                # A placeholder among the sampled tokens would ask the plain forward for another feature.
                if self.vision is None or self.vision.token in new:
                    continue
                more = self.vision.plain_inputs(request.shown, len(prompt) + len(new))
            ids = torch.tensor([[*prompt, *new]], device=model.device)
            logits = model(input_ids=ids, use_cache=False, **more).logits[0, len(prompt) - 1 : -1]  # [new, V]
            expected = torch.log_softmax(logits.double() / _PARAMS.temperature, -1).cpu().numpy()[range(len(new)), new]
            first = 2 if request.prefix is not None else 0
            gaps.append(np.abs(expected - sample.behavior_logp)[first:].max())
        return float(np.max(gaps)) if gaps else float("nan")  # np.max is NaN if any gap is; Python's max is not

    def _tokens(self) -> list[int]:
        # Any fixed tokens will do; the factor spreads them over the vocabulary.
        tokens = [int(i) for i in np.arange(1, 9) * 7919 % self.num_vocab]
        if self.vision is None:
            return tokens
        # But the placeholder of images has no embedding of its own in a plain forward.
        return [t if t != self.vision.token else (t + 1) % self.num_vocab for t in tokens]


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
            Engine(name, attention, partial(by_length, mixes))
            for name, mixes in (("transformers' cache", True), ("transformers' cache by length", False))
            for attention in attentions
            if can_mix or not mixes
        ),
        Engine("no cache", "eager", partial(by_length, None)),
    ]


def _by_length(
    model: Any, routers: Sequence[nn.Module], prefill_tokens: int, vision: Vision | None, mixes: bool | None, *rest: Any
) -> Any:
    """`mixes`: whether a cache holds rows of different lengths; None: without a cache."""
    from gspo.sampling.local.by_length import CacheLayout, LengthStepper

    layout = None if mixes is None else CacheLayout(mixes_lengths=mixes)
    return LengthStepper(model, routers, prefill_tokens, vision, layout, *rest)


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
