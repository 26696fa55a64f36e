"""The embedded models: built on this machine by a few hundred supervised steps, and cached. No download.

`embedded:tiny` is a Qwen3 of under a million parameters with a character tokenizer for `embedded:arithmetic`;
`embedded:tiny-moe` is a Qwen3-MoE of six layers with sixteen experts each. Most carries are missing in their supervised
data on purpose: the model learns the format of a solution, and RL can still improve its accuracy.

`embedded:tiny-hybrid` is a Qwen3.5 of three layers, two of them linear attention (gated DeltaNet): a model with state
outside the attention.

`embedded:tiny-control` is a Qwen3 for control tasks of Gymnasium (docs/environments.md, levels). It reads letters and
answers with random digits from 0 to 4, so that every sample is an action; each letter prefers some digits, at random,
so that the model reads its letters.

`embedded:tiny-chains` is the same Qwen3 for chains of 1, 2, 3, 4, 6, 8 or 12 additions, completions of 39 to
475 tokens.

`embedded:tiny-tools` is the same Qwen3 for the environment `tools`. Its supervised data seldom call the calculator,
`[184+768]952>952`, and mostly give the sum directly, `>952`, which the model cannot compute. So RL can teach it to call
the tool.

`embedded:tiny-vision` is a Qwen3-VL for `embedded:digits`, with a vision tower of two layers. Its teacher forgets most
of the carries and confuses 1 and 7, 4 and 9, 3 and 8, so RL can improve both reading and adding.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.data import arithmetic
from gspo.errors import DataError
from gspo.models import cache
from gspo.system import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *arithmetic.ALPHABET)
CALL, RESULT = "[", "]"  # around a tool call

_TINY: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention has on a CPU
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_WARM: Mapping[str, Any] = {"steps": 300, "batch": 48, "lr": 3e-3, "warmup": 20, "decay": 80, "seed": 1}

FEATURES = 4  # of an image of embedded:digits
IMAGE, IMAGE_BEGIN, IMAGE_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
_VISION_TOKENS = {
    "image_token": IMAGE,
    "vision_start_token": IMAGE_BEGIN,
    "vision_end_token": IMAGE_END,
    "video_token": "<|video_pad|>",
}
VISION_IDS = {token: len(VOCABULARY) + i for i, token in enumerate(_VISION_TOKENS.values())}
# Of all messages only the parts: an image between its marks, and text.
_VISION_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    f"{IMAGE_BEGIN}{IMAGE}{IMAGE_END}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

# The definition of each model; a change of any value is another model, in another cache folder.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "embedded:tiny": {
        "config": _TINY,
        "digits": arithmetic.DIGITS,
        "warm": {**_WARM, "forgets": 0.7},
    },
    "embedded:tiny-moe": {
        "model_type": "qwen3_moe",
        "config": {
            **_TINY,
            "hidden_size": 64,
            "intermediate_size": 128,  # of layers without experts; there are none
            "moe_intermediate_size": 48,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_hidden_layers": 6,
            "router_aux_loss_coef": 0.0,
        },
        "digits": arithmetic.DIGITS,
        "warm": {**_WARM, "forgets": 0.7, "balance": 0.05},
    },
    "embedded:tiny-hybrid": {
        "model_type": "qwen3_5_text",
        "config": {
            **_TINY,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 24,
        },
        "digits": arithmetic.DIGITS,
        "warm": {**_WARM, "forgets": 0.7},
    },
    "embedded:tiny-control": {
        "config": {**_TINY, "vocab_size": 64},
        "characters": "abcdefghijklmnopqrstuvwxyz",
        "warm": {
            **_WARM,
            "steps": 200,
            "decay": 60,
            "turns": 5,
            # Numbers of an observation and of an action. With 1 to 8 of them the model does not find the letter of a
            # digit in 240 steps; it answers digits after observations of any length.
            "numbers": 3,
            "levels": 5,  # digits of an action: 0 to 4
            # Each letter prefers some digits, at random: log-probs differ by about this much. A start that does not
            # read the letter of its digit first learns one action for all observations.
            "prefers": 0.7,
        },
    },
    "embedded:tiny-tools": {
        "config": _TINY,
        "characters": CALL + RESULT,
        "digits": (4, 5),
        "warm": {
            **_WARM,
            "steps": 500,
            "asks": 0.2,  # fraction of problems solved by a tool call
            "reads": 0.4,  # fraction in which a call is shown, and only the use of its result is trained
        },
    },
    "embedded:tiny-chains": {
        "config": _TINY,
        "characters": string.ascii_lowercase[: arithmetic.LONGEST_CHAIN],
        "digits": (3, 3),
        "warm": {
            **_WARM,
            "steps": 1200,
            "decay": 250,
            "forgets": 0.7,
            "chains": (1, 4, 12, 2, 8, 12, 3, 6, 12),  # additions in one problem, step after step
        },
    },
    "embedded:tiny-vision": {
        "model_type": "qwen3_vl",
        "config": {
            "text_config": {
                **_TINY,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [6, 5, 5],  # of the 16 frequencies of a head: time, height, width
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "in_channels": 1,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": _TINY["hidden_size"],
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [1],
                # With 0.05 the model had not begun to look at the image after 300 steps (read 0 % of the images).
                "initializer_range": 0.15,
            },
            "tie_word_embeddings": True,
            "image_token_id": VISION_IDS[IMAGE],
            "vision_start_token_id": VISION_IDS[IMAGE_BEGIN],
            "vision_end_token_id": VISION_IDS[IMAGE_END],
            "video_token_id": VISION_IDS["<|video_pad|>"],
        },
        "special": _VISION_TOKENS,
        "chat_template": _VISION_TEMPLATE,
        # Grey images of 16 × 16 pixels: 16 patches, four features, one per digit.
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 4096},
            "image_mean": [0.5],
            "image_std": [0.5],
            "do_convert_rgb": False,
        },
        "warm": {
            "tower_steps": 300,  # first the tower alone, as a classifier; without, the text begins to read at step 400
            **_WARM,
            "steps": 400,
            "batch": 32,
            "lr": 2e-3,
            "forgets": 0.6,
            "misreads": 0.45,  # of the digits that look alike
        },
    },
}

DESCRIPTIONS: Mapping[str, str] = {  # for lists of models
    "embedded:tiny": "tiny Qwen3 for embedded:arithmetic",
    "embedded:tiny-moe": "tiny Qwen3-MoE for embedded:arithmetic",
    "embedded:tiny-hybrid": "tiny Qwen3.5 for embedded:arithmetic",
    "embedded:tiny-control": "tiny Qwen3 for control tasks of Gymnasium",
    "embedded:tiny-chains": "tiny Qwen3 for chains of additions, embedded:arithmetic:3x12",
    "embedded:tiny-tools": "tiny Qwen3 for embedded:arithmetic, and the environment tools",
    "embedded:tiny-vision": "tiny Qwen3-VL for embedded:digits",
}


def require_known(name: str, key: str = "actor.path") -> None:
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        raise DataError(
            f"{key}: there is no model {name!r}.{f' Did you mean {near[0]}?' if near else ''} The embedded models are "
            f"{', '.join(RECIPES)}"
        )


def recipe_of(name: str) -> Mapping[str, Any]:
    require_known(name)
    return RECIPES[name]


def model_type(name: str) -> str:
    return recipe_of(name).get("model_type", "qwen3")


def shape(name: str) -> Mapping[str, Any]:
    """The fields of a model's config.json, without building it. Torch-free."""
    return {"model_type": model_type(name), **recipe_of(name)["config"]}


