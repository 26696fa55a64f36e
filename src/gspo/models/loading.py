"""Load models and tokenizers from a local folder, a hub name or a GGUF file, by transformers, from safetensors only.

`folder.py` checks a folder before transformers opens it. Nothing in it is executed or unpickled, and no weight is
silently random: a tensor that is missing, unexpected, of another shape or not finite is an error that names it.
`embedded:*` models are built, not loaded.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gspo.errors import DataError
from gspo.models import cache, gguf, registry
from gspo.models.folder import CONFIG, Shapes, check_settings, check_size, check_weights, listed, read_json

EMBEDDED = "embedded:"
# Tensors that older transformers versions stored and newer ones compute; ignoring them loses no weight.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.spm")  # of a hub repository


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that has passed the checks of `folder.py`."""

    path: Path
    config: Any  # transformers' PreTrainedConfig
    shapes: Shapes | None  # of the stored weights; None if only the config is used


def locate(path: str, key: str = "actor.path", *, weights: bool = True) -> str:
    """The local folder of a model: fetched, converted from a .gguf file, or downloaded. An embedded name stays one."""
    if path.startswith(EMBEDDED) or Path(path).is_dir():
        return path
    if path in registry.MODELS:
        return str(registry.fetched(path, key))
    if path.endswith(gguf.SUFFIX):
        return str(gguf.converted(path, key))
    # A hub name is `owner/name` or `name`; anything else was meant as a path.
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise DataError(f"there is no folder {path!r}: check {key}")
    # Only files of these kinds are downloaded, so a repository's pickles and code are not even on this machine.
    wanted = [*_TEXT_FILES, "*.safetensors"] if weights else [*_TEXT_FILES]
    try:
        return snapshot_download(path, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"])
    except IncompleteSnapshotError as incomplete:
        # Offline: the checks of the folder name what is missing and needed.
        return str(incomplete.snapshot_path)
    except Exception as cause:  # many types: of the library, the hub and the HTTP client
        raise DataError(
            f"the model {path!r} was not found: no such folder, and the hub did not provide it ({_first_line(cause)}). "
            f"Without network, copy the model to this machine and set {key} to the folder, or use embedded:tiny"
        ) from cause


def load_tokenizer(path: str, key: str = "tokenizer_path") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name, a .gguf file, a fetched or an embedded model."""
    path = locate(path, key, weights=False)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        return embedded.build(path)[1]
    check_settings(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as cause:  # the tokenizers library raises plain Exceptions
        # This names the file if it is not JSON, or nested too deeply.
        if (file := Path(path) / "tokenizer.json").exists():
            read_json(file)
        raise DataError(f"the tokenizer in {path!r} cannot be loaded: {_first_line(cause)}; check {key}") from cause
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
) -> PreTrainedModel:
    """The causal language model of a folder, a hub name, a .gguf file, a fetched or an embedded model; in eval mode.

    `from_scratch` uses the config only and draws weights from `seed`. With `tokenizer`, a vocabulary that is too small
    for it is an error.
    """
    path = locate(path, weights=not from_scratch)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        model: Any = embedded.build(path)[0]
        model = model.to(dtype)  # pyright: ignore[reportArgumentType]
    else:
        found = open_folder(path, weights=not from_scratch, dtype=dtype)
        model = _from_config(found.config, dtype, seed) if from_scratch else _from_weights(found, dtype)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, path)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def open_folder(
    path: str, key: str = "actor.path", *, weights: bool, dtype: torch.dtype, kind: Any = AutoModelForCausalLM
) -> ModelFolder:
    """Check a folder without reading its weights. `kind` is the class of transformers that will load it."""
    folder = Path(path)
    content = check_settings(folder)
    shapes = check_weights(folder, key) if weights else None
    family = content.get("model_type")
    if family not in CONFIG_MAPPING:
        found = f"has model_type {family!r}, which transformers {transformers.__version__} does not have"
        raise DataError(f"{folder / CONFIG} {found if family else 'has no model_type'}: check {key}")
    with cache.quiet():
        try:
            model = _without_weights(kind, content)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as cause:  # transformers' own code runs on the folder's values, and may raise anything
            raise _bad_config(kind, folder / CONFIG, content, cause, key) from cause
    check_size(model, str(folder / CONFIG), shapes, dtype.itemsize)
    return ModelFolder(folder, config, shapes)


def read_weights(
    found: ModelFolder, dtype: torch.dtype, kind: Any = AutoModelForCausalLM
) -> tuple[Any, dict[str, Any]]:
    """The model of a checked folder, and transformers' report of tensors that do not fit. Every weight is finite."""
    try:
        with cache.quiet():
            # ignore_mismatched_sizes: the caller compares shapes, so that an error names every tensor.
            model, info = kind.from_pretrained(
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


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """DataError if the tokenizer has ids without an embedding in the model."""
    # The matrix may have more rows than the tokenizer has tokens (padding to a multiple), but not fewer.
    num_rows = len(cast("torch.nn.Embedding", model.get_input_embeddings()).weight)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= num_rows:
        raise DataError(
            f"the tokenizer has token ids up to {highest} but {path!r} has embeddings for {num_rows}: "
            "they do not fit together; set tokenizer_path to the model's own tokenizer"
        )


def _from_config(config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    # The caller's random state does not change.
    with cache.quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _from_weights(found: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
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
            "Training would start from partly random weights: check actor.path"
        )
    return model


def _first_line(cause: Exception) -> str:
    """The error in one line; transformers' validation errors have the reason in the second."""
    lines = [line.strip() for line in str(cause).strip().splitlines()[:2] if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines):.300}" if lines else type(cause).__name__
