"""The shape of a model and the bytes of its tensors. Torch-free, except where parameters must be counted.

The meta device builds the real transformers model without its weights, so mixtures of experts, tied embeddings and
adapters are counted as they are. Only `count_weights` imports torch. Models that are known by name have their counts in
shapes.json; a model that is not on this machine has no shape, and the reason is shown.

Not all of them exist at the same time: `peak` has the rule. `gspo bench --workload memory` compares it with the peak of
real runs on a CPU (docs/memory.md). Allocators and kernels of GPUs need memory in addition.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from gspo.errors import GspoError
from gspo.models import absurd, check_values, hub_cache, read_settings, snapshot
from gspo.system import count, human, parse_json

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
FETCHED: Mapping[str, Mapping[str, Any]] = parse_json((files("gspo.doctor") / "fetched.json").read_bytes())


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
        fields = read_settings(file)
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
    known = parse_json((files("gspo.doctor") / "shapes.json").read_bytes()).get(source.name)
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

    from gspo.models import adaptable_layers, expert_tensors, policy_class, quiet

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

    from gspo.learner import recompute_gated_products

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


# Of a training process on a CPU: its bytes without the tensors of model and pass, and how much more memory a pass takes
# than the tensors that it keeps, because the C library's heap has gaps. Both are fitted to the peaks of lab/memory.py.
LIBRARIES, HEAP = 500 * 10**6, 1.15
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Item:
    """One line of the estimate; `num_bytes` None: unknown. `side`: trainer, sampler, comparison (not in a sum).

    `when` the trainer holds it: always; in a pass (activations and logits, from the forward pass on); gradients, which
    replace the activations in the backward pass; loading, until the first pass.
    """

    name: str
    num_bytes: int | None
    how: str
    side: str = "trainer"
    when: Literal["always", "pass", "gradients", "loading"] = "always"


def peak(items: Iterable[Item], num_micro_batches: int) -> int | None:
    """Bytes of the trainer at its peak; None if an item is unknown. 0 micro-batches: without activations and logits.

    In the backward pass activations are freed as gradients appear. Gradients of one micro-batch stay for the next.
    """
    sums = {"always": 0, "pass": 0, "gradients": 0, "loading": 0}
    for item in items:
        if item.side == "trainer":
            if item.num_bytes is None:
                return None
            sums[item.when] += item.num_bytes
    passes, gradients = sums["pass"] if num_micro_batches else 0, sums["gradients"]
    training = passes + gradients if num_micro_batches > 1 else max(passes, gradients)
    return sums["always"] + max(training, sums["loading"])


def activations_item(
    shape: Shape, *, tokens: int, dtype: str, checkpointing: bool, adapter_numbers: int, heap: float, note: str = ""
) -> Item:
    """What the forward pass of one micro-batch keeps for the backward pass. `adapter_numbers`: per token, of LoRA."""
    each, rest = shape.activations + adapter_numbers, ""
    if not shape.activations:
        return Item("activations", None, "they cannot be counted without the model's weights", side="comparison")
    if checkpointing:
        # The input of every layer, and one layer at a time.
        each, rest = shape.layers * shape.hidden + each // shape.layers, ", recomputed layer by layer"
    size = BYTES[dtype]
    gaps = f", × {heap} for gaps in the heap" if heap > 1 else ""
    how = f"{tokens:,} tokens × {each:,} numbers × {size} bytes{rest}{gaps}{note}"
    return Item("activations, at most", int(tokens * each * size * heap), how, when="pass")


def parameters_item(what: str, num: int, dtype: str, num_shards: int, note: str = "") -> Item:
    shards = f" / {num_shards} ranks" if num_shards > 1 else ""
    how = f"{count(num)} × {BYTES[dtype]} bytes ({dtype}){shards}{note}"
    return Item(f"{what} parameters", num * BYTES[dtype] // num_shards, how)


def quantized_item(what: str, num: int, bits: int, saved_from: str) -> Item:
    """`num` frozen parameters in 8 or 4 bits; blocks of 64 have one scale of 4 bytes."""
    return Item(
        f"{what} parameters, quantised",
        num * bits // 8 + num * 4 // 64,
        f"{count(num)} × {bits} bits and their scales, instead of {BYTES[saved_from]} bytes ({saved_from})",
    )


def training_items(
    what: str, num: int, dtype: str, optimizer: str, num_shards: int, *, offload: bool = False
) -> list[Item]:
    """Gradients and optimizer state of `num` trained parameters on one rank, sharded over `num_shards`.

    `offload`: the state is in the host's memory, and not in the sum.
    """
    size, shards = BYTES[dtype], f" / {num_shards} ranks" if num_shards > 1 else ""
    parts = []
    if optimizer != "sgd":
        packed = optimizer == "adamw8bit"
        # Blocks of 256 numbers have one scale of 4 bytes.
        parts = [("two moments of 8 bits", 2 * (1 + 4 / 256)) if packed else ("two moments", 2 * max(size, 4))]
        # AdamW of 16-bit weights trains a float32 copy of them: updates of 1e-6 would be lost in 16 bits.
        parts += [("a float32 copy of the weights", max(size, 4))] if size < 4 or offload else []
    each = sum(bytes_ for _, bytes_ in parts)
    kinds = " + ".join(kind for kind, _ in parts) or "none"
    return [
        Item(f"{what} gradients", num * size // num_shards, f"{count(num)} × {size} bytes{shards}", when="gradients"),
        Item(
            f"{what} optimizer state",
            int(num * each) // num_shards,
            f"{optimizer}: {kinds}, {count(num)} × {each:.4g} bytes{shards}"
            + (", in the host's memory" if offload else ""),
            side="comparison" if offload else "trainer",
        ),
    ]


def logits_items(shape: Shape, *, chunk: int, tokens_per_mb: int) -> list[Item]:
    """Two chunks of float32 logits (logits and exp), as we compute them, and what all logits at once would need."""
    row, chunk = shape.vocabulary * 4, min(chunk, tokens_per_mb)
    return [
        Item(
            "logits, two chunks",
            2 * chunk * row,
            f"2 × {chunk:,} positions × {shape.vocabulary:,} logits × 4 bytes",
            when="pass",
        ),
        Item(
            "(all logits at once)",
            tokens_per_mb * row,
            f"{tokens_per_mb:,} positions × {shape.vocabulary:,} × 4 bytes; not allocated",
            side="comparison",
        ),
    ]


def cache_item(
    shape: Shape,
    *,
    num_sequences: int,
    group_size: int,
    prompt_tokens: int | None,
    max_new_tokens: int,
    dtype: str,
    num_samplers: int = 1,
) -> Item:
    """Keys and values if every sequence reaches its maximum length; the prompt of a group is stored once."""
    # 2: keys and values.
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]
    # Rounded up.
    prompts = -(-num_sequences // group_size)
    tokens = num_sequences * max_new_tokens + prompts * (prompt_tokens or 0)
    how = f"{num_sequences:,} sequences × {max_new_tokens:,} tokens"
    how += (
        f" + {prompts:,} prompts × {prompt_tokens:,}"
        if prompt_tokens
        else f" (+ {human(prompts * per_token)} per token of prompt length)"
    )
    how += f", {human(per_token)} each" + (f", over {num_samplers} samplers" if num_samplers > 1 else "")
    return Item("KV cache, at most", tokens * per_token // num_samplers, how, side="sampler")
