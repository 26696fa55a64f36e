"""The value model's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, start_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """ℓ = ½ max( (V − R)², (V_old + clip(V − V_old, ±ε) − R)² ), per token   (PPO's clipped value loss).

    V is the only differentiated input; V_old (`start_values`) is the critic at the start of the batch, R = A + V_old
    the return of GAE. With the larger of the two, a value that has moved more than ε towards its return no longer
    has a gradient, and one that moved away keeps it. Returns ℓ and a mask of values without a
    gradient, both in the shape of `values`.
    """
    start_values, returns = start_values.detach().to(values.dtype), returns.detach().to(values.dtype)
    # V, moved by at most ε from V_old; the clamp has gradient 0 where it is active.
    near = start_values + (values - start_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    # clipped > plain only where the clamp is active (else both are equal), so these values have no gradient.
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()
