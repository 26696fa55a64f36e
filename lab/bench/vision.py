"""The workloads with images: a small Qwen2.5-VL with random weights, and prompts of one image and a few words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo import rng

_PATCH, _MERGE = 4, 2
# Behind the vocabulary of words.
_TOKENS = {
    "image_token": "<|image_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
}
WORDS = 4096 - len(_TOKENS)
_IDS = {f"{name}_id": WORDS + i for i, name in enumerate(_TOKENS)}
_TEXT = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
}
_TOWER = {
    "depth": 6,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_heads": 4,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
    "window_size": 8 * _PATCH * _MERGE,  # as in the released models: 8 × 8 features
    "fullatt_block_indexes": [2, 5],
    "out_hidden_size": _TEXT["hidden_size"],
}
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "text_config": _TEXT,
    "vision_config": _TOWER,
    "tie_word_embeddings": True,
    **_IDS,
}
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def special_tokens() -> dict[str, str]:
    return dict(_TOKENS)


def write_bench_processor(folder: Path) -> None:
    side = _PATCH * _MERGE
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": _PATCH,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": side**2, "longest_edge": 4096 * side**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def images(count: int, num_features: int) -> list[Any]:
    """Square images that the model's processor turns into `num_features` features each."""
    import numpy as np
    from PIL import Image

    side = round(num_features**0.5) * _PATCH * _MERGE
    noise = rng.uniform(1, "bench images", range(count * side * side * 3)).reshape(count, side, side, 3)
    return [Image.fromarray(pixels) for pixels in (noise * 255).astype(np.uint8)]


def tower_flops(tower: dict[str, Any], num_features: int) -> float:
    """Per image: 2 per weight and patch, forward; attention and projector are left out."""
    weights = tower["depth"] * (4 * tower["hidden_size"] ** 2 + 3 * tower["hidden_size"] * tower["intermediate_size"])
    return 2.0 * weights * num_features * _MERGE**2


@contextmanager
def count_tower_images(num_features: int) -> Iterator[Callable[[], int]]:
    """Counts the images of this size that go through the vision tower of Qwen2.5-VL, on either side."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

    seen, forward = [0], Tower.forward

    def counted(self: Any, hidden_states: Any, grid_thw: Any, *args: Any, **more: Any) -> Any:
        seen[0] += int((grid_thw.prod(-1) == num_features * _MERGE**2).sum())
        return forward(self, hidden_states, grid_thw, *args, **more)

    Tower.forward = counted
    try:
        yield lambda: seen[0]
    finally:
        Tower.forward = forward
