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

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.models import cache
from gspo.models.embedded.recipes import (
    DESCRIPTIONS,
    IMAGE,
    RECIPES,
    VOCABULARY,
    auto_class,
    build_time,
    embedded_folder,
    embedded_tokenizer,
    recipe_digest,
    require_known,
    shape,
    unknown_characters,
    vocabulary,
    write_processor,
)
from gspo.system.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DESCRIPTIONS",
    "IMAGE",
    "RECIPES",
    "VOCABULARY",
    "build",
    "build_time",
    "embedded_folder",
    "embedded_tokenizer",
    "recipe_digest",
    "require_known",
    "shape",
    "unknown_characters",
    "vocabulary",
    "warm_start",
    "write_processor",
]


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
    from gspo.models.embedded.warm import warm_start

    return warm_start(name, tell)


def _write(name: str, to: Path, tell: Callable[[int, int], None]) -> None:
    with cache.quiet():
        warm_start(name, tell).save_pretrained(to, safe_serialization=True)
        embedded_tokenizer(name).save_pretrained(to)
        write_processor(name, to)
