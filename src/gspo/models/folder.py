"""A model folder, checked before transformers opens it: its settings, the names of its files and its weight headers.

A folder is data from a stranger. No path may leave it, no pickle is opened, and a setting that would fetch or run code
is an error. Torch-free: shapes come from the headers of the safetensors files.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from gspo.errors import DataError
from gspo.system import Limits, memory_bytes, read_json

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Small JSON files with settings. tokenizer.json has none, and is parsed by the tokenizers library.
SETTINGS = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",  # of images
    "processor_config.json",
)
MAX_BYTES = {INDEX: 64 * 2**20, "tokenizer.json": 512 * 2**20, "added_tokens.json": 64 * 2**20}
MAX_SETTINGS_BYTES = 16 * 2**20  # a tokenizer_config.json may list every special token
MAX_REPEATS = 10_000  # layers or experts: a larger number is a mistake, and building them would take forever
MAX_NUMBER = 2**40  # of any other size in config.json
_SLACK = 2**27  # elements by which config.json and the weight files may differ before memory is allocated
_MAX_BUFFERS = 2**30  # elements of tensors that a model computes from its config, such as masks and positions
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors")
_OWN_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers would read these instead
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
# Names of settings that count parts: transformers makes a Python object for each.
_REPEATED = re.compile(r"(?!.*(size|dim|length|capacity|window)).*(layer|expert|depth|block)|num_labels")
# Settings whose other values give NaN, or a model that nobody can use.
_RANGES = (
    (re.compile(r"(^|_)eps(ilon)?$"), 0.0, 1.0),
    (re.compile(r"(^|_)(rope_theta|rotary_emb_base|rope_local_base_freq)$"), 1e-6, 1e15),
    (re.compile(r"dropout|pdrop$"), 0.0, 1.0),
)
# Setting → values that need nothing but torch. Others are fetched from the hub where `kernels` is installed.
_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# Setting → why it is refused, if it is set.
_REFUSED = {
    "audio_tokenizer": "would load another model; remove it",
    "auto_map": "would run the folder's own Python code. Use an architecture of transformers, or remove auto_map if "
    "transformers has this one",
    "custom_generate": "would run the folder's own Python code; remove it",
    "quantization_config": "means quantized weights, which cannot be trained; use the model's unquantized weights",
    "transformers_weights": f"names another weight file than {WEIGHTS} or {INDEX}; remove it and rename the file",
    "use_pretrained_backbone": "would load another model from the hub; remove it",
}
_NAMES = (
    "model_type",
    "processor_class",
    "feature_extractor_type",
    "image_processor_type",
)  # of classes in transformers
# Settings of peft's LoRA that change what an adapter adds to its model, beside its rank, alpha and use_rslora.
_ADAPTER_REFUSED = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "kasa_config", "layer_replication", "lora_bias",
    "modules_to_save", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
_TOKENIZER = re.compile(r"\w*(Tokenizer|Backend)\w*", re.ASCII)


class Stored(NamedTuple):
    """A tensor of a weight file."""

    shape: tuple[int, ...]
    dtype: str = "F32"  # as safetensors writes it


Weights = dict[str, Stored]  # tensor → how it is stored


def check_settings(folder: Path) -> dict[str, Any]:
    """The content of config.json. DataError if a file with settings is unreadable, or asks for what is not allowed."""
    # Files that transformers may open without being named: tokenizer files and chat templates.
    for entry in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        _check_place(folder, entry)
    read = {name: read_settings(folder / name) for name in SETTINGS if (folder / name).exists()}
    for name, content in read.items():
        if name not in ("added_tokens.json", "special_tokens_map.json"):
            check_values(content, folder / name)
    config = read.get(CONFIG, {})
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(value := config.get(name), int) and value < 1:
            raise DataError(f"{folder / CONFIG}: {name} is {value}; a model has at least 1 position")
    if reason := absurd(config):
        raise DataError(f"{folder / CONFIG}: {reason}")
    return config


def check_weights(folder: Path, key: str) -> Weights:
    """The weights that transformers will read, by their headers: of one file, or of the shards of an index."""
    if (folder / ADAPTER).exists():
        what = "an adapter beside its model" if (folder / CONFIG).is_file() else "an adapter, not a model"
        raise DataError(
            f"{folder} contains {what}: {key} must be a whole model; export the run with --merge, or remove {ADAPTER}"
        )
    names = sorted(entry.name for entry in folder.iterdir())
    if own := [name for name in names if _OWN_SHARD.fullmatch(name)]:
        raise DataError(f"{folder / own[0]} is a part of a distributed checkpoint; save the model as {WEIGHTS} first")
    shards, in_index = _shards(folder, key)
    weights: Weights = {}
    place: dict[str, str] = {}
    for shard in shards:
        _check_place(folder, folder / shard)
        for name, stored in _header(folder / shard).items():
            if name in place:
                raise DataError(f"tensor {name!r} is in {place[name]} and in {shard} of {folder}: remove one of them")
            weights[name], place[name] = stored, shard
    if wrong := sorted(name for name, shard in in_index.items() if place.get(name) != shard):
        raise DataError(
            f"{folder / INDEX}: {listed(wrong)} should be in {in_index[wrong[0]]}, but is not: download the model again"
        )
    return weights


class Adapter(NamedTuple):
    """A LoRA adapter: W + scale·B·A, scale = alpha/rank, or alpha/√rank with `rank_stabilized`."""

    base: str  # folder or name of its model
    alpha: float
    rank_stabilized: bool
    weights: Weights


def read_adapter(folder: Path, key: str) -> Adapter | None:
    """The LoRA adapter in a folder, as peft writes it; None: the folder has no adapter, or one beside a model."""
    file = folder / ADAPTER
    if not file.exists() or (folder / CONFIG).exists():
        return None
    for entry in folder.iterdir():
        _check_place(folder, entry)
    settings = read_settings(file)
    base, alpha, start = (settings.get(name) for name in ("base_model_name_or_path", "lora_alpha", "init_lora_weights"))
    if settings.get("peft_type") != "LORA":
        raise DataError(f"{file}: peft_type is {settings.get('peft_type')!r}; {key} may be a LoRA adapter only")
    changed = [name for name in _ADAPTER_REFUSED if settings.get(name)]
    if settings.get("bias", "none") != "none":
        changed.append("bias")
    # Others start from a decomposition of the base model, and change its weights too.
    if start not in (None, True, False, "gaussian"):
        changed.append("init_lora_weights")
    if changed:
        what = f"{changed[0]} is {settings[changed[0]]!r}"
        raise DataError(f"{file}: {what:.200}, which is not plain LoRA; merge the adapter into its model first")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise DataError(f"{file}: lora_alpha is {alpha!r}; it must be a number")
    if not isinstance(base, str) or not base:
        raise DataError(f"{file}: base_model_name_or_path is {base!r}; set it to the model of the adapter")
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise _no_weights(folder, key)
    return Adapter(base, float(alpha), settings.get("use_rslora") is True, _header(folder / ADAPTER_WEIGHTS))


def check_size(model: Any, source: str, weights: Weights | None, itemsize: int) -> None:
    """DataError before memory is allocated for sizes in a config that the weight files, or the machine, lack.

    `model` is on the meta device, `source` names the file with its sizes; without `weights` they are random.
    """
    needed = sum(parameter.numel() for parameter in model.parameters())
    computed = sum(buffer.numel() for buffer in model.buffers())
    if computed > _MAX_BUFFERS + needed:
        raise DataError(f"{source} describes masks and position tables of {computed:,} numbers; lower its sizes")
    if weights is None:
        memory = memory_bytes()
        if needed * itemsize > memory:
            raise DataError(
                f"{source} describes {needed:,} parameters, which take {needed * itemsize / 1e9:,.0f} GB; this machine "
                f"has {memory / 1e9:,.0f} GB"
            )
        return
    total = sum(math.prod(stored.shape) for stored in weights.values())
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    other = {name: stored.shape for name, stored in weights.items() if name in own and own[name] != stored.shape}
    if needed > total + _SLACK or sum(map(math.prod, other.values())) > _SLACK:
        wrong = [f"{name} (file {shape}, model {own[name]})" for name, shape in other.items()]
        raise DataError(
            f"{source} describes {needed:,} parameters, the weight files hold {total:,}: they are not of the same "
            f"model. Tensors of another shape: {listed(wrong, 3) or 'none'}"
        )


def check_names(model: Any, folder: Path, weights: Weights) -> None:
    """DataError for tensors that transformers would convert or overwrite silently."""
    parameters = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    if wrong := [
        f"{name} ({weights[name].dtype})"
        for name in parameters & set(weights)
        if (not weights[name].dtype.startswith(("F", "BF")))
    ]:
        raise DataError(f"weights in {folder} are not floating-point numbers: {listed(wrong)}: use unquantized weights")
    # transformers reads `x` as `model.x`, so that both would be one parameter.
    prefix = getattr(model, "base_model_prefix", "")
    if twice := [name for name in weights if prefix and f"{prefix}.{name}" in weights]:
        raise DataError(f"{folder} has {listed(twice)} also as {prefix}.{min(twice)}: remove one of them")


def refuse_other_vocabulary(own: Mapping[str, Any], used: Mapping[str, int], path: str, key: str) -> None:
    """DataError if less than 99 % of the run's tokens (`used`) have the same id in a model's vocabulary (`own`)."""
    same = sum(own.get(token) == number for token, number in used.items())
    # Models of one family may differ in a few special tokens.
    if same < 0.99 * len(used):
        raise DataError(
            f"{key}: {path!r} has another vocabulary than the tokenizer of this run: {len(own):,} tokens and "
            f"{len(used):,} tokens, and only {same:,} tokens have the same id in both, so token ids would mean other "
            f"tokens to this model. Set {key} to a model with the vocabulary of the tokenizer"
            + ("" if key != "actor.path" else ", or tokenizer_path to the model's own tokenizer")
        )


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object of bounded size, without duplicate keys; DataError names the file."""
    return read_json(file, DataError, Limits(MAX_BYTES.get(file.name, MAX_SETTINGS_BYTES)), strict=True)


