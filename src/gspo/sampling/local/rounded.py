"""The in-process sampler on weights of a lower precision: for studies of what a faster sampler does to training.

The weights are rounded and computed with as before, in their own type: the sampler then is another function than the
trainer, as a bf16 or int8 server is, on any machine and reproducibly. It holds a copy of the model, rounded anew at
every publish.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.sampling.local.engine import LocalSampler

Precision = Literal["bf16", "int8"]


def rounded(tensor: Tensor, precision: Precision) -> Tensor:
    """The nearest tensor of that precision, in the type it came in.

    int8 is symmetric and per output channel: w → s·round(w/s) with s = max|w|/127 over the last dimension, of matrices
    (a layer's, an expert's, the embeddings'); vectors stay as they are.

    >>> rounded(torch.tensor([[1.0, -0.3, 0.002]]), "int8").mul(127).round().tolist()
    [[127.0, -38.0, 0.0]]
    """
    if precision == "bf16":
        return tensor.to(torch.bfloat16).to(tensor.dtype)
    if tensor.dim() < 2:
        return tensor
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(tensor.dtype).tiny) / 127
    return (tensor / scale).round().mul(scale)


class RoundedSampler(LocalSampler):
    """`LocalSampler` on a rounded copy of `model`; publishing without tensors takes the model's own as they are now."""

    _precision: Precision

    def __init__(self, model: Any, *, precision: Precision, **settings: Any) -> None:
        self._source, self._precision = model, precision  # the trainer's model, and what its weights become here
        super().__init__(copy.deepcopy(model).requires_grad_(False), **settings, verify=False)
        self.load_weights(self.version, None)
        self._verify()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] | None) -> None:
        if tensors is None:
            tensors = ((name, parameter.detach()) for name, parameter in self._source.named_parameters())
        super().load_weights(version, ((name, rounded(tensor, self._precision)) for name, tensor in tensors))
