"""New weights for a sampler that holds its own: checked whole, then copied into the tensors it has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gspo.errors import WeightSyncError


def copy_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into the model's parameters, all or nothing.

    Every trainable parameter must come, under one of its names, with its shape and dtype, and finite; nothing is
    written before all of it is checked.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    arrived: dict[Tensor, tuple[str, Tensor]] = {}
    for name, tensor in tensors:
        parameter = by_name.get(name)
        if parameter is None:
            raise WeightSyncError(f"weight {name!r} is not a parameter of {type(model).__name__}")
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise WeightSyncError(
                f"weight {name!r} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"the sampler holds {tuple(parameter.shape)} {parameter.dtype}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WeightSyncError(f"weight {name!r} holds NaN or inf; the sampler keeps its weights")
        if parameter in arrived and not torch.equal(arrived[parameter][1], tensor):
            raise WeightSyncError(f"weights {name!r} and {arrived[parameter][0]!r} are one tensor but came different")
        arrived[parameter] = (name, tensor)
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in arrived]
    if missing:
        raise WeightSyncError(f"{len(missing)} weights did not arrive, first {missing[0]!r}; the sampler keeps its own")
    with torch.no_grad():
        for parameter, (_, tensor) in arrived.items():
            parameter.copy_(tensor)
