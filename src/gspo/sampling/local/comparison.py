"""The requests by which engines are compared with a plain forward, and the largest difference.

Rows of two lengths, two rows of one prompt, a continued row, rows that end before others, and second turns of two
episodes; for a vision-language model also prompts with images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams

if TYPE_CHECKING:
    from gspo.models.vision.tower import Vision

# A high temperature: a difference hardly shows in the log-prob of a token that is nearly certain.
_PARAMS = SamplingParams(3, temperature=2.0, ignore_eos=True)


@dataclass(frozen=True)
class ForwardComparison:
    """`context`: the model's context length, at least 10; `image_prompts`: prompts with images, if it takes them."""

    num_vocab: int
    context: int
    vision: Vision | None
    image_prompts: Sequence[Prompt]

    def requests(self, version: int, *, is_packed: bool) -> list[Request]:
        tokens = self._tokens()
        # More tokens for a cache: an error of a recurrent state grows with every token.
        longer = replace(_PARAMS, max_new_tokens=6 if is_packed else min(12, self.context - 4))
        # A continued row. Its given log-probs are not compared.
        prefix = Sample.of(SampleId(0, 2), tokens[:2], [0.0, 0.0], version, "abort")
        requests = [
            Request(SampleId(0, 0), tuple(tokens[:4]), _PARAMS, keep_cache=True),
            Request(SampleId(0, 1), tuple(tokens[5:]), _PARAMS, keep_cache=True),
            Request(SampleId(0, 2), tuple(tokens[:4]), longer, prefix),
            Request(SampleId(0, 3), tuple(tokens[:4]), longer),
        ]
        if self.vision is not None and self.vision.sees_prompts_both_ways:
            requests = []  # on text alone, the plain forward of such a model is not causal
        return requests + [
            Request(SampleId(1 + number, i), shown.tokens, _PARAMS, given, origin=shown)
            for number, shown in enumerate(self.image_prompts)
            for i, given in enumerate((None, replace(prefix, id=SampleId(1 + number, 1))))
        ]

    def second_turns(self, requests: Sequence[Request], samples: Sequence[Sample]) -> list[Request]:
        """The next turns of the first two requests, whose keys and values the sampler has kept."""
        answer = {s.id: tuple(s.tokens.tolist()) for s in samples}
        params, last = replace(_PARAMS, max_new_tokens=2), tuple(self._tokens()[-1:])
        return [Request(r.id._replace(turn=1), r.prompt + answer[r.id] + last, params) for r in requests[:2]]

    def largest_difference(self, model: Any, requests: Sequence[Request], samples: Sequence[Sample]) -> float:
        """Sampled log-probs against those of `model`; NaN if one is not a number, or if nothing can be compared."""
        request_of, gaps = {r.id: r for r in requests}, []
        for sample in samples:
            request, new = request_of[sample.id], sample.tokens.tolist()
            prompt, more = request.prompt, {}
            if request.shown is not None:
                # A placeholder among the sampled tokens would ask the plain forward for another feature.
                if self.vision is None or self.vision.token in new:
                    continue
                more = self.vision.plain_inputs(request.shown, len(prompt) + len(new))
            ids = torch.tensor([[*prompt, *new]], device=model.device)
            logits = model(input_ids=ids, use_cache=False, **more).logits[0, len(prompt) - 1 : -1]  # [new, V]
            expected = torch.log_softmax(logits.double() / _PARAMS.temperature, -1).cpu().numpy()[range(len(new)), new]
            first = 2 if request.prefix is not None else 0
            gaps.append(np.abs(expected - sample.behavior_logp)[first:].max())
        return float(np.max(gaps)) if gaps else float("nan")  # np.max is NaN if any gap is; Python's max is not

    def _tokens(self) -> list[int]:
        # Any fixed tokens will do; the factor spreads them over the vocabulary.
        tokens = [int(i) for i in np.arange(1, 9) * 7919 % self.num_vocab]
        if self.vision is None:
            return tokens
        # But the placeholder of images has no embedding of its own in a plain forward.
        return [t if t != self.vision.token else (t + 1) % self.num_vocab for t in tokens]
