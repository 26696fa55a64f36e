"""Tiny random vision-language models with the processors of their families, loaded from folders as a user's are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from gspo.models import Processor, load_processor
from gspo.types import ImageFile

tf: Any = transformers
_SPECIAL = {
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<ctx>",
    "video_token": "<video>",
    "vision_start_token": "<vs>",
    "vision_end_token": "<ve>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_TILES = [f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)]
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789+=?: \n", "<unk>"]
_WORDS = [*_LETTERS, *_SPECIAL.values(), *_TILES]
_ID = {word: number for number, word in enumerate(_WORDS)}
VOCAB = 80
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large enough that attention and positions matter: with the usual 0.02 a mistake hardly changes a log-prob.
    "initializer_range": 0.4,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "initializer_range": 0.4,
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.4,
}
_QWEN_IDS = {
    "image_token_id": _ID["<image>"],
    "video_token_id": _ID["<video>"],
    "vision_start_token_id": _ID["<vs>"],
    "vision_end_token_id": _ID["<ve>"],
}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}


def _llama() -> dict[str, Any]:
    return {**_TEXT, "model_type": "llama"}


_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision_config={**_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    ),
    "smolvlm": lambda: tf.SmolVLMConfig(
        text_config=_llama(), vision_config=_TOWER, scale_factor=2, image_token_id=_ID["<image>"]
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=_llama(),
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=_ID["<image>"],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    ),
    "internvl": lambda: tf.InternVLConfig(
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config={**_TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
        image_token_id=_ID["<ctx>"],
        image_seq_length=1,
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config={**_TEXT, **_ALTERNATING, "query_pre_attn_scalar": 11},
        vision_config={**_TOWER, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=_ID["<boi>"],
        eoi_token_index=_ID["<eoi>"],
        image_token_index=_ID["<image>"],
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config={**_TEXT, "model_type": "gemma"},
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        image_token_index=_ID["<image>"],
        projection_dim=32,
        hidden_size=32,
        vocab_size=VOCAB,
    ),
}
FAMILIES = tuple(_CONFIGS)
HYBRID = "qwen3_5"  # two layers of linear attention: it cannot be packed
_CONFIGS[HYBRID] = lambda: tf.Qwen3_5Config(
    text_config={
        **_TEXT,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    vision_config={**_QWEN_TOWER, "num_position_embeddings": 16},
    **_QWEN_IDS,
)
_QWEN_IMAGES = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
_PIXELS = {"size": {"height": 8, "width": 8}}
# Class of the image processor and its settings, settings of the processor, and the text of one image.
_PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "qwen2_5_vl": ("Qwen2VLImageProcessor", _QWEN_IMAGES, {}, "<vs><image><ve>"),
    "qwen3_vl": ("Qwen2VLImageProcessor", _QWEN_IMAGES, {}, "<vs><image><ve>"),
    "qwen3_5": ("Qwen2VLImageProcessor", _QWEN_IMAGES, {}, "<vs><image><ve>"),
    "smolvlm": (
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
        {"image_seq_len": 1},
        "<image>",
    ),
    "llava": ("SiglipImageProcessor", _PIXELS, {"patch_size": 4, "vision_feature_select_strategy": "full"}, "<image>"),
    "internvl": (
        "GotOcr2ImageProcessor",
        {**_PIXELS, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 1},
        "<ctx>",
    ),
    "gemma3": ("Gemma3ImageProcessor", _PIXELS, {"image_seq_length": 4}, "<boi>"),
    "paligemma": ("SiglipImageProcessor", {**_PIXELS, "image_seq_length": 4}, {}, "<image>"),
}


def model(family: str, dtype: torch.dtype = torch.float64) -> Any:
    config = _CONFIGS[family]()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = tf.AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="eager").eval()
        for name, parameter in made.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # Gemma 3 starts it at 0: images would have no effect
                torch.nn.init.normal_(parameter, std=0.4)
        return made


def tokenizer() -> Any:
    inner = Tokenizer(models.WordLevel({word: _ID[word] for word in _WORDS}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tiles = {f"tile_{number}": tile for number, tile in enumerate(_TILES)}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", extra_special_tokens={**_SPECIAL, **tiles}
    )


def write_folder(family: str, folder: Path) -> None:
    """The files of a model's folder besides its weights, as the hub has them."""
    images, settings, own, _ = _PROCESSORS[family]
    folder.mkdir(exist_ok=True)
    _CONFIGS[family]().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    content = {"image_processor_type": images, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    if own:
        (folder / "processor_config.json").write_text(json.dumps(own))


def processor(family: str, folder: Path) -> Processor:
    write_folder(family, folder)
    found = load_processor(str(folder), tokenizer())
    assert found is not None
    return found


def image(width: int, height: int, seed: int) -> ImageFile:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return ImageFile(f"image {seed}", lambda: Image.fromarray(pixels))


def text(family: str, *parts: str | int) -> str:
    """A prompt: strings, and a number for so many images."""
    one = _PROCESSORS[family][3]
    return "".join(part if isinstance(part, str) else one * part for part in parts)
