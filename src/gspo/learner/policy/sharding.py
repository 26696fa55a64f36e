"""Weights sharded over ranks by FSDP2: how a module is sharded, and how its tensors are read and written unsharded.

Each decoder layer is one FSDP unit, all-gathered while it computes. Embedding, head and all other parameters belong to
the root unit, whose forward is `PolicyModule.forward` (or the critic's). Gradients are summed over ranks, not averaged:
the denominator of the loss already counts the sequences of all ranks. With one rank nothing here is used, and
torch.distributed is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.learner.world import World

if TYPE_CHECKING:
    from gspo.learner.policy.module import PolicyModule


def shard(
    root: nn.Module,
    policy: PolicyModule,
    world: World,
    *,
    param_dtype: torch.dtype | None = None,
) -> None:
    """Shard `root` (the policy, or a critic around it) over the ranks of `world`, in place; all ranks must call it.

    `param_dtype`: dtype of the layers' computation; None: that of the weights, which optimizer and checkpoint keep.
    Gradients are summed in float32, or in the weights' dtype if that is wider: many ranks add small terms.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(world.device.type, (world.size,))

    def shard_unit(module: nn.Module, cast: bool = True) -> None:
        sums = torch.promote_types(next(module.parameters()).dtype, torch.float32)
        precision = MixedPrecisionPolicy(param_dtype=param_dtype if cast else None, reduce_dtype=sums)
        # The root, too, reshards after forward: after a pass without gradients a gathered copy would stay, and would
        # not see the optimizer's next update.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    # Layers before the root: a root unit takes only the parameters that no inner unit holds.
    for module in policy.model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            shard_unit(module)
    if root is not policy:
        # A critic's head is float32 even on a 16-bit trunk, and an FSDP unit has one dtype.
        head = policy.model.get_output_embeddings()
        assert head is not None
        shard_unit(head, cast=False)
    shard_unit(root)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # FSDP divides by the number of ranks by default; here gradients are summed (see the module docstring).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                # An expert that no token of this rank reached contributes zeros.
                module.set_reduce_scatter_unused_params(True, recurse=False)
    if root is policy:
        # These run the model outside `forward`, and need the root's all-gather as well.
        register_fsdp_forward_method(policy, "plain_logp")
        register_fsdp_forward_method(policy, "inspect_head")
    policy.world = world
    policy.forks = False  # each forked group is two calls, and all ranks must make equally many
    policy.compute_dtype = param_dtype


def full(tensor: Tensor) -> Tensor:
    """The unsharded tensor, on every rank; all ranks must call it. An unsharded tensor is returned as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """`full` for collecting a model: in host memory on rank 0, empty on the other ranks."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    everything, mesh = full(tensor), tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return everything.cpu() if mesh.get_rank() == 0 else everything.new_empty(0)


def copy_into(into: Tensor, tensor: Tensor) -> None:
    """Copy an unsharded tensor, which every rank has, into one that may be sharded."""
    with torch.no_grad():
        into.copy_(like(into, tensor))


def like(sharded: Tensor, tensor: Tensor) -> Tensor:
    """An unsharded tensor, which every rank has, sharded and placed as `sharded` is."""
    if not hasattr(sharded, "full_tensor"):
        return tensor.to(sharded.device)
    from torch.distributed.tensor import distribute_tensor

    model: Any = sharded
    # src_data_rank None: each rank cuts its shard from its own copy, without communication.
    return distribute_tensor(tensor.to(sharded.device), model.device_mesh, model.placements, src_data_rank=None)


def full_parameters(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, unsharded tensor) of the trained parameters, one at a time; all ranks must iterate together.

    `dtype`: convert to this dtype, if the layers compute in another one than that of the stored weights.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, full(parameter.detach()).to(dtype)
