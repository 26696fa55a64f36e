"""Layers of Llama-like models for the next token of each row, one compiled call per layer (`decode_layer.c`).

A decode step of few rows calls about forty operators per layer, most of them on a few thousand numbers, and their calls
take a third of its time. A layer is replaced if it has the parts that `_has_the_form` names, no others, and if the
compiled function returns what its own forward returns. The comparison uses random weights, so its result is the same
for every checkpoint of a model. Models are not listed by name. Prefills, and layers with a sliding window, run the
layer's own forward.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gspo.sampling.local.attention import DecodePlan, KVStore, active, active_plan, make_grid
from gspo.sampling.native.few_rows import MAX_ROWS
from gspo.sampling.native.library import load_library, named_in_timeline

OPERATOR = "gspo::decode_layer"  # its name in a timeline
_WEIGHTS = (
    "norm_1", "q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "norm_2", "gate", "up", "down",
)  # fmt: skip
_STORES = ("prompt_k", "prompt_v", "own_k", "own_v")
_TOLERANCE = 1e-4  # relative to the largest number of the result


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*_WEIGHTS, *_STORES)]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "hidden", "wide", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("prompt_capacity", "own_capacity", "max_keys")),
        *((name, ctypes.c_void_p) for name in ("group", "prompt_len", "own_len", "cos", "sin")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
    ]


Forward = Callable[..., Any]


class CompiledLayers:
    """The layers of `model` that a compiled call can replace, with the forward of each."""

    def __init__(self, model: nn.Module) -> None:
        self.forwards: dict[nn.Module, Forward] = {}
        functions, found = load_library().functions, list(_candidates(model))
        if functions is None or not found:
            return
        self._function, self._size = functions.decode_layer, functions.decode_scratch
        self._function.restype, self._size.restype = None, ctypes.c_int64
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        same: dict[tuple[Any, ...], bool] = {}
        for layer in found:
            kind = _kind(layer)
            if kind not in same:
                same[kind] = self._is_right(layer)
            if same[kind]:
                self.forwards[layer] = partial(self._forward, layer)

    def _forward(self, layer: Any, hidden_states: Tensor, *args: Any, **inputs: Any) -> Any:
        """hidden_states [1, N, hidden] → the same shape."""
        store, plan = active_plan() or (None, None)
        rotary = inputs.get("position_embeddings")
        if store is not None and isinstance(plan, DecodePlan) and rotary is not None and not args:
            num_rows, attention = hidden_states.shape[1], layer.self_attn
            fits = all(x.shape == (1, num_rows, attention.head_dim) for x in rotary)
            is_float = all(x.dtype == torch.float32 and x.is_cpu for x in (hidden_states, *rotary))
            has_window = store.windows.get(attention.layer_idx) is not None
            if fits and is_float and not has_window and num_rows <= MAX_ROWS:
                return self._compiled(layer, hidden_states, store, plan, *rotary)
        return type(layer).forward(layer, hidden_states, *args, **inputs)

    def _compiled(
        self, layer: Any, hidden: Tensor, store: KVStore, plan: DecodePlan, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attention, index = layer.self_attn, layer.self_attn.layer_idx
        x = hidden.clone(memory_format=torch.contiguous_format)  # [1, N, hidden], overwritten by the result
        cos, sin = cos.contiguous(), sin.contiguous()
        prompt_k, prompt_v = store.prompt[index]  # a prompt was computed before its rows
        own_k, own_v = store.own_of(index, prompt_k, prompt_v)
        stores = (prompt_k, prompt_v, own_k, own_v)
        weights = _weights(layer)
        pointers = [None if w is None else w.data_ptr() for w in weights]
        rows = _Rows(
            x.shape[1], x.shape[2], layer.mlp.gate_proj.out_features, attention.q_proj.out_features // cos.shape[-1],
            prompt_k.shape[1], cos.shape[-1], prompt_k.shape[2], own_k.shape[2], plan.prompt_max + plan.own_max,
            plan.grid.group_n.ctypes.data, plan.prompt_len_n.ctypes.data, plan.own_len_n.ctypes.data,
            cos.data_ptr(), sin.data_ptr(), _epsilon(layer.input_layernorm), attention.scaling,
        )  # fmt: skip
        threads = torch.get_num_threads()
        size = self._size(ctypes.byref(rows), threads)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size + size // 2, dtype=torch.float32, device="cpu")
        with named_in_timeline(OPERATOR):
            self._function(
                ctypes.byref(_Layer(*pointers, *(t.data_ptr() for t in stores))),
                ctypes.byref(rows),
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_void_p(self._scratch.data_ptr()),
                threads,
            )
        return x

    @torch.no_grad()
    def _is_right(self, layer: Any) -> bool:
        """The compiled layer against its own forward, with random weights and from the same keys and values."""
        layer = copy.deepcopy(layer)
        _fill(layer.parameters())
        attention, index = layer.self_attn, layer.self_attn.layer_idx
        dim, num_kv = attention.head_dim, attention.k_proj.out_features // attention.head_dim
        # Three rows of two groups, with different numbers of own tokens.
        group, prompt_len, own_len = np.array([0, 1, 1]), np.array([21, 5, 5]), np.array([0, 2, 1])
        x, like = _random(1, 3, attention.q_proj.in_features), _random(1, num_kv, 1, dim)
        rotary = (_random(1, 3, dim), _random(1, 3, dim).flip(-1))
        results = []
        for compiled in (False, True):
            store = KVStore()
            store.reserve(groups=2, prompt_len=22, rows=4, own_len=4)
            _fill([*store.prompt_of(index, like, like), *store.own_of(index, like, like)])
            plan = DecodePlan(make_grid(group, np.ones(3, dtype=np.bool_)), prompt_len, own_len)
            try:
                with active(store, plan):
                    if compiled:
                        made = self._compiled(layer, x, store, plan, *rotary)
                    else:
                        made = type(layer).forward(layer, x, position_embeddings=rotary)
            except Exception:  # a third-party layer may need other arguments
                return False
            if not isinstance(made, Tensor) or made.shape != x.shape:
                return False
            results.append([made, *store.own[index]])
        return all(
            bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(results[0], results[1], strict=True)
        )


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _fill(tensors: Iterable[Tensor]) -> None:
    """Numbers of such a size that the attention scores of a layer reach 30: a soft cap would be seen."""
    numbers = _random(65521)  # a prime: rows of a matrix differ
    for i, tensor in enumerate(tensors):
        size = tensor.numel()
        filled = numbers.roll(997 * i).repeat(size // len(numbers) + 1)[:size].view(tensor.shape)
        tensor.copy_(filled * 5 / tensor.shape[1] ** 0.5 if tensor.dim() == 2 else filled + 2)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What decides the computation of a layer besides its weights: the classes and settings of its modules."""
    found = []
    for name, module in layer.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "layer_idx"}
        found.append((name, type(module), tuple(settings.items())))
    return tuple(found)


