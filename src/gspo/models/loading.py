"""Load models and tokenizers from a local folder, a hub name or a GGUF file, by transformers, from safetensors only.

`folder.py` checks a folder before transformers opens it. Nothing in it is executed or unpickled, and no weight is
silently random: a tensor that is missing, unexpected, of another shape or not finite is an error that names it.
`embedded:*` models are built, not loaded.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from gspo.errors import DataError
from gspo.models import cache
from gspo.models.find import EMBEDDED, locate
from gspo.models.folder import (
    CONFIG,
    Weights,
    check_names,
    check_settings,
    check_size,
    check_weights,
    listed,
    read_adapter,
    read_json,
    refuse_other_vocabulary,
)
from gspo.system import by_name

# Tensors that older transformers versions stored and newer ones compute; ignoring them loses no weight.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that has passed the checks of `folder.py`."""

    path: Path
    config: Any  # transformers' PreTrainedConfig
    weights: Weights | None  # in its files; None if only the config is used
    kind: Any  # transformers' class that loads it


def load_tokenizer(path: str, key: str = "tokenizer_path") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name, a .gguf file, a fetched or an embedded model."""
    path = locate(path, key, weights=False)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        return embedded.embedded_tokenizer(path)
    check_settings(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as cause:  # the tokenizers library raises plain Exceptions
        # This names the file if it is not JSON, or nested too deeply.
        if (file := Path(path) / "tokenizer.json").exists():
            read_json(file)
        raise DataError(f"{key}: the tokenizer in {path!r} cannot be loaded: {_first_line(cause)}") from cause
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not len(tokenizer):
        raise DataError(f"the tokenizer in {path!r} has an empty vocabulary: set {key}")
    return tokenizer


def load_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    from_scratch: bool = False,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    key: str = "actor.path",
    images: bool = False,
    adapters: bool = False,
) -> PreTrainedModel:
    """The language model of a folder, a hub name, a .gguf file, a fetched or an embedded model; in eval mode.

    `from_scratch` uses the config only and draws weights from `seed`. With `tokenizer`, a model of another vocabulary
    is an error. `images`: the run shows images, so a model is loaded with its vision tower, even if transformers has a
    class for its text part alone (Qwen3.5). `adapters`: a folder with a LoRA adapter is its base model with the adapter
    merged. Errors name `key`.
    """
    name, path = path, locate(path, key, weights=not from_scratch)
    if adapters and not path.startswith(EMBEDDED) and (adapter := read_adapter(Path(path), key)) is not None:
        # Merged on the CPU; a base model that is an adapter itself is refused.
        model: Any = load_model(adapter.base, dtype, tokenizer=tokenizer, key=key)
        by_name("gspo.models.lora:merge_stored")(model, Path(path), adapter)
        return model.to(device)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        if from_scratch:
            shape = AutoConfig.for_model(**embedded.shape(path))
            model = _from_config(policy_class(shape.model_type), shape, dtype, seed)
        else:
            model = embedded.build(path)[0]
        model = model.to(dtype)  # pyright: ignore[reportArgumentType]
    else:
        found = open_folder(path, key, weights=not from_scratch, dtype=dtype, images=images)
        if from_scratch:
            model = _from_config(found.kind, found.config, dtype, seed)
        else:
            model = _from_weights(found, dtype, key)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, name, key)
    find_padding_by_place(model)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def find_padding_by_place(model: PreTrainedModel) -> None:
    """Every token of a sequence is text, whatever its id, and positions count from 0.

    RoBERTa and its relatives and XLM take each token with the id of the pad token for padding, but a model can sample
    that token. RoBERTa's positions begin after the id of its pad token.
    """
    for module in model.modules():
        if (
            hasattr(module, "create_position_ids_from_input_ids")
            and "position_ids" in signature(module.forward).parameters
        ):
            module.register_forward_pre_hook(_true_positions, with_kwargs=True)
        if hasattr(module, "pad_index"):  # XLM: the length of a row is the number of tokens with another id
            module.pad_index = -1  # pyright: ignore


def _true_positions(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = inputs.get("position_ids")  # [B, T], or none
    if positions is None:
        tokens, past = inputs["input_ids"], inputs.get("past_key_values_length", 0)  # [B, T]
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand_as(tokens)
    return args, {**inputs, "position_ids": positions + module.padding_idx + 1}


def open_folder(
    path: str,
    key: str = "actor.path",
    *,
    weights: bool,
    dtype: torch.dtype | None = None,
    kind: Any = None,
    images: bool = False,
) -> ModelFolder:
    """Check a folder without reading its weights. `kind` is the class of transformers that will load it.

    None: the class of a policy (`policy_class`). `dtype` is that of random weights to be made in memory; None: none
    are made.
    """
    folder = Path(path)
    content = check_settings(folder)
    stored = check_weights(folder, key) if weights else None
    family = content.get("model_type")
    if family not in CONFIG_MAPPING:
        found = f"has model_type {family!r}, which transformers {transformers.__version__} does not have"
        raise DataError(f"{folder / CONFIG} {found if family else 'has no model_type'}: check {key}")
    kind = kind or policy_class(str(family), images=images)
    _refuse_encoder_decoder(kind, folder / CONFIG, content, key)
    with cache.quiet():
        try:
            model = _without_weights(kind, content)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as cause:  # transformers' own code runs on the folder's values, and may raise anything
            raise _bad_config(kind, folder / CONFIG, content, cause, key) from cause
    check_size(model, str(folder / CONFIG), stored, 0 if dtype is None else dtype.itemsize)
    if stored is not None:
        check_names(model, folder, stored)
    return ModelFolder(folder, config, stored, kind)


def policy_class(family: str, *, images: bool = False) -> Any:
    """transformers' class of a policy: a causal language model, with a vision tower if there is none without it."""
    with_tower = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if with_tower and (images or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def read_weights(found: ModelFolder, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model of a checked folder, and transformers' report of tensors that do not fit. Every weight is finite."""
    try:
        with cache.quiet():
            # ignore_mismatched_sizes: the caller compares shapes, so that an error names every tensor.
            model, info = found.kind.from_pretrained(
                found.path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as cause:
        # safetensors raises its own exception type for a damaged file.
        if type(cause).__name__ == "SafetensorError":
            raise DataError(f"a safetensors file in {str(found.path)!r} is damaged: {cause}; fetch it again") from cause
        raise DataError(f"the model in {str(found.path)!r} cannot be loaded: {_first_line(cause)}") from cause
    if not info["missing_keys"] and (bad := _not_finite(model)):
        raise DataError(
            f"the weights in {str(found.path)!r} are not finite: {listed(bad)} hold NaN or inf (read as {dtype}). "
            "The model is damaged, or its values are too large for this type"
        )
    return model, info


def _not_finite(model: PreTrainedModel) -> list[str]:
    # The sum shows NaN and inf in one pass without a copy; finite values whose sum overflows are looked at again.
    return [
        name
        for name, weight in model.named_parameters()
        if not bool(weight.detach().sum(dtype=torch.float32).isfinite()) and not bool(weight.isfinite().all())
    ]


def _refuse_encoder_decoder(kind: Any, file: Path, content: dict[str, Any], key: str) -> None:
    family = content["model_type"]
    default = getattr(CONFIG_MAPPING[family], "is_encoder_decoder", False)
    if kind in (AutoModelForCausalLM, AutoModelForImageTextToText) and content.get("is_encoder_decoder", default):
        raise DataError(
            f"{file}: {family} is an encoder-decoder model, and gspo trains causal language models (decoder only); "
            f"set {key} to one"
        )


def _without_weights(kind: Any, fields: dict[str, Any]) -> PreTrainedModel:
    """The model that a config.json describes, on the meta device: shapes without memory."""
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=False)


def _bad_config(kind: Any, file: Path, content: dict[str, Any], cause: Exception, key: str) -> DataError:
    """Name the setting at fault: without it, or with 1 in its place, transformers can build the model."""
    others = [(name, {other: content[other] for other in content if other != name}) for name in content]
    others += [(name, {**content, name: 1}) for name, value in content.items() if isinstance(value, int)]
    for name, fields in others:
        with contextlib.suppress(Exception):
            _without_weights(kind, fields)
            value = f"{content[name]!r}"
            return DataError(f"{file}: {name} is {value:.100}: {_first_line(cause)}; check {key}")
    return DataError(f"{file}: transformers cannot build this model: {_first_line(cause)}; check {key}")


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str, key: str = "actor.path"
) -> None:
    """DataError if the tokenizer is not that of the model: ids without an embedding, or ids of other tokens."""
    # The matrix may have more rows than the tokenizer has tokens (padding to a multiple), but not fewer.
    num_rows = len(cast("torch.nn.Embedding", model.get_input_embeddings()).weight)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= num_rows:
        raise DataError(
            f"{key}: the tokenizer has token ids up to {highest} but {path!r} has embeddings for {num_rows}: "
            "they do not fit together; set tokenizer_path to the model's own tokenizer"
        )
    refuse_foreign_vocabulary(tokenizer, path, key)


def refuse_foreign_vocabulary(tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
    """DataError if the model in `path` was trained with another vocabulary; a folder without a tokenizer passes."""
    if path == getattr(tokenizer, "name_or_path", None):
        return
    # transformers makes an empty tokenizer for a folder that has none.
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in files):
        return
    try:
        own, used = load_tokenizer(path, key).get_vocab(), tokenizer.get_vocab()
    except DataError:
        return
    refuse_other_vocabulary(own, used, path, key)


def _from_config(kind: Any, config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with cache.quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind.from_config(config, dtype=dtype, trust_remote_code=False)


def _from_weights(found: ModelFolder, dtype: torch.dtype, key: str) -> PreTrainedModel:
    model, info = read_weights(found, dtype)
    # transformers only logs these differences; here each one is an error.
    unexpected = [name for name in info["unexpected_keys"] if not name.endswith(_COMPUTED)]
    shapes = [f"{name} (file {tuple(got)}, model {tuple(want)})" for name, got, want in info["mismatched_keys"]]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("missing tensors", info["missing_keys"]),
            ("unexpected tensors", unexpected),
            ("tensors of another shape", shapes),
            ("errors", info.get("error_msgs") or ()),
        )
        if names
    ]
    if problems:
        raise DataError(
            f"the weights in {str(found.path)!r} are not those of {type(model).__name__}; {'; '.join(problems)}. "
            f"Training would start from partly random weights: check {key}"
        )
    return model


def _first_line(cause: Exception) -> str:
    """The error in one line; transformers' validation errors have the reason in the second."""
    lines = [line.strip() for line in str(cause).strip().splitlines()[:2] if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines):.300}" if lines else type(cause).__name__


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return sorted(e for e in ends if e is not None)
