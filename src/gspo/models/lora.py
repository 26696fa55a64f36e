"""LoRA adapters by peft, injected into the model: it stays the transformers model that the other folders use.

A linear layer W becomes W + (alpha/rank)·B·A with W frozen and A, B trained. The experts of a mixture are 3-D tensors
[experts, out, in]: each expert has its own A and B (peft's `target_parameters`). B starts at zero, so the policy starts
as the base model. Dropout is 0: its noise would enter the ratio. The reference policy is the same model with the
adapter switched off. The frozen layers can be stored in 8 or 4 bits (QLoRA, `quantize_linears`); the policy is then
the quantised model with the adapter, for the sampler and the trainer alike.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gspo.errors import ConfigError, DataError
from gspo.models.folder import ADAPTER_WEIGHTS, Adapter, listed
from gspo.models.vision.parts import vision_parameters
from gspo.system import install_command, return_freed_memory

ALL_LINEAR, VISION, EXPERTS = "all-linear", "vision", "experts"
_NAME = "default"  # peft's name of the only adapter
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config fields of a mixture of experts
_BLOCK = 64  # numbers of a quantised weight that share one scale
_EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def add_adapter(model: PreTrainedModel, *, rank: int, alpha: int, target_modules: Sequence[str], seed: int) -> None:
    """Freeze `model` and add an adapter to its target modules, in place; A is a function of `seed`.

    The adapter of a half-precision model is float32: bfloat16 would round away updates of 1e-5.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError(f"actor.use_lora needs peft: {install_command('lora')}") from None
    layers = [name for name in target_modules if name != EXPERTS]
    tensors = list(expert_tensors(model)) if EXPERTS in target_modules else []
    if EXPERTS in target_modules and not tensors:
        raise ConfigError(
            f"actor.target_modules: {type(model).__name__} has no experts in packed tensors; remove {EXPERTS!r}"
        )
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=_targets(model, layers) if layers else [],
        target_parameters=tensors or None,
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    # A separate random state: adding an adapter does not change the caller's random numbers.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def quantize_linears(model: PreTrainedModel, bits: int) -> None:
    """Store every linear layer that `all-linear` names in 8 or 4 bits, in place; called before `add_adapter`.

    Embeddings, head, norms, biases, a vision tower and the packed experts of a mixture keep their dtype.
    """
    layers = {path: m for path, m in adaptable_layers(model).items() if type(m) is nn.Linear}
    if not layers:
        raise ConfigError(f"actor.lora_base_bits: {type(model).__name__} has no linear layer to quantise; remove it")
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, QuantizedLinear(layer, bits))
        # Temporary tensors leave holes between the codes: 0.1 to 0.2 GB for a model of 0.5 GB.
        return_freed_memory()
    # What was loaded may be views of the model's file, which stays in memory as long as one of them does.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a weight of 8 or 4 bits. A pass unpacks the weight, multiplies and drops it.

    Blocks of 64 numbers have one float32 scale. 8 bits: 255 equal steps; 4 bits: NF4, the code of QLoRA, by
    bitsandbytes. Nothing of the activations is rounded: that noise would enter the ratio.
    """

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a weight
        self.in_features, self.out_features, self.bits = layer.in_features, layer.out_features, bits
        self._dtype = layer.weight.dtype
        values = layer.weight.detach().float().contiguous()  # [out, in]
        if bits == 4:
            # As one row: on a CPU it unpacks rows that are no multiple of a block with the scales of other blocks.
            codes, how = _bitsandbytes().quantize_4bit(values.view(1, -1), blocksize=_BLOCK, quant_type="nf4")
            scales = how.absmax  # [blocks]
        else:
            blocks = nn.functional.pad(values.view(-1), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
            scales = blocks.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127  # [blocks]
            codes = (blocks / scales[:, None]).round().to(torch.int8)  # [blocks, 64]
        # Parameters, so that the digest of the frozen weights covers them.
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight that the layer computes with, [out, in]: a new tensor at every call."""
        num = self.out_features * self.in_features
        if self.bits == 8:
            values = self.codes.to(self.scales.dtype).mul_(self.scales[:, None]).view(-1)[:num]
        else:
            functions = _bitsandbytes()
            form: Any = {"shape": torch.Size((1, num)), "blocksize": _BLOCK, "quant_type": "nf4"}
            values = functions.dequantize_4bit(
                self.codes, functions.QuantState(self.scales, **form, dtype=torch.float32)
            )
        return values.view(self.out_features, self.in_features).to(self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        out: Any = _QuantizedProduct.apply(input, self)
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # As a plain layer: exports and sampler servers get weights by their usual names.
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


class _QuantizedProduct(torch.autograd.Function):
    """x·Wᵀ; the backward pass unpacks W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.layer.weight, None


def _bitsandbytes() -> Any:
    """bitsandbytes' functions that pack numbers into 4 bits; ConfigError if it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError:
        raise ConfigError(f"actor.lora_base_bits 4 needs bitsandbytes: {install_command('quantized')}") from None


def _targets(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Names of the layers to adapt; ConfigError for the head, or a layer that is not linear.

    Last parts of the names, which peft matches anywhere; in a vision-language model whole names, because the tower has
    layers with the same last parts.
    """
    if vision_parameters(model):
        return _targets_with_vision(model, names)
    head, is_moe = model.get_output_embeddings(), _is_moe(model)
    linear = sorted({path.rpartition(".")[2] for path in adaptable_layers(model)})
    if names == [ALL_LINEAR]:
        return linear
    for name in names:
        # peft matches by the last part of a name, so every layer with this name is checked.
        found = [m for path, m in model.named_modules() if path == name or path.endswith(f".{name}")]
        if not found or not all(_is_linear(m) for m in found) or (is_moe and name in _EXPERT_LAYERS):
            raise ConfigError(
                f"actor.target_modules: {type(model).__name__} has no linear layer {name!r}; it has {', '.join(linear)}"
                f", and [{ALL_LINEAR}] means all of these"
            )
        if head in found:
            raise ConfigError(
                f"actor.target_modules: {name!r} is the language-model head, whose weight may be the embedding's; "
                f"leave it out, or set [{ALL_LINEAR}]"
            )
    return names


def _targets_with_vision(model: PreTrainedModel, names: list[str]) -> list[str]:
    language, tower = adaptable_layers(model), set(vision_parameters(model))
    vision = [path for path, m in model.named_modules() if _is_linear(m) and f"{path}.weight" in tower]
    found: list[str] = []
    for name in names:
        own = [path for path in language if path == name or path.endswith(f".{name}")]
        chosen = vision if name == VISION else list(language) if name == ALL_LINEAR else own
        if not chosen:
            known = sorted({path.rpartition(".")[2] for path in language})
            raise ConfigError(
                f"actor.target_modules: the language part of {type(model).__name__} has no linear layer {name!r}; it "
                f"has {', '.join(known)}; [{ALL_LINEAR}] means all of these, and {VISION} the layers of the tower"
            )
        found += [path for path in chosen if path not in found]
    return found


def adaptable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer that an adapter on `all-linear` covers, by its name: all but the head and experts' names.

    Those of a vision tower are not among them.
    """
    head, is_moe, tower = model.get_output_embeddings(), _is_moe(model), set(vision_parameters(model))
    # Experts are one tensor per layer and not linear layers, but peft would match these names to them.
    return {
        path: module
        for path, module in model.named_modules()
        if _is_linear(module)
        and module is not head
        and f"{path}.weight" not in tower
        and not (is_moe and path.rpartition(".")[2] in _EXPERT_LAYERS)
    }


def expert_tensors(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The packed weights of a mixture's experts, [experts, out, in] or [experts, in, out], by name."""
    if not _is_moe(model):
        return {}
    return {name: p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}


def _is_moe(model: PreTrainedModel) -> bool:
    return any(hasattr(model.config.get_text_config(), name) for name in _NUM_EXPERTS)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Run the base model inside the block; ConfigError if `model` has no adapter.

    Only for passes without gradients: a layer recomputed after the block would use the adapter again.
    """
    layers = _layers(model)
    if not layers:
        raise ConfigError("the model has no adapter to switch off: set actor.use_lora, or set ref.path")
    for layer in layers.values():
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without adapter and with the same outputs: W + (alpha/rank)·B·A under W's name.

    `model` keeps its adapter; only adapted weights are new tensors.
    """
    layers = _layers(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # One layer around a linear layer; around experts one for each packed tensor, inside each other.
        owners = [path for path in _ancestors(name) if path in layers]
        value = tensor.detach()
        if not owners:
            state[name] = value
            continue
        # W and its bias are below the innermost `base_layer`; the adapter's own tensors (A, B) are left out.
        rest = name.removeprefix(f"{owners[0]}.base_layer.")
        if rest == name:
            continue
        for layer in (layers[path] for path in owners):
            if rest == getattr(layer, "parameter_name", "weight"):
                delta = layer.get_delta_weight(_NAME).detach()
                # Added in the adapter's dtype (float32 for a 16-bit model), so that the sum is rounded only once.
                value = (value.to(delta.dtype) + delta).to(value.dtype)
        state[f"{owners[-1]}.{rest}"] = value
    return state


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def base_digest(model: nn.Module) -> str:
    """sha256 of the frozen weights: names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            total.update(json.dumps([name, str(parameter.dtype), list(parameter.shape)]).encode())
            # As bytes, because numpy has no bfloat16.
            content: Any = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            total.update(content)
    return total.hexdigest()


def save_adapter(model: PreTrainedModel, to: Path, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors in the format of `PeftModel.from_pretrained`."""
    from peft import get_peft_model_state_dict

    write_adapter(model, get_peft_model_state_dict(model, adapter_name=_NAME), to, base)


def write_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor], to: Path, base: str) -> None:
    """The same with the given tensors instead of the model's, by the model's names."""
    adapters: Any = model.peft_config
    config: Any = copy.copy(adapters[_NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(config.target_modules)
    config.target_parameters = sorted(config.target_parameters) if config.target_parameters else None
    config.save_pretrained(str(to))
    # peft's names: its wrapper and its tuner add two levels around the model.
    named = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, to / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge_stored(model: PreTrainedModel, folder: Path, adapter: Adapter) -> None:
    """Add a stored adapter to the weights of its base model, in place: W + scale·B·A. peft is not needed."""
    layers: dict[str, Any] = {path: module for path, module in model.named_modules() if _is_linear(module)}
    factors: dict[str, dict[str, Tensor]] = {}  # layer → A [r, in] and B [out, r]
    for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items():
        path, _, factor = name.removeprefix("base_model.model.").rpartition(".lora_")
        factors.setdefault(path, {})[factor] = tensor
    wrong = [path for path, own in factors.items() if path not in layers or own.keys() != {"A.weight", "B.weight"}]
    for path, own in factors.items() if not wrong else ():
        down, up, weight = own["A.weight"].double(), own["B.weight"].double(), layers[path].weight
        scale = adapter.alpha / (len(down) ** (0.5 if adapter.rank_stabilized else 1))
        delta = scale * (up @ down) if up.shape[1:] == down.shape[:1] else down  # [out, in]
        delta = delta.T if type(layers[path]).__name__ == "Conv1D" else delta
        if delta.shape != weight.shape or not bool(delta.isfinite().all()):
            wrong.append(path)
            continue
        weight.copy_(weight.double() + delta)  # in float64, so that the sum is rounded once
    if wrong or not factors:
        raise DataError(
            f"{folder / ADAPTER_WEIGHTS} is not an adapter of {type(model).__name__} in {adapter.base!r}: "
            f"{listed(wrong) or 'no tensor'} is no linear layer of it, has other factors than A and B or other "
            "shapes, or is not finite"
        )


def _layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers by name; empty if peft is not installed."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
