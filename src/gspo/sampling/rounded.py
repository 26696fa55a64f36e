"""The in-process sampler with weights of lower precision: for studies of how a faster sampler affects training.

The weights are rounded but computed with in their own dtype. The sampler then differs from the trainer as a bf16 or
int8 server would, reproducibly and on any machine. It holds a copy of the model, which is rounded at every publish.
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
    """The tensor rounded to that precision, in its original dtype.

    int8 is symmetric and per output channel: w → s·round(w/s) with s = max|w|/127 over the last dimension, for matrices
    (of a layer, an expert, the embeddings); vectors are not rounded.

    >>> rounded(torch.tensor([[1.0, -0.3, 0.002]]), "int8").mul(127).round().tolist()
    [[127.0, -38.0, 0.0]]
    """
    if precision == "bf16":
        return tensor.to(torch.bfloat16).to(tensor.dtype)
    if tensor.dim() < 2:
        return tensor
    # The lower bound keeps a row of zeros from a division by zero.
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(tensor.dtype).tiny) / 127
    return (tensor / scale).round().mul(scale)


class RoundedSampler(LocalSampler):
    """`LocalSampler` with a rounded copy of `model`; publishing without tensors rounds the model's current weights."""

    _precision: Precision

    def __init__(self, model: Any, *, precision: Precision, **settings: Any) -> None:
        self._source, self._precision = model, precision  # the trainer's model, and the precision of this copy
        # The check needs rounded weights, so it runs after the first load.
        super().__init__(copy.deepcopy(model).requires_grad_(False), **settings, verify=False)
        self.load_weights(self.version, None)
        self._choose_engine()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] | None) -> None:
        if tensors is None:
            tensors = ((name, parameter.detach()) for name, parameter in self._source.named_parameters())
        super().load_weights(version, ((name, rounded(tensor, self._precision)) for name, tensor in tensors))