def _candidates(model: nn.Module) -> Iterator[Any]:
    """Layers with these parts and shapes, in float32 on a CPU; what they compute is found by comparison."""
    for module in model.modules():
        layer: Any = module
        try:
            if _has_the_form(layer):
                yield layer
        except (AttributeError, IndexError):  # a part is missing
            continue


def _has_the_form(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = (getattr(attention, f"{name}_proj") for name in "qkvo")
    linears = [q, k, v, o, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [n for name in ("q_norm", "k_norm") if (n := getattr(attention, name, None)) is not None]
    dim, _, _ = attention.head_dim, attention.layer_idx, attention.scaling
    # Adapters and quantised layers have products of their own.
    if not all(type(linear) is nn.Linear for linear in linears) or any(x.bias is not None for x in linears[3:]):
        return False
    # The compiled code relies on these shapes.
    (inner, hidden), kv_size, (wide, _) = q.weight.shape, len(k.weight), mlp.gate_proj.weight.shape
    shapes = [(inner, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, inner)]
    shapes += [(wide, hidden), (wide, hidden), (hidden, wide)]
    if [tuple(linear.weight.shape) for linear in linears] != shapes or dim % 8 or inner % kv_size or kv_size % dim:
        return False
    if [tuple(norm.weight.shape) for norm in norms] != [(hidden,), (hidden,), (dim,), (dim,)][: len(norms)]:
        return False
    weights = [w for w in _weights(layer) if w is not None]
    # A weight besides these would be left out.
    if {id(w) for w in weights} != {id(w) for w in layer.parameters()} or len({_epsilon(n) for n in norms}) > 1:
        return False
    # A shard of FSDP is a Parameter of another class.
    is_plain = all(type(w) is nn.Parameter and w.dtype == torch.float32 and w.is_contiguous() for w in weights)
    return is_plain and all(w.is_cpu for w in weights) and "forward" not in vars(layer)


def _weights(layer: Any) -> list[Tensor | None]:
    """In the order of `_WEIGHTS`."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    norms = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return [
        layer.input_layernorm.weight, q.weight, k.weight, v.weight, attention.o_proj.weight, q.bias, k.bias, v.bias,
        *norms, layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
    ]  # fmt: skip


def _epsilon(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
