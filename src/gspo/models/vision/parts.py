"""The parts of a model: its text part, and its vision tower with the projector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from gspo.models.vision.tower import Vision


def text_modules(model: Any) -> Iterator[Any]:
    """The modules that compute text: all of them, or those of the language model inside a vision-language model.

    A tower keeps its own attention: it has other masks, and the config of the whole model would set it too.
    """
    is_whole = model.config.get_text_config() is model.config
    yield from (model if is_whole else model.get_decoder()).modules()


def vision_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of tower and projector, by name; empty for a model of text alone."""
    head = model.get_output_embeddings()
    others = {id(p) for module in (*text_modules(model), head) if module is not None for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in others}


def vision_of(model: Any) -> Vision | None:
    """The vision part of a model; None if it has none that can be run apart from its text part."""
    if not hasattr(model.base_model, "get_image_features"):
        return None
    from gspo.models.vision.tower import Vision

    return Vision.of(model)


def freeze_vision(model: Any) -> None:
    """Tower and projector are not trained."""
    for parameter in vision_parameters(model).values():
        parameter.requires_grad_(False)
