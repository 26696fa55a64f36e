"""Tensors that pretend to be on CUDA and compute on the CPU, with real values.

An operation on tensors of two devices raises, as it would on a GPU. PyTorch's own fake CUDA tensors have no values, so
they stop where a shape depends on one (`nonzero`, `.item()`), and they have no backward pass. Here a tensor stays a CPU
tensor; its device is a mark (the subclass `OnCuda`), and a mode that sees every call of PyTorch's Python interface
reads the marks and passes them on. Inside a backward pass nothing is checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda:0")
# A GPU takes a tensor of another device here: a copy; an index, or the values to write, on the CPU.
_MIXES = {"copy_", "to", "__getitem__", "__setitem__"}


class OnCuda(torch.Tensor):
    """A tensor whose device is cuda:0 inside `pretend_cuda`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # the mode does everything


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(OnCuda).requires_grad_(tensor.requires_grad)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that pretends, on the CPU."""
    return tensor.detach().as_subclass(torch.Tensor)


def move(module: torch.nn.Module) -> None:
    """Let weights and buffers of a module pretend to be on CUDA; a tied weight stays one tensor."""
    made: dict[Any, torch.Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = made.setdefault(tensor, on_cuda(tensor))


class _Devices(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), _name(func)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, OnCuda) for x in tensors)
        if name == "device.__get__":
            return CUDA if there else torch.device("cpu")
        if name == "is_cuda.__get__":
            return there
        # A tensor without dimensions is a number: it may be on the CPU.
        if there and name not in _MIXES and any(not isinstance(x, OnCuda) and x.dim() for x in tensors):
            found = ", ".join(f"{'cuda:0' if isinstance(x, OnCuda) else 'cpu'} {list(x.shape)}" for x in tensors)
            raise RuntimeError(f"{name}: tensors on two devices: {found}")
        if there and name in ("numpy", "__array__"):
            raise TypeError(f"{name}: the tensor is on cuda:0; call .cpu() first")
        if name in _MIXES:  # on the device of what is copied or read, or of `to`'s model
            model = name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor)
            there = isinstance(args[1 if model else 0], OnCuda)
        asked = _asked(name, args, kwargs)
        if asked is not None:
            there = asked.type == "cuda"
            args, kwargs = tree_map(lambda x: torch.device("cpu") if _is_device(x) else x, (args, kwargs))
        out = func(*args, **kwargs)
        return tree_map(lambda x: _marked(x, there, args) if isinstance(x, torch.Tensor) else x, out)


def _marked(out: torch.Tensor, there: bool, args: Any) -> torch.Tensor:
    if isinstance(out, OnCuda) == there:
        return out
    # `.cpu()` of a CPU tensor returns that tensor; a copy that shares memory with a tensor on CUDA would not be one.
    return out.as_subclass(OnCuda) if there else out.as_subclass(torch.Tensor).clone()


def _name(func) -> str:
    # `Tensor.device.__get__` is a method of a property.
    name = getattr(func, "__name__", str(func))
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


def _is_device(x) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] in ("cpu", "cuda"))


def _asked(name, args, kwargs) -> torch.device | None:
    """The device that a call names."""
    if name in ("cpu", "cuda"):
        return torch.device(name)
    if name == "to":
        named = next((x for x in [*args[1:], kwargs.get("device")] if _is_device(x)), None)
    else:
        named = kwargs.get("device")
    return None if named is None else torch.device(named)


@contextmanager
def pretend_cuda() -> Iterator[None]:
    with _Devices():
        yield
