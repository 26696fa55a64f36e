"""The shape of a model for `gspo doctor`: its config.json, and its parameters counted on torch's meta device.

The meta device builds the real transformers model without its weights, so mixtures of experts, tied embeddings and
adapters are counted as they are. Only `count_weights` imports torch. Models that are known by name have their counts in
shapes.json; a model that is not on this machine has no shape, and the reason is shown.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from gspo.errors import GspoError
from gspo.models.folder import absurd, check_values, read_json
from gspo.models.locate import hub_cache, snapshot

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Unknown:
    """A model without a known shape, and why.

    >>> Unknown("Qwen/Qwen3-8B is not in the local Hugging Face cache").reason
    'Qwen/Qwen3-8B is not in the local Hugging Face cache'
    """

    reason: str


@dataclass(frozen=True)
class ModelFields:
    """The fields of a model's config.json, and where they are from."""

    name: str
    fields: Mapping[str, Any]

    @property
    def context(self) -> int | None:
        """The longest sequence that the model was made for, in tokens."""
        value = {**self.fields, **(self.fields.get("text_config") or {})}.get("max_position_embeddings")
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@dataclass(frozen=True)
class Shape:
    """Parameters of a model, and the sizes that the memory estimate needs."""

    family: str
    parameters: int
    head: int  # parameters of the language-model head; 0 where it is tied to the embedding
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    # Layers that LoRA can adapt: (name with * for numbers, rows + columns summed over all layers of that name, layers).
    linears: tuple[tuple[str, int, int], ...]
    linear_parameters: int  # of the weights that actor.lora_base_bits quantises
    activations: int  # numbers per token that a forward pass keeps for the backward pass, without the head
    # The same sum for the experts' packed tensors: experts × (rows + columns).
    expert_linears: int = 0


# config.json of the models that examples/fetch.py fetches, for what they need before they are there.
FETCHED: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
}


def find_source(path: str) -> ModelFields | Unknown:
    """The config.json of a folder, a cached hub model, an embedded model or one that can be fetched."""
    try:
        if not os.path.isdir(path):
            if "/" not in path:
                from gspo.models import embedded

                if path in FETCHED:
                    return ModelFields(path, FETCHED[path])
                if path.startswith("embedded:"):
                    return ModelFields(path, embedded.shape(path))
            if path.endswith(".gguf"):
                return Unknown(f"{path}: the shape of a GGUF file is not read before the model is loaded")
        file = _config_file(path)
        if file is None:
            return Unknown(f"{path}: there is no folder with a config.json, and no snapshot in {hub_cache()}")
        fields = read_json(file)
        # `count_weights` builds the model, so the settings must not be able to fetch code.
        check_values(fields, file)
        return ModelFields(str(file), fields)
    except (GspoError, OSError, ValueError) as error:
        return Unknown(f"{path}: {error}")


def _config_file(path: str) -> Path | None:
    folder = Path(path).expanduser() if os.path.isdir(os.path.expanduser(path)) else snapshot(path)
    return folder / "config.json" if folder is not None and (folder / "config.json").is_file() else None


def shape_of(source: ModelFields) -> Shape | Unknown:
    """The shape of a model: from shapes.json where its name is known, else counted (imports torch)."""
    known = json.loads((files("gspo.doctor") / "shapes.json").read_text(encoding="utf-8")).get(source.name)
    if known is not None:
        return Shape(**{**known, "linears": tuple(map(tuple, known["linears"]))})
    return count_weights(source)


def count_weights(source: ModelFields) -> Shape | Unknown:
    """Build the model on the meta device and count; Unknown with the reason where transformers cannot build it."""
    # Even on the meta device a huge number of layers would take memory and minutes.
    if reason := absurd(source.fields):
        return Unknown(f"{source.name}: {reason}")
    import torch
    from transformers import AutoConfig

    from gspo.models.cache import quiet
    from gspo.models.loading import policy_class
    from gspo.models.lora import adaptable_layers, expert_tensors

    fields = dict(source.fields)
    try:
        # The meta device has shapes but no storage, so large models can be counted on any machine.
        with quiet(), torch.device("meta"):
            config = AutoConfig.for_model(str(fields.pop("model_type", None)), **fields)
            model = policy_class(config.model_type).from_config(config, trust_remote_code=False)
        text, head = model.config.get_text_config(), model.get_output_embeddings()
        shared = model.get_input_embeddings().weight
        heads = text.num_attention_heads
        linears, numbers, quantized = Counter[str](), Counter[str](), 0
        for path, layer in adaptable_layers(model).items():
            name, weight = re.sub(r"\d+", "*", path), layer.get_parameter("weight")
            linears[name] += sum(weight.shape)
            numbers[name] += 1
            quantized += weight.numel() if type(layer) is torch.nn.Linear else 0
        return Shape(
            family=model.config.model_type,
            parameters=sum(p.numel() for p in model.parameters()),
            head=0 if head.weight is shared else sum(p.numel() for p in head.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            experts=next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0),
            linears=tuple((name, size, numbers[name]) for name, size in linears.items()),
            linear_parameters=quantized,
            activations=_activations(model),
            expert_linears=sum(p.shape[0] * sum(p.shape[1:]) for p in expert_tensors(model).values()),
        )
    except Exception as error:  # whatever a foreign config.json makes transformers raise
        said = " ".join(str(error).split())
        return Unknown(f"{source.name}: transformers cannot build this model: {type(error).__name__}: {said:.200}")


def _activations(model: Any) -> int:
    """Numbers per token that autograd keeps: passes of three lengths on the meta device, without the quadratic part.

    The attention of a run keeps nothing that is quadratic in the length. 0 if the model cannot run there.
    """
    import torch

    from gspo.learner.policy.recompute import recompute_gated_products

    recompute_gated_products(model)
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def kept(num: int) -> float:
        held: dict[int, torch.Tensor] = {}  # by storage: a tensor that two operations keep counts once

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # With a mask of its final form, transformers looks at no values to make one.
            mask = torch.zeros(1, 1, num, num, device="meta")
            ids = torch.zeros(1, num, dtype=torch.long, device="meta")
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        return sum(x.untyped_storage().nbytes() for key, x in held.items() if key not in own) / 4

    try:
        one, two, three = (kept(16 * num) for num in (1, 2, 3))
    except Exception:  # a pass that depends on values, or a kernel without a meta form
        return 0
    square = (three - 2 * two + one) / 2
    return round((two - one - 3 * square) / 16)


def adapter_parameters(shape: Shape, rank: int, target_modules: Sequence[str]) -> int | None:
    """Parameters of a LoRA adapter: rank × (rows + columns) of each adapted layer; None if a name matches no layer."""
    targets = [name for name in target_modules if name != "experts"]
    has_experts = len(targets) < len(target_modules)
    if has_experts and not shape.expert_linears:
        return None
    total = rank * shape.expert_linears if has_experts else 0
    found = [_adapted(shape, target) for target in targets]
    if not all(found):
        return None
    return total + rank * sum(size for layers in found for _, size, _ in layers)


def adapted_layers(shape: Shape, target_modules: Sequence[str]) -> int:
    """The number of linear layers with an adapter."""
    return sum(num for target in target_modules for _, _, num in _adapted(shape, target))


def _adapted(shape: Shape, target: str) -> list[tuple[str, int, int]]:
    if target == "all-linear":
        return list(shape.linears)
    return [layer for layer in shape.linears if f".{layer[0]}".endswith(f".{target}")]
