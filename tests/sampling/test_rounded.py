"""A sampler whose weights are rounded differs from the trainer, follows it at every publish, and leaves it alone."""

import numpy as np
import pytest
import torch
from test_local import teacher_forced
from tiers import brief
from tiny_models import build

from gspo.sampling.local.engine import LocalSampler
from gspo.sampling.rounded import RoundedSampler, rounded
from gspo.types import Request, SampleId, SamplingParams


def request(id):
    return Request(id, (5, 6, 7), SamplingParams(8, ignore_eos=True))


def sampled(sampler, seed_of=0):
    sampler.submit([request(SampleId(seed_of, i)) for i in range(6)])
    return sorted(sampler.completed(), key=lambda s: s.id)


def gap(model, samples):
    return max(float(np.abs(teacher_forced(model, request(s.id), s) - s.behavior_logp).max()) for s in samples)


@pytest.mark.parametrize("name", brief(["qwen3", "llama_mha", "qwen3_moe"], "qwen3"))
def test_a_rounded_sampler_differs_from_the_model_and_an_unrounded_one_does_not(name):
    model = build(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = {"seed": 0, "eos_token_ids": [2]}
    exact = gap(model, sampled(LocalSampler(model, **settings)))
    gaps = {p: gap(model, sampled(RoundedSampler(model, precision=p, **settings))) for p in ("bf16", "int8")}
    assert exact < 1e-4 < 1e-3 < gaps["bf16"]
    assert gaps["int8"] > 1e-3
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_publish_rounds_the_weights_as_they_are_then(precision):
    model = build("qwen3")
    sampler = RoundedSampler(model, precision=precision, seed=0, eos_token_ids=[2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01).add_(0.01)
    stale = gap(model, sampled(sampler))
    sampler.load_weights(1, None)
    samples = sampled(sampler, 1)
    assert samples[0].versions.tolist() == [1] * 8
    assert 1e-4 < gap(model, samples) < stale
    fresh = RoundedSampler(model, precision=precision, seed=0, eos_token_ids=[2])
    again = sampled(fresh, 1)
    assert all(np.array_equal(a.behavior_logp, b.behavior_logp) for a, b in zip(samples, again, strict=True))


def test_int8_has_255_values_per_output_channel_and_is_nearest():
    weight = (
        torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0))
        * torch.tensor([0.01, 1.0, 30.0])[:, None, None]
    )
    got = rounded(weight, "int8")
    scale = weight.abs().amax(-1, keepdim=True) / 127
    steps = got / scale
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert float((steps.abs() - 127).max()) <= 1e-4
    assert float(((got - weight).abs() / scale).max()) <= 0.5 + 1e-4
    assert torch.equal(rounded(torch.ones(4) * 0.3, "int8"), torch.ones(4) * 0.3)
    assert not rounded(torch.zeros(2, 3), "int8").any()


def test_bf16_keeps_eight_bits_of_precision_in_the_type_it_came_in():
    weight = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = rounded(weight, "bf16")
    assert got.dtype == torch.float64
    assert float(((got - weight) / weight).abs().max()) <= 2**-8
    assert torch.equal(rounded(got, "bf16"), got)