def recipe_digest(name: str) -> str:
    """A hash of the recipe: part of the cache folder's name and of a run's identity."""
    text = json.dumps([recipe_of(name), vocabulary(name)], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def vocabulary(name: str) -> tuple[str, ...]:
    return (*VOCABULARY, *recipe_of(name).get("special", {}).values(), *recipe_of(name).get("characters", ""))


def unknown_characters(name: str, text: str) -> str:
    """The characters of a text that the model has no token for.

    >>> unknown_characters("embedded:tiny", "What is 2+2=")
    'What is'
    """
    known = set(vocabulary(name))
    for token in recipe_of(name).get("special", {}).values():
        text = text.replace(token, "")
    return "".join(dict.fromkeys(c for c in text if c not in known))


def embedded_folder(name: str) -> Path:
    """The cache folder of a built model."""
    return cache.root() / f"{name.replace(':', '-')}-{recipe_digest(name)}"


def build_time(name: str) -> str:
    # PyTorch's gated delta rule needs more time than attention: 77 CPU seconds, embedded:tiny 25.
    longer = {"hybrid": "about a minute", "vision": "about a minute", "chains": "about three minutes"}
    return longer.get(name.rpartition("-")[2], "about half a minute")


def embedded_tokenizer(name: str = "embedded:tiny") -> PreTrainedTokenizerBase:
    """One token per character of the task."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary(name))}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    recipe = recipe_of(name)
    special = {"extra_special_tokens": dict(recipe["special"])} if "special" in recipe else {}
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False, **special
    )
    made.chat_template = recipe.get("chat_template")
    return made


def write_processor(name: str, to: Path) -> None:
    """The files that the processor of a vision-language model is loaded from; none for a model of text."""
    from transformers import AutoConfig

    if settings := recipe_of(name).get("preprocessor"):
        AutoConfig.for_model(**shape(name)).save_pretrained(to)
        (to / "preprocessor_config.json").write_text(json.dumps(settings))


def auto_class(name: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "preprocessor" in recipe_of(name) else AutoModelForCausalLM


def build(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, from the cache if it is complete, else built."""
    path = embedded_folder(name)
    if not cache.is_whole(path):
        note = f", only once: {build_time(name)} on 2 free cores"
        with progress(f"building {name}", lines=True, note=note) as tell:
            cache.publish_folder(path, lambda tmp: _write(name, tmp, tell))
    with cache.quiet():
        model = auto_class(name).from_pretrained(path, use_safetensors=True)
    return model, embedded_tokenizer(name)


def warm_start(name: str, tell: Callable[[int, int], None] = lambda done, total: None) -> PreTrainedModel:
    """A new model after its supervised steps; `tell(done, total)` is called after each."""
    from gspo.models.lessons import warm_start

    return warm_start(name, tell)


def _write(name: str, to: Path, tell: Callable[[int, int], None]) -> None:
    with cache.quiet():
        warm_start(name, tell).save_pretrained(to, safe_serialization=True)
        embedded_tokenizer(name).save_pretrained(to)
        write_processor(name, to)
