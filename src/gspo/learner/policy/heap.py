"""Freed memory goes back to the system a few times per pass, on a CPU.

A pass leaves holes in the C library's heap between the tensors that it keeps, and does not fill them again: 0.4 of
3.2 GB for SmolLM2-135M's shape, measured. The probable cause: PyTorch aligns tensors to 64 bytes, and glibc takes a
hole for an aligned block only if it is larger than the block. The pages of holes can be given back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.system.process import return_freed_memory

# For a smaller model the memory of Python and its libraries matters more.
MIN_WEIGHTS = 2**24
# Of a pass. The pages that are used again cost a fault each: with 5 a step of SmolLM2-135M's shape took 4 % longer,
# with 3 no longer than without.
NUM_RETURNS = 3


def return_memory_between_layers(model: nn.Module) -> int:
    """Return freed memory after every n-th layer, forward and backward; returns how many layers that are.

    0 if the model is small. It has no effect on a GPU, whose allocator reuses its holes.
    """
    if sum(weight.numel() for weight in model.parameters()) < MIN_WEIGHTS:
        return 0
    # The layers of a transformers model.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    last_of_parts = layers[:: -max(len(layers) // NUM_RETURNS, 1)]
    for layer in last_of_parts:
        layer.register_forward_hook(_return_memory)
    return len(last_of_parts)


def _return_memory(_layer: nn.Module, _inputs: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    # Without gradients a pass keeps nothing, so that all it frees is one hole.
    if isinstance(hidden, Tensor) and hidden.requires_grad and hidden.device.type == "cpu":
        return_freed_memory()
        hidden.register_hook(lambda _gradient: return_freed_memory())
