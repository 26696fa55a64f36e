"""`gspo models check` of vision-language models: gradients and log-probs of prompts that show images."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo import rng
from gspo.doctor import sample_all, trainer_logp
from gspo.learner import Completion, PackItem, PolicyModule, image_prompts, probe
from gspo.models import cache
from gspo.sampling import LocalSampler
from gspo.types import Prompt, Request, SampleId, SamplingParams
from lab.zoo import images

TYPES = (*images.FAMILIES, images.HYBRID)
TEMPERATURE = 0.7


def measured(family: str) -> dict[str, Any]:
    """The fields of `Checked` of a tiny model in float64; images in every prompt."""
    with tempfile.TemporaryDirectory() as folder, cache.quiet():
        processor = images.processor(family, Path(folder))
        policy = PolicyModule(images.model(family))
        known: dict[str, Any] = {"model_class": type(policy.model).__name__}
        known["layout"] = probe(policy, processor=processor).layout
        if policy.images_refused:
            return known | {"refused": f"images: {policy.images_refused}"}
        prompts = image_prompts(processor)
        known["gradient_gap"] = gradient_gap(policy, prompts)
        sampler = LocalSampler(policy.model, seed=0, eos_token_ids=(), image_prompts=prompts, vision=policy.vision)
        try:
            known["engine"] = str(sampler.health()["engine"])
            known["logp_gap"] = logp_gap(policy, sampler, prompts)
        finally:
            sampler.close()
    return known


def gradient_gap(policy: PolicyModule, prompts: Sequence[Prompt]) -> float:
    """‖∇ − ∇ plain‖ / ‖∇ plain‖ over all weights, tower included, against the model's own forward pass."""
    draw, items, index = rng.generator(0, "models check"), [], 0
    for prompt, lengths in zip(prompts, ((5, 1, 8), (7, 3)), strict=True):
        completions = []
        for num in lengths:
            # Of the tokenizer's letters: no placeholder is among them.
            completions.append(Completion(draw.integers(0, 40, num), np.ones(num, dtype=np.bool_), index))
            index += 1
        items.append(PackItem(np.asarray(prompt.tokens), tuple(completions), prompt.shown))
    reference = PolicyModule(copy.deepcopy(policy.model))
    got = _gradient(policy, policy(policy.pack(items), with_entropy=False).logp)
    want = _gradient(reference, reference.plain_logp(items))
    gap = sum(float((got[name] - want[name]).square().sum()) for name in want)
    return (gap / sum(float(each.square().sum()) for each in want.values())) ** 0.5


def _gradient(policy: PolicyModule, logp: Tensor) -> dict[str, Tensor]:
    """Of a number that depends on every log-prob in its own way; [M] log-probs."""
    policy.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp), dtype=logp.dtype).cos()).sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in policy.model.named_parameters()
    }


def logp_gap(policy: PolicyModule, sampler: LocalSampler, prompts: Sequence[Prompt]) -> float:
    """Largest |log μ − log π| of a sampled token, with log π computed as in a training step."""
    params = SamplingParams(max_new_tokens=12, temperature=TEMPERATURE)
    requests = [
        Request(SampleId(number, i), prompt.tokens, params, origin=prompt)
        for number, prompt in enumerate(prompts)
        for i in range(4)
    ]
    samples = sample_all(sampler, requests, 120.0)
    with torch.no_grad():
        ours = trainer_logp(policy, requests, samples, temperature=TEMPERATURE)
    return max(float(np.abs(a - s.behavior_logp).max()) for a, s in zip(ours, samples, strict=True))
