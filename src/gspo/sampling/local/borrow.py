"""The trainer's model, borrowed for a call: eval mode, another attention implementation, compiled operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gspo.models.vision.parts import text_modules
from gspo.sampling.local.attention import ATTENTION
from gspo.sampling.native import few_rows


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
