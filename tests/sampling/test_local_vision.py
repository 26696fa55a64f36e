"""The in-process sampler with images: its log-probs are those of the model's own forward."""

from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
import vision_zoo

from gspo.errors import DataError
from gspo.learner import image_prompts
from gspo.models import Vision
from gspo.sampling.local.engine import LocalSampler
from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams


def requests_of(processor, family, *, num=3, params=None):
    """Two prompts with the same tokens and other images, one with two images, and one of text alone."""
    one = vision_zoo.text(family, "what ", 1, "is?")
    two = vision_zoo.text(family, "a ", 1, "and ", 1, "?")
    prompts = [
        processor.prompt(one, [vision_zoo.image(16, 16, 1)]),
        processor.prompt(one, [vision_zoo.image(16, 16, 2)]),
        processor.prompt(two, [vision_zoo.image(24, 24, 2), vision_zoo.image(8, 16, 3)]),
        *([processor.prompt("2+2=")] if family != "paligemma" else []),
    ]
    params = params or SamplingParams(6, temperature=1.5, ignore_eos=True)
    return [
        Request(SampleId(number, i), tokens, params, origin=Prompt(tokens, "", images=images))
        for number, (tokens, images) in enumerate(prompts)
        for i in range(num)
    ]


def plain_logp(model, request, tokens, temperature):
    vision = Vision.of(model)
    more = {}
    if request.shown is not None:
        more = vision.plain_inputs(request.shown, len(request.prompt) + len(tokens))
    ids = torch.tensor([[*request.prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **more).logits[0, len(request.prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(tokens)), tokens].numpy()


def check(family, folder, bound=1e-5, **settings):
    model, processor = vision_zoo.model(family), vision_zoo.processor(family, folder)
    sampler = LocalSampler(model, seed=3, eos_token_ids=(), **settings)
    requests = requests_of(processor, family)
    # A sample that continues: its prefix is prefilled again, at the positions after the images.
    prefix = Sample.of(requests[0].id, [5, 6, 7], [0.0] * 3, 0, "abort")
    requests[0] = replace(requests[0], prefix=prefix)
    sampler.submit(requests)
    samples = {sample.id: sample for sample in sampler.completed()}
    # Once for each prompt; transformers' cache computes a continued row whole.
    assert sampler.health()["prefill_images"] == (3 if "verify" in settings else 4)
    token = Vision.of(model).token
    for request in requests:
        sample = samples[request.id]
        if request.shown is not None and token in sample.tokens:
            continue  # the plain forward cannot compute it; see the trainer's test of said placeholders
        expected = plain_logp(model, request, sample.tokens.tolist(), 1.5)
        first = 3 if request.prefix is not None else 0
        assert np.abs(expected - sample.behavior_logp)[first:].max() < bound
    first, other = ([samples[SampleId(n, i)].tokens.tolist() for i in (1, 2)] for n in (0, 1))
    assert first != other


def test_sampled_log_probs_with_images_are_exact(tmp_path):
    check("qwen3_vl", tmp_path, verify=False)


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in vision_zoo.FAMILIES if family != "qwen3_vl"])
def test_sampled_log_probs_with_images_are_exact_in_every_family(family, tmp_path):
    check(family, tmp_path, verify=False)


@pytest.mark.full
def test_a_model_with_linear_attention_is_sampled_with_transformers_cache(tmp_path):
    lines = []
    prompts = image_prompts(vision_zoo.processor(vision_zoo.HYBRID, tmp_path))
    # Its state is float32, also in a float64 model.
    check(vision_zoo.HYBRID, tmp_path, bound=1e-4, image_prompts=prompts, say=lines.append)
    assert "with transformers' cache" in lines[0]


@pytest.mark.full
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_continuous_batching_is_chosen_by_a_comparison_with_images(family, tmp_path):
    lines = []
    shown = image_prompts(vision_zoo.processor(family, tmp_path))
    sampler = LocalSampler(vision_zoo.model(family), seed=3, eos_token_ids=(), image_prompts=shown, say=lines.append)
    assert "continuous batching; log-probs equal a plain forward" in lines[0]
    assert sampler.takes_images


@pytest.mark.full
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_greedy_sampling_with_an_image_equals_generate(family, tmp_path):
    model, processor = vision_zoo.model(family), vision_zoo.processor(family, tmp_path)
    request = requests_of(processor, family, num=1, params=SamplingParams(8, greedy=True, ignore_eos=True))[0]
    sampler = LocalSampler(model, seed=3, eos_token_ids=(), verify=False)
    sampler.submit([request])
    (sample,) = sampler.completed()
    inputs = Vision.of(model).plain_inputs(request.shown, len(request.prompt))
    ids = torch.tensor([request.prompt])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    assert sample.tokens.tolist() == made[0, len(request.prompt) :].tolist()


def test_a_prompt_of_text_is_refused_by_a_model_that_reads_prompts_both_ways(tmp_path):
    processor = vision_zoo.processor("paligemma", tmp_path)
    with pytest.raises(DataError, match="needs an image in every prompt"):
        processor.prompt("2+2=")
    sampler = LocalSampler(vision_zoo.model("paligemma"), seed=3, eos_token_ids=(), verify=False)
    with pytest.raises(DataError, match="needs an image in every prompt"):
        sampler.submit([Request(SampleId(0, 0), (1, 2), SamplingParams(4))])


def test_a_request_with_images_is_refused_by_a_model_of_text(tmp_path):
    processor = vision_zoo.processor("llava", tmp_path)
    sampler = LocalSampler(model_zoo.build("llama"), seed=3, eos_token_ids=(), verify=False)
    with pytest.raises(DataError, match="takes text alone"):
        sampler.submit(requests_of(processor, "llava")[:1])
