"""x·Wᵀ for 9 to 64 rows on a CPU, in C (`few_rows.c`). Its result is compared with PyTorch's before it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MIN_ROWS, MAX_ROWS = 9, 64  # with fewer rows half a tile is empty; with more, PyTorch's product is as fast
MANY_WEIGHTS = 2**18  # smaller products take less time than the call
OPERATOR = "gspo::few_rows"  # its name in a timeline

Product = Callable[[Tensor, Tensor], Tensor]  # x [N, in], W [out, in] → [N, out]


class Native(NamedTuple):
    product: Product | None
    why: str  # where the library is, or why there is none


def large_linears(model: nn.Module) -> list[nn.Linear]:
    """The layers whose products are worth it. Plain nn.Linear only: adapters and quantised layers have their own."""
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
    return [m for m in linears if m.weight.numel() >= MANY_WEIGHTS]


def native_for(model: nn.Module) -> Native | None:
    """The compiled product for sampling from this model; None for a model that has no use for it."""
    return load_native() if any(m.weight.dtype == torch.float32 for m in large_linears(model)) else None


def product_name(model: nn.Module) -> str:
    """What computes the products of sampling, for the identity of a run: torch, or the compiled sources by digest."""
    native = native_for(model)
    if native is None or native.product is None:
        return "torch"
    from gspo.sampling.native.library import sources_digest

    return f"native {sources_digest()}"


@cache
def load_native() -> Native:
    """The compiled product, once per process."""
    from gspo.sampling.native.library import load_library

    functions, why = load_library()
    if functions is None:
        return Native(None, why)
    product = _bind(functions)
    return Native(product, why) if _is_right(product) else Native(None, f"{why} computes wrong products")


def _bind(library: Any) -> Product:
    from gspo.sampling.native.library import named_in_timeline

    function = library.few_rows
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, pointer, pointer, number, number, number, ctypes.c_int]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y = x.new_empty(len(x), len(weight))
        num_threads = torch.get_num_threads()
        with named_in_timeline(OPERATOR):
            failed = function(
                x.data_ptr(), weight.data_ptr(), y.data_ptr(), len(x), x.shape[1], len(weight), num_threads
            )
        if failed:
            raise MemoryError(f"no memory for a product of {tuple(x.shape)} and {tuple(weight.shape)}")
        return y

    return product


def _is_right(product: Product) -> bool:
    """Against PyTorch's product in float64, with sizes that are no multiple of a tile, a block or a chunk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for rows, num_in, num_out in ((17, 577, 491), (9, 31, 7), (64, 288, 240)):
            # Not in the default type, which a caller may have set to float64.
            x, weight = (torch.randn(num, num_in, dtype=torch.float32) for num in (rows, num_out))
            exact = x.double() @ weight.double().T
            if not (product(x, weight) - exact).abs().max() < 1e-5 * num_in**0.5:
                return False
    return True
