"""The vision tower of a model, and where its features go in a packed row.

transformers gives nearly every vision-language model the same two steps: `get_image_features` runs tower and projector,
and `forward(…, mm_encoder_outputs=…)` puts the features in place of the placeholder tokens, in the order of the row. So
the tower runs before the packed forward, once for each prompt, under its own attention.

Besides, a row needs the rotary positions of its images (3-D in some models), and which tokens see each other both ways
(Gemma 3: an image; PaliGemma: a whole prompt). A placeholder token that a completion contains is no image: it keeps its
own embedding.

Shapes: N tokens of a row, S segments, P tokens of a prompt, F features of a prompt, d their size, D rotary positions
per token (1 or 3).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.errors import DataError
from gspo.models.vision.parts import vision_parameters
from gspo.types import PromptKey, Shown, ShownPrompt

_Ints = NDArray[np.int64]
# By model type: the value of token_type_ids at tokens that see each other both ways. The other value, 0 or 1, is that
# of completions.
_BOTH_WAYS = {"gemma3": 1, "paligemma": 0}
_FIRST_POSITION = {"paligemma": 1}  # by model type, if it is not 0
_KEPT_BYTES = 512 * 2**20  # of features of a frozen tower
_KEPT_PLACES = 1024


class Features(NamedTuple):
    """What the tower makes of the images of one prompt."""

    flat: Tensor  # [F, d]
    deep: tuple[Tensor, ...]  # [F, d] for each of the first text layers, which adds them (deepstack)


class Place(NamedTuple):
    """What a prompt needs besides its features."""

    positions: _Ints | None  # [D, P] rotary positions; None: 0…P−1
    delta: int  # position of the first completion token minus P
    blocks: _Ints | None  # [P] number of the span that sees itself both ways; −1: causal
    types: _Ints | None  # [P] token_type_ids


@dataclass(frozen=True, eq=False)
class Placement:
    """Where features, positions and spans are in a packed row. A function of tokens and images, not of weights."""

    take: _Ints  # the feature at each placeholder of the row; −1: none, the token keeps its own embedding
    positions: _Ints | None  # [D, N]; None: those of the row are right
    types: _Ints | None  # [N] token_type_ids
    type_after: int  # token type of tokens after a prompt
    blocks: _Ints | None  # [N]


class Vision:
    """The vision part of one model."""

    def __init__(self, model: Any) -> None:
        self.model, self._base = model, model.base_model
        config = model.config
        token = getattr(config, "image_token_id", None)
        self.token = int(config.image_token_index if token is None else token)  # the placeholder
        self._type = str(config.model_type)
        self._arguments = tuple(inspect.signature(self._base.get_image_features).parameters)
        self._parameters = list(vision_parameters(model).values())
        self.num_encoded = 0  # prompts whose images went through the tower
        self._output: Any = None  # class of the encoder's output, and whether it holds one tensor
        self._is_tensor = False
        self._kept: OrderedDict[PromptKey, Features] = OrderedDict()  # of a frozen tower, oldest first
        self._places: OrderedDict[PromptKey, Place] = OrderedDict()

    @staticmethod
    def of(model: Any) -> Vision | None:
        """The vision part of `model`; None if it has none that can be run apart from its text part."""
        base = model.base_model
        if not hasattr(base, "get_image_features"):
            return None
        takes_features = "mm_encoder_outputs" in inspect.signature(base.forward).parameters
        return Vision(model) if takes_features else None

    @property
    def sees_prompts_both_ways(self) -> bool:
        """Whether the model reads all of a prompt at once. Such a model is not causal on text alone."""
        return _BOTH_WAYS.get(self._type) == 0

    @property
    def is_frozen(self) -> bool:
        """Whether features depend on the images alone, so that they are computed once."""
        return not any(p.requires_grad for p in self._parameters)

    def encoder_output(self, prompts: Sequence[ShownPrompt], placement: Placement) -> Any:
        """What `mm_encoder_outputs` takes as "image": a feature for every placeholder of the row, in its order."""
        features = self.features(prompts)
        flat = torch.cat([f.flat for f in features])  # [F of all prompts, d]
        deep = [torch.cat(layers) for layers in zip(*(f.deep for f in features), strict=True)]
        take = placement.take
        if (take < 0).any():
            # One more row: the embedding of the placeholder token itself, to which no layer adds anything.
            own = self.model.get_input_embeddings()(torch.tensor([self.token], device=flat.device))  # [1, d]
            flat = torch.cat([flat, own.to(flat.dtype)])
            deep = [torch.cat([layer, torch.zeros_like(layer[:1])]) for layer in deep]
            take = np.where(take < 0, len(flat) - 1, take)
        index = torch.from_numpy(take).to(flat.device)
        flat = flat.index_select(0, index)
        found: dict[str, Any] = {"pooler_output": flat[None] if self._is_tensor else [flat]}
        if deep:
            found["deepstack_features"] = [[layer.index_select(0, index)] for layer in deep]
        return self._output(**found)

    def features(self, prompts: Sequence[ShownPrompt]) -> list[Features]:
        """The features of each prompt; those of a frozen tower are kept."""
        if not self.is_frozen:
            return self._encode_alike(prompts)
        made = []
        for prompt in prompts:
            # One at a time: the rounding of a feature must not depend on which others were in the same call, because
            # a resumed run computes some of them again.
            if prompt.key not in self._kept:
                with torch.no_grad():
                    self._kept[prompt.key] = self._encode([prompt])[0]
            self._kept.move_to_end(prompt.key)
            made.append(self._kept[prompt.key])
        while len(self._kept) > 1 and sum(_num_bytes(f) for f in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return made

    def _encode_alike(self, prompts: Sequence[ShownPrompt]) -> list[Features]:
        """One call for all prompts whose inputs have the same sizes."""
        alike: dict[Any, list[int]] = {}
        for number, prompt in enumerate(prompts):
            inputs = prompt.images.prepare()
            sizes = tuple((name, inputs[name].shape[1:]) for name in self._arguments if name in inputs)
            alike.setdefault(sizes, []).append(number)
        made: dict[int, Features] = {}
        for numbers in alike.values():
            made |= zip(numbers, self._encode([prompts[i] for i in numbers]), strict=True)
        return [made[i] for i in range(len(prompts))]

    def _encode(self, prompts: Sequence[ShownPrompt]) -> list[Features]:
        prepared = [prompt.images.prepare() for prompt in prompts]
        names = [name for name in self._arguments if name in prepared[0]]
        arguments = {name: self._tensor(np.concatenate([one[name] for one in prepared])) for name in names}
        output = self._base.get_image_features(**arguments, return_dict=True)
        self._output, self._is_tensor = type(output), isinstance(output.pooler_output, Tensor)
        self.num_encoded += len(prompts)
        flat = _flat(output.pooler_output)  # [F of all prompts, d]
        deep = [_flat(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        counts = [prompt.tokens.count(self.token) for prompt in prompts]
        if sum(counts) != len(flat):
            raise DataError(
                f"{type(self.model).__name__} makes {len(flat)} features of the images "
                f"{', '.join(name for p in prompts for name in p.images.names)}, but their prompts have {sum(counts)} "
                "placeholder tokens: the processor does not belong to the model; check the files of actor.path"
            )
        layers = [layer.split(counts) for layer in deep]
        return [Features(part, tuple(layer[i] for layer in layers)) for i, part in enumerate(flat.split(counts))]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array).to(self.model.device)
        return tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor

    def lay_out(self, tokens: _Ints, positions: _Ints, start: _Ints, length: _Ints, shown: Shown) -> Placement:
        """The placement of a row: tokens [N] at positions [N], in segments [S]."""
        places = [self._place(prompt) for prompt in shown.prompts]
        counts = [prompt.tokens.count(self.token) for prompt in shown.prompts]
        first = np.cumsum(counts) - counts  # of each prompt's features
        take = np.full(len(tokens), -1, dtype=np.int64)
        num = max((len(p.positions) for p in places if p.positions is not None), default=0)
        rotary = np.tile(positions, (num, 1)) if num else None
        after = 1 - _BOTH_WAYS.get(self._type, 1)
        types = np.full(len(tokens), after) if any(p.types is not None for p in places) else None
        blocks = np.full(len(tokens), -1) if any(p.blocks is not None for p in places) else None
        num_blocks = 0
        for s in np.flatnonzero(shown.of_segment >= 0).tolist():
            k, begin = int(shown.of_segment[s]), int(start[s])
            end, middle = begin + int(length[s]), begin + int(shown.num_prompt[s])  # prompt, then completion
            place = places[k]
            if rotary is not None:
                rotary[:, middle:end] += place.delta
            if middle == begin:
                continue
            at = begin + np.flatnonzero(tokens[begin:middle] == self.token)
            take[at] = first[k] + np.arange(len(at))
            if rotary is not None and place.positions is not None:
                rotary[:, begin:middle] = place.positions
            if types is not None and place.types is not None:
                types[begin:middle] = place.types
            if blocks is not None and place.blocks is not None:
                # Numbers are unique in the row.
                blocks[begin:middle] = np.where(place.blocks >= 0, place.blocks + num_blocks, -1)
                num_blocks += int(place.blocks.max()) + 1
        return Placement(take[tokens == self.token], rotary, types, after, blocks)

    def delta(self, prompt: ShownPrompt) -> int:
        """Rotary position of the first token after the prompt, minus the prompt's length."""
        return self._place(prompt).delta

    def _place(self, prompt: ShownPrompt) -> Place:
        if prompt.key not in self._places:
            self._places[prompt.key] = self._find_place(prompt)
            if len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)
        return self._places[prompt.key]

    def _find_place(self, prompt: ShownPrompt) -> Place:
        inputs, num = prompt.images.prepare(), len(prompt.tokens)
        types = None
        if self._type in _BOTH_WAYS:
            types = inputs["token_type_ids"].reshape(-1).astype(np.int64)  # [P]
        positions, delta = None, _FIRST_POSITION.get(self._type, 0)
        if delta:
            positions = np.arange(num)[None] + delta  # [1, P]
        if hasattr(self._base, "get_rope_index"):
            ids = torch.tensor([prompt.tokens])  # [1, P]
            given = {"mm_token_type_ids": (ids == self.token).long()}
            given |= {name: torch.from_numpy(array) for name, array in inputs.items()}
            accepted = inspect.signature(self._base.get_rope_index).parameters
            rotary, shift = self._base.get_rope_index(ids, **{n: v for n, v in given.items() if n in accepted})
            positions, delta = rotary[:, 0].numpy().astype(np.int64), int(shift.reshape(-1)[0])  # [3, P]
        blocks = None
        if types is not None:
            inside = types == _BOTH_WAYS[self._type]
            begins = inside & ~np.concatenate([[False], inside[:-1]])
            blocks = np.where(inside, np.cumsum(begins) - 1, -1)  # a number for each run
        return Place(positions, delta, blocks, types)

    def plain_inputs(self, prompt: ShownPrompt, num_tokens: int) -> dict[str, Tensor]:
        """The arguments of the model's own forward pass on `num_tokens` tokens that begin with the prompt."""
        found = {name: self._tensor(array) for name, array in prompt.images.prepare().items()}
        fill = {"mm_token_type_ids": 0, "token_type_ids": 1 - _BOTH_WAYS.get(self._type, 1)}
        for name in fill.keys() & found.keys():
            more = found[name].new_full((1, num_tokens - len(prompt.tokens)), fill[name])
            found[name] = torch.cat([found[name], more], dim=1)  # [1, num_tokens]
        accepted = inspect.signature(self._base.forward).parameters
        return {name: tensor for name, tensor in found.items() if name in accepted}


def _flat(output: Any) -> Tensor:
    """[F, d] of an encoder's output: one tensor, or one for each image or prompt."""
    parts = [output] if isinstance(output, Tensor) else output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _num_bytes(features: Features) -> int:
    return features.flat.nbytes + sum(layer.nbytes for layer in features.deep)
