"""Memory arithmetic for `gspo doctor`: a model's shape from its config.json, never from its weights. Torch-free.

Every figure is what the tensors need by their shapes; allocators, kernels and the framework come on top.
A model that is not on this machine has an `Unknown` shape with the reason, not a guess.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import GspoError
from gspo.system.text import count, human

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 10_000
MAX_CONFIG_BYTES = 4_000_000  # a config.json is a few kilobytes; anything beyond is not one

# Families whose decoder layer is the one counted below. Others are counted the same way and marked as inexact.
LLAMA_LIKE = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "phi3",
        "smollm3",
        "olmo2",
    ]
)
BIASED_QKV = frozenset({"qwen2", "qwen2_moe"})
QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})  # one scale per head dimension
WIDE_QK_NORM = frozenset({"olmo2"})  # one scale per projected dimension
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "smollm3"})


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer, and how often it occurs in the model.

    >>> Linear("q_proj", 8, 16, copies=2).parameters
    256
    """

    name: str
    rows: int
    columns: int
    copies: int
    adaptable: bool = True  # an adapter on "all-linear" covers it

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.copies


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs to know about a model."""

    source: str
    family: str
    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    experts: int
    linears: tuple[Linear, ...]
    exact: bool  # False: an unfamiliar family, counted as if it were Llama's


@dataclass(frozen=True)
class Unknown:
    """A shape that is not on this machine.

    >>> Unknown("Qwen/Qwen3-8B is not in the local Hugging Face cache").reason
    'Qwen/Qwen3-8B is not in the local Hugging Face cache'
    """

    reason: str


EmbeddedShape = Callable[[str], Mapping[str, Any] | None]


def find_shape(path: str, embedded: EmbeddedShape | None = None) -> Shape | Unknown:
    """The shape of `actor.path`.

    `embedded`, from models/ above, gives the config.json fields of a model that it knows by name: embedded ones and
    those that can be fetched; None for any other.
    """
    if path.startswith("embedded:") and embedded is None:
        return Unknown(f"{path}: the embedded models' shapes are not available here")
    if embedded is not None and "/" not in path and not path.endswith(".gguf") and not os.path.isdir(path):
        try:
            if (known := embedded(path)) is not None:
                return shape_of(known, path)
        except (GspoError, KeyError, TypeError, ValueError) as error:
            return Unknown(f"{path}: {error}")
    if path.endswith(".gguf"):
        return Unknown(f"{path}: the shape of a GGUF file is read when it is loaded")
    file = _config_file(path)
    if file is None:
        where = hub_cache()
        return Unknown(f"{path}: no config.json in such a folder, and no snapshot in {where}")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            return Unknown(f"{file}: too large for a model's config.json")
        fields = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            return Unknown(f"{file}: not a JSON object")
        return shape_of(fields, str(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return Unknown(f"{file}: {error}")


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps snapshots, by its own rules of environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _config_file(path: str) -> Path | None:
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            return folder / "config.json" if (folder / "config.json").is_file() else None
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or ".." in path:
            return None
        repository = hub_cache() / ("models--" + path.replace("/", "--"))
        main = repository / "refs" / "main"
        if main.is_file():
            named = repository / "snapshots" / main.read_text(encoding="utf-8").strip() / "config.json"
            if named.is_file():
                return named
        found = list((repository / "snapshots").glob("*/config.json"))
        return max(found, key=lambda file: file.stat().st_mtime) if found else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: expanduser without a home
        return None


def shape_of(fields: Mapping[str, Any], source: str) -> Shape:
    """Count parameters from config.json's fields.

    >>> tiny = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    ...         "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True}
    >>> shape_of(tiny, "here").parameters  # 80 embedding + 4·64 attention + 3·128 MLP + 3·8 norms
    744
    """
    text = fields.get("text_config")
    if isinstance(text, Mapping):  # a multimodal model: the language part is what we train
        fields = {**fields, **text}
    family = str(fields.get("model_type", "unknown"))
    hidden = _size(fields, "hidden_size")
    layers = _size(fields, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, which is no model")
    heads = _size(fields, "num_attention_heads")
    kv_heads = _size(fields, "num_key_value_heads", heads)
    head_dim = _size(fields, "head_dim", 256 if family.startswith("gemma") else max(1, hidden // heads))
    vocabulary = _size(fields, "vocab_size")
    tied = bool(fields.get("tie_word_embeddings", family in TIED_BY_DEFAULT))
    query, key = heads * head_dim, kv_heads * head_dim

    linears = (
        Linear("q_proj", hidden, query, layers),
        Linear("k_proj", hidden, key, layers),
        Linear("v_proj", hidden, key, layers),
        Linear("o_proj", query, hidden, layers),
        *_mlp(fields, hidden, layers),
    )
    embedding = vocabulary * hidden
    norms = (4 if family in FOUR_NORMS else 2) * hidden * layers + hidden
    if family in QK_NORM:
        norms += 2 * head_dim * layers
    elif family in WIDE_QK_NORM:
        norms += (query + key) * layers
    biases = 0
    if fields.get("attention_bias", family in BIASED_QKV):
        biases += (query + 2 * key + (0 if family in BIASED_QKV else hidden)) * layers
    if fields.get("mlp_bias"):
        biases += (2 * _size(fields, "intermediate_size") + hidden) * layers
    context = fields.get("max_position_embeddings")
    return Shape(
        source=source,
        family=family,
        parameters=sum(linear.parameters for linear in linears) + embedding * (1 if tied else 2) + norms + biases,
        layers=layers,
        hidden=hidden,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=context if isinstance(context, int) and not isinstance(context, bool) and context > 0 else None,
        experts=_experts(fields),
        linears=linears,
        exact=family in LLAMA_LIKE,
    )


def _mlp(fields: Mapping[str, Any], hidden: int, layers: int) -> Iterator[Linear]:
    """Gated MLPs: dense in some layers, one per expert in the others."""
    num_experts = _experts(fields)
    sparse = [layer for layer in range(layers) if num_experts and _is_sparse(fields, layer)]
    dense = layers - len(sparse)
    if dense:
        yield from _gated(hidden, _size(fields, "intermediate_size"), dense)
    if not sparse:
        return
    width = _size(fields, "moe_intermediate_size", fields.get("intermediate_size"))
    yield Linear("router", hidden, num_experts, len(sparse), adaptable=False)
    # Experts are fused three-dimensional parameters in transformers 5: no Linear for an adapter to find.
    yield Linear("experts", hidden, 3 * width, num_experts * len(sparse), adaptable=False)
    shared = _size(fields, "shared_expert_intermediate_size", 0)
    if shared:
        yield from _gated(hidden, shared, len(sparse))
        yield Linear("shared_expert_gate", hidden, 1, len(sparse), adaptable=False)
    elif fields.get("n_shared_experts"):
        yield from _gated(hidden, width * _size(fields, "n_shared_experts"), len(sparse))


def _gated(hidden: int, width: int, copies: int) -> Iterator[Linear]:
    yield Linear("gate_proj", hidden, width, copies)
    yield Linear("up_proj", hidden, width, copies)
    yield Linear("down_proj", width, hidden, copies)


def _experts(fields: Mapping[str, Any]) -> int:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.get(name):
            return _size(fields, name)
    return 0


def _is_sparse(fields: Mapping[str, Any], layer: int) -> bool:
    if layer in (fields.get("mlp_only_layers") or ()) or layer < (fields.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % _size(fields, "decoder_sparse_step", 1) == 0


def _size(fields: Mapping[str, Any], name: str, default: Any = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40 or (value == 0 and default != 0):
        raise ValueError(f"{name} is {value!r:.40}, a positive whole number was expected")
    return value


def adapter_parameters(shape: Shape, rank: int, target_modules: list[str]) -> int | None:
    """Parameters of a LoRA adapter: rank × (rows + columns) per adapted matrix; None where the names are not known."""
    everything = target_modules == ["all-linear"]
    chosen = [linear for linear in shape.linears if linear.adaptable and (everything or linear.name in target_modules)]
    if not everything and {linear.name for linear in chosen} != set(target_modules):
        return None
    return sum(rank * (linear.rows + linear.columns) * linear.copies for linear in chosen)


@dataclass(frozen=True)
class Item:
    """One line of the estimate; `num_bytes` None: unknown. `side`: trainer, sampler."""

    name: str
    num_bytes: int | None
    how: str
    side: str = "trainer"


def trainer_items(
    shape: Shape,
    *,
    dtype: str,
    optimizer: str,
    trained_parameters: int | None,
    num_shards: int,
    what: str = "actor",
) -> list[Item]:
    """Weights, gradients and optimizer state of one rank, sharded over `num_shards`."""
    size = BYTES[dtype]
    shards = f" / {num_shards} ranks" if num_shards > 1 else ""
    items = [
        Item(
            f"{what} parameters",
            shape.parameters * size // num_shards,
            f"{count(shape.parameters)} × {size} bytes ({dtype}){shards}",
        )
    ]
    if trained_parameters is None:
        unknown = "the adapter's size is unknown: target_modules names matrices the config.json does not show"
        return [*items, Item(f"{what} gradients and optimizer state", None, unknown)]
    items.append(
        Item(
            f"{what} gradients",
            trained_parameters * size // num_shards,
            f"{count(trained_parameters)} × {size} bytes{shards}",
        )
    )
    moments = 0 if optimizer == "sgd" else 8
    master = 4 if size < 4 else 0  # updates of 1e-6 vanish in 16-bit weights
    each = moments + master if size < 8 else 2 * moments
    kinds = " + ".join(
        word for word, used in (("two moments", moments), ("a float32 copy of the weights", master)) if used
    )
    items.append(
        Item(
            f"{what} optimizer state",
            trained_parameters * each // num_shards,
            f"{optimizer}: {kinds or 'none'}, {count(trained_parameters)} × {each} bytes{shards}",
        )
    )
    return items


def frozen_item(shape: Shape, what: str, dtype: str, num_shards: int) -> Item:
    size = BYTES[dtype]
    return Item(
        f"{what} parameters",
        shape.parameters * size // num_shards,
        f"{count(shape.parameters)} × {size} bytes ({dtype}), no gradients",
    )


def logits_items(shape: Shape, *, chunk: int, tokens_per_mb: int) -> list[Item]:
    """One chunk of float32 logits, as we compute them, beside what all at once would need."""
    row = shape.vocabulary * 4
    return [
        Item("logits, one chunk", chunk * row, f"{chunk:,} positions × {shape.vocabulary:,} logits × 4 bytes"),
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
    """Keys and values when every sequence has reached its longest; a group's prompt is stored once."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]
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