def absurd(fields: Mapping[str, Any]) -> str | None:
    """A number in a config.json that no model has; nested sections are looked at too."""
    for name, value in _settings(fields):
        if isinstance(value, float) and value != value:
            return f"{name} is NaN"
        for pattern, low, high in _RANGES if isinstance(value, int | float) else ():
            if pattern.search(name) and not low <= value <= high:
                return f"{name} is {value:.6g}; it must be in {low:g}…{high:g}"
        if not isinstance(value, int):
            continue
        if _REPEATED.match(name) and value > MAX_REPEATS:
            return f"{name} is {value:,}, more than any model has"
        if abs(value) > MAX_NUMBER:
            return f"{name} is a number of {len(str(abs(value)))} digits, more than any model has"
    return None


def listed(names: Iterable[Any], most: int = 8) -> str:
    names = sorted(map(str, names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shards(folder: Path, key: str) -> tuple[list[str], dict[str, str]]:
    """The names of the weight files, and tensor → file of the index; without an index it is empty."""
    single, index = (folder / WEIGHTS).exists(), folder / INDEX
    if not index.exists():
        if single:
            return [WEIGHTS], {}
        raise _no_weights(folder, key)
    content = read_settings(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index}: weight_map must be an object from tensor names to file names")
    if not isinstance(content.get("metadata"), dict):
        raise DataError(f'{index}: metadata must be an object; add "metadata": {{}}')
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            is_pickle = isinstance(name, str) and Path(name).suffix in _PICKLES
            why = "a pickle file can run code" if is_pickle else "only *.safetensors names in this folder are allowed"
            raise DataError(f"{index}: weight_map[{tensor!r}] is {name!r}: {why}; convert the model to safetensors")
    shards = sorted(set(weight_map.values()))
    if len({name.casefold() for name in shards}) != len(shards):
        raise DataError(f"{index} has file names that differ in upper and lower case only: rename the files")
    # transformers would take the single file, an inference engine the shards.
    if single and shards != [WEIGHTS]:
        raise DataError(f"{folder} has both {WEIGHTS} and {INDEX} with other files: remove one of the two")
    if missing := [name for name in shards if not (folder / name).exists()]:
        raise DataError(f"{index} names {listed(missing)}, which is not in the folder: download the model again")
    return shards, weight_map


def _no_weights(folder: Path, key: str) -> DataError:
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES)
    if pickles:
        return DataError(
            f"{folder} has its weights as pickle files ({listed(pickles)}), which can run code and are not allowed. "
            "Convert them to safetensors first"
        )
    others = sorted(entry.name for entry in folder.glob("*.safetensors"))
    found = f"no {WEIGHTS} and no {INDEX}, only {listed(others)}" if others else "no *.safetensors file"
    return DataError(
        f"{folder} has {found}: {key} must be a model folder (actor.init_from_scratch=true needs the config only)"
    )


def _header(file: Path) -> Weights:
    """The tensors, from the header alone; the library checks that each lies inside the file and none overlap."""
    with open(file, "rb") as stream:
        if stream.read(11) == b"version htt":
            raise DataError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: Stored(tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError, ValueError) as cause:
        raise DataError(f"{file} is damaged: {str(cause)[:200]}; download the model again") from cause


def _check_place(folder: Path, entry: Path) -> None:
    """DataError for a special file, and for a link that leaves the folder (the hub cache's own links may)."""
    try:
        target, root = entry.resolve(strict=True), folder.resolve()
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as cause:
        raise DataError(f"{entry} cannot be read: {cause}") from cause
    # Reading a pipe or a device may never end.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{entry} is neither a file nor a folder: remove it")
    allowed = [root]
    # Layout of the hub cache: models--NAME/snapshots/REVISION/FILE → models--NAME/blobs/HASH → blobs/…/HASH
    if root.parent.name == "snapshots" and (repository := root.parent.parent).name.startswith("models--"):
        allowed += [repository / "blobs", repository.parent / "blobs"]
    if not any(target.is_relative_to(place) for place in allowed):
        raise DataError(f"{entry} is a link to {target}, outside of the folder: copy the file into the folder")


def check_values(content: Mapping[str, Any], file: Path) -> None:
    """DataError for a setting that would fetch or run code, or that transformers would fail on later."""
    for name, value in _settings(content):
        if name in _REFUSED and value:
            method = (
                f" ({value.get('quant_method')!r})" if name == "quantization_config" and type(value) is dict else ""
            )
            raise DataError(f"{file}: {name}{method} {_REFUSED[name]}")
        if reason := _wrong_value(name, value):
            raise DataError(f"{file}: {name} is {value!r}{reason}")
        kind = name.removeprefix("_").removesuffix("_internal")
        for one in value.values() if isinstance(value, dict) else [value]:
            if kind in _IMPLEMENTATIONS and one is not None and one not in _IMPLEMENTATIONS[kind]:
                raise DataError(
                    f"{file}: {name} is {one!r}, and a folder cannot choose which code is fetched or run; remove it, "
                    f"or set {' or '.join(_IMPLEMENTATIONS[kind])}"
                )


def _wrong_value(name: str, value: Any) -> str | None:
    """Why a value that transformers does not check itself is wrong; None if it is right."""
    if value is None:
        return None
    if name in _NAMES and not (isinstance(value, str) and _PLAIN.fullmatch(value)):
        return "; it must be the name of a class or model of transformers"
    if name == "tokenizer_class" and not (isinstance(value, str) and _TOKENIZER.fullmatch(value)):
        return "; it must be the name of a tokenizer of transformers"
    if name == "fast_tokenizer_files":
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) and re.fullmatch(r"[\w.+-]+\.json", one, re.ASCII) for one in names):
            return "; it must be a list of names of files in this folder"
    if name == "model_max_length" and (isinstance(value, bool) or not isinstance(value, int | float)):
        return "; it must be a number"
    if name.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < 2**31 for one in ids) and value != -1:
            return "; it must be a token id, or a list of token ids"
    if name == "return_dict" and value is not True:
        return "; remove it"
    return None


def _settings(content: Any) -> Iterator[tuple[str, Any]]:
    """Every (name, value), also of nested objects; the entries of a list come under the list's name."""
    todo: list[tuple[str, Any]] = [("", content)]
    while todo:
        name, value = todo.pop()
        if name:
            yield name, value
        if isinstance(value, Mapping):
            todo += value.items()
        elif isinstance(value, list):
            todo += [(name, entry) for entry in value if isinstance(entry, Mapping | list | int | float)]
