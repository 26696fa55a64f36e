"""Weights over several ranks by FSDP2: how a module is cut, and how its tensors are read and written whole.

Each decoder layer is one unit, gathered while it computes; embedding, head and what else there is are the root's, whose
forward is `PolicyModule.forward` (or the critic's). Gradients are summed over ranks, not averaged: the denominator of
the loss counts the sequences of all of them. With one rank nothing here is used, and nothing of it imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.learner.ranks.world import World

if TYPE_CHECKING:
    from gspo.learner.policy.module import PolicyModule


def shard(
    root: nn.Module,
    policy: PolicyModule,
    world: World,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Cut `root` (the policy, or a critic around it) over the ranks of `world`, in place; all ranks call it together.

    `param_dtype`: what layers compute in; None: the type of the weights, which optimizer and checkpoint keep.
    `reduce_dtype`: what gradients are summed in; None: at least float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.size,))

    def cut(module: nn.Module, cast: bool = True) -> None:
        own = next(module.parameters()).dtype
        sums = reduce_dtype or torch.promote_types(own, torch.float32)
        how = MixedPrecisionPolicy(param_dtype=param_dtype if cast else None, reduce_dtype=sums)
        # The root, too, gives its weights back after forward: a pass without gradients must not leave a copy behind
        # that the optimizer does not see.
        fully_shard(module, mesh=mesh, mp_policy=how, reshard_after_forward=True)

    for module in policy.model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            cut(module)
    if root is not policy:
        # A critic's head is float32 on a trunk that may not be, and one unit has one type.
        head = policy.model.get_output_embeddings()
        assert head is not None
        cut(head, cast=False)
    cut(root)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                # A layer that no token of this rank reached (an expert) takes part with zeros.
                module.set_reduce_scatter_unused_params(True, recurse=False)
    if root is policy:
        register_fsdp_forward_method(policy, "plain_logp")
    policy.world = world
    policy.compute_dtype = param_dtype


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on every rank; all ranks ask for it together. One that is not cut is itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """`full` for who collects a model: in the memory of the host, and on rank 0 alone; the others get nothing."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    everything, mesh = full(tensor), tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return everything.cpu() if mesh.get_rank() == 0 else everything.new_empty(0)


def put(into: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be cut."""
    with torch.no_grad():
        into.copy_(like(into, tensor))


def like(cut: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, which every rank has, cut and placed as `cut` is."""
    if not hasattr(cut, "full_tensor"):
        return tensor.to(cut.device)
    from torch.distributed.tensor import distribute_tensor

    model: Any = cut
    return distribute_tensor(tensor.to(cut.device), model.device_mesh, model.placements, src_data_rank=None)


def full_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of what is trained, one after the other; all ranks walk through it together.

    `dtype` is that of layers that compute in another type than they keep.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, full(parameter.detach()).to(dtype)
