"""Load models and tokenizers from a local folder, a hub name or a GGUF file, by transformers, from safetensors only.

Nothing in a folder is executed or unpickled, and no weight is silently random: a tensor that is missing, unexpected or
of another shape is an error that names it. `embedded:*` models are built, not loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gspo.errors import DataError
from gspo.models import cache, gguf, registry

EMBEDDED = "embedded:"
# Tensors that older transformers versions stored and newer ones compute; ignoring them loses no weight.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def locate(path: str, key: str = "actor.path") -> str:
    """A path that transformers can load: the folder of a fetched model or of a converted .gguf file, else `path`."""
    if path in registry.MODELS and not Path(path).is_dir():
        return str(registry.fetched(path, key))
    return str(gguf.converted(path, key)) if path.endswith(gguf.SUFFIX) else path


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name, a .gguf file, a fetched or an embedded model."""
    path = locate(path, "tokenizer_path")
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        return embedded.build(path)[1]
    _refuse_code(path, "tokenizer_config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as cause:
        raise _unreachable(path, "tokenizer", "tokenizer_path", cause) from cause
    if not len(tokenizer):
        raise DataError(f"the tokenizer in {path!r} has an empty vocabulary: set tokenizer_path")
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
    path = locate(path)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        model: Any = embedded.build(path)[0]
        model = model.to(dtype)  # pyright: ignore[reportArgumentType]
    else:
        # Checked before transformers opens the folder.
        _refuse_code(path, "config.json")
        if not from_scratch:
            _refuse_pickles(path)
        with cache.quiet():
            model = _from_config(path, dtype, seed) if from_scratch else _from_weights(path, dtype)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, path)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


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


def _from_config(path: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as cause:
        raise _unreachable(path, "config", "actor.path", cause) from cause
    # The caller's random state does not change.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _from_weights(path: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        # ignore_mismatched_sizes: shapes are compared below, so that the error names every tensor, not only the first.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError) as cause:
        raise _unreachable(path, "model", "actor.path", cause) from cause
    except Exception as cause:
        # safetensors raises its own exception type for a damaged file.
        if type(cause).__name__ != "SafetensorError":
            raise
        raise DataError(f"a safetensors file in {path!r} is damaged: {cause}; fetch the model again") from cause
    model, info = loaded
    # transformers only logs these differences; here each one is an error.
    unexpected = [name for name in info["unexpected_keys"] if not name.endswith(_COMPUTED)]
    shapes = [f"{name} (file {tuple(got)}, model {tuple(want)})" for name, got, want in info["mismatched_keys"]]
    problems = [
        f"{what}: {_list(names)}"
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
            f"the weights in {path!r} are not those of {type(model).__name__}; {'; '.join(problems)}. "
            "Training would start from partly random weights: check actor.path"
        )
    return model


def _refuse_code(path: str, file: str) -> None:
    """DataError for a folder that would run its own Python code, before transformers reads it."""
    config = Path(path) / file
    if not config.is_file():
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as cause:
        raise DataError(f"{config} is not readable JSON: {cause}") from cause
    if isinstance(content, dict) and "auto_map" in content:
        raise DataError(
            f"{config} would run the folder's own Python code (auto_map), which is not allowed. "
            "Use an architecture of transformers, or remove auto_map if transformers has this one"
        )


def _refuse_pickles(path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        return
    # An adapter folder has safetensors, too, so it is recognised by its config file.
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} contains an adapter, not a model: actor.path must be a whole model; export the run with --merge"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickles:
            raise DataError(
                f"{folder} has its weights as pickle files ({_list(pickles)}), which can run code and are not allowed. "
                "Convert them to safetensors first"
            )
        raise DataError(
            f"{folder} has no *.safetensors file: actor.path must be a model folder "
            "(actor.init_from_scratch=true needs the config only)"
        )


def _unreachable(path: str, what: str, key: str, cause: Exception) -> DataError:
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    if Path(path).is_dir():
        return DataError(f"the {what} in {path!r} cannot be loaded: {first}; check {key}")
    # A hub name is `owner/name` or `name`; anything else was meant as a path.
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        return DataError(f"there is no folder {path!r}: check {key}")
    return DataError(
        f"the {what} {path!r} was not found: no such folder, and the hub did not provide it ({first}). Without "
        f"network, copy the model to this machine and set {key} to the folder, or use embedded:tiny"
    )


def _list(names: Iterable[Any], most: int = 8) -> str:
    names = sorted(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
