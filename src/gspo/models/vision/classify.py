"""The first part of the warm start of `embedded:tiny-vision`: its tower learns to classify digits.

Vision towers of real models are trained before they are joined to a text model, too. Without it, the model begins to
look at the image only after some 400 of the joint steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from gspo import rng
from gspo.data import digits
from gspo.system import beat

_DECAY = 40  # last steps, in which the learning rate falls


def train_tower(model: Any, processor: Any, warm: Mapping[str, Any], tell: Callable[[int], None]) -> None:
    """Train tower and projector to predict, by a linear layer that is dropped, the digit of each feature.

    Only images of the warm start are shown; labels have the confusions of its teacher.
    """
    num_steps, num = warm["tower_steps"], warm["batch"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warm["seed"])
        head = torch.nn.Linear(model.config.text_config.hidden_size, 10)
    parameters = [*model.model.visual.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=warm["lr"], weight_decay=0.0, fused=True)
    stream = digits.problem_stream("warm", seed=warm["seed"])
    for step in range(num_steps):
        beat("building a model: its vision tower")
        tell(step)
        drawn = list(islice(stream, num))
        glyphs = [glyph for shown in drawn for glyph in shown.glyphs]  # [4 · num], in the order of the features
        u = rng.uniform(warm["seed"], "tower", step, range(len(glyphs)))
        labels = digits.misread("".join(digits.digit_of(glyph) for glyph in glyphs), u, warm["misreads"])
        made = processor.pixels([digits.picture(shown.glyphs) for shown in drawn])
        inputs = {name: torch.from_numpy(made[name]) for name in ("pixel_values", "image_grid_thw")}
        features = torch.cat(list(model.model.get_image_features(**inputs, return_dict=True).pooler_output))
        for group in optimizer.param_groups:
            group["lr"] = warm["lr"] * min(1.0, (step + 1) / warm["warmup"], (num_steps - step) / _DECAY)
        target = torch.tensor([int(label) for label in labels])
        torch.nn.functional.cross_entropy(head(features), target).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
