"""An objective of the user: a function in place of a preset's ratio and gate."""

import re

import pytest
import torch

from gspo.objectives import (
    at_tokens,
    clip,
    clip_bounds,
    loss,
    sequence_log_ratio,
    sum_tokens,
    token_log_ratio,
)
from gspo.objectives.own import probe

EPS = {"eps_clip": 0.01, "eps_clip_higher": 0.012}
CUTS = torch.tensor([0, 3, 4, 10])


def gspo(logp, proximal_logp, advantage, layout, eps_clip, eps_clip_higher):
    log_s = sequence_log_ratio(token_log_ratio(logp, proximal_logp, layout), layout)
    s, clipped = clip(log_s, *clip_bounds(advantage, eps_clip, eps_clip_higher, dtype=log_s.dtype))
    return -s * advantage, clipped


def grpo(logp, proximal_logp, token_advantage, layout, eps_clip, eps_clip_higher):
    d = token_log_ratio(logp, proximal_logp, layout)
    w, clipped = clip(d, *clip_bounds(token_advantage, eps_clip, eps_clip_higher, dtype=d.dtype))
    return -w * token_advantage, clipped


def step(objective, advantage=None, dtype=torch.float64, **settings):
    draws = torch.Generator().manual_seed(3)
    logp = -torch.rand(10, generator=draws, dtype=dtype)
    old, behavior = (logp + 0.05 * torch.randn(10, generator=draws, dtype=dtype) for _ in range(2))
    reference = logp - 0.1
    logp.requires_grad_()
    advantage = torch.tensor([-1.0, 1.0, 0.5], dtype=dtype) if advantage is None else advantage
    out = loss(
        objective, logp, old, advantage, None, cu_seqlens=CUTS, behavior_logp=behavior, reference_logp=reference,
        **settings,
    )  # fmt: skip
    out.loss.backward()
    return out, logp.grad


@pytest.mark.parametrize(
    "around",
    [{}, {"kl_coef": 0.1}, {"weight": torch.tensor([1.0, 0.5, 0.25])}, {"denominator": 7.0},
     {"correction": {"level": "sequence", "action": "clamp", "metric": "ratio", "agg": "mean", "upper": 1.01}}],
    ids=str,
)  # fmt: skip
def test_gspo_as_a_function_is_the_preset_with_all_that_is_around_it(around):
    mine, gradient = step(gspo, **EPS, **around)
    preset, want = step("gspo", clip_low=0.01, clip_high=0.012, **around)
    assert torch.equal(gradient, want)
    assert torch.equal(mine.loss, preset.loss)
    assert mine.stats.keys() == preset.stats.keys()
    assert all(torch.equal(mine.stats[name], preset.stats[name]) for name in mine.stats)
    assert mine.clipped.any()


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum", "token_mean", "token_sum"])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_loss_per_token_is_aggregated_as_a_presets(aggregation, by_token):
    advantage = torch.linspace(-1, 1, 10, dtype=torch.float64) if by_token else None
    more = {"aggregation": aggregation, "max_new_tokens": 8 if aggregation == "token_sum" else None}
    mine, gradient = step(grpo, advantage, **EPS, **more)
    preset, want = step("grpo", advantage, clip_low=0.01, clip_high=0.012, **more)
    torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(mine.loss, preset.loss, rtol=1e-12, atol=1e-15)
    assert torch.equal(mine.stats["clipped_high"], preset.stats["clipped_high"])


def test_an_advantage_per_sequence_is_the_mean_where_tokens_differ():
    seen = []

    def objective(logp, advantage, token_advantage, layout):
        seen.append((advantage, token_advantage))
        return -advantage * sum_tokens(logp, layout)

    per_token = torch.arange(10.0, dtype=torch.float64)
    step(objective, per_token)
    assert seen[0][0].tolist() == [1.0, 3.0, 6.5]
    assert torch.equal(seen[0][1], per_token)


def test_what_a_function_does_not_return_as_clipped_is_unknown_and_not_zero():
    out, _ = step(lambda logp, advantage, layout: -advantage * sum_tokens(logp, layout))
    assert "clipped_low" not in out.stats
    assert not out.clipped.any()


def test_a_setting_that_the_function_does_not_have_is_refused():
    with pytest.raises(TypeError, match="gspo has no setting tau"):
        step(gspo, **EPS, tau=1)
    with pytest.raises(ValueError, match="gspo needs eps_clip_higher"):
        step(gspo, eps_clip=0.1)


def test_the_probe_knows_whether_sequences_without_an_advantage_can_be_skipped():
    def pulled(logp, proximal_logp, advantage, layout):
        return gspo(logp, proximal_logp, advantage, layout, **EPS)[0] + 0.1 * sum_tokens(logp**2, layout)

    assert probe(gspo, EPS)
    assert probe(grpo, EPS)
    assert not probe(pulled, {})


# Refused before the first step


def shape(logp, advantage, layout):
    return (logp * at_tokens(advantage, layout)).unsqueeze(0)


def scalar(logp, advantage, layout):
    return (logp * at_tokens(advantage, layout)).sum()


def number(logp):
    return 1.0


def nan(logp, advantage, layout):
    return at_tokens(advantage.log(), layout) * logp


def nan_gradient(logp, advantage, layout):
    return at_tokens(advantage, layout) * torch.where(logp < 0, logp, logp / 0) * (logp - logp.detach()).abs().sqrt()


def detached(logp, advantage, layout):
    return at_tokens(advantage, layout) * logp.detach()


def flat(logp, advantage, layout):
    return at_tokens(advantage, layout) * logp * 0


def writes(logp, advantage, layout):
    return at_tokens(advantage.clamp_(min=0), layout) * logp


def writes_logp(logp, token_advantage):
    return logp.mul_(2) * token_advantage


def coupled(logp, advantage, layout):
    return at_tokens(advantage - advantage.mean(), layout) * logp


def random(logp, token_advantage):
    return logp * token_advantage * torch.rand(())


def raises(logp, layout):
    return logp[layout.no_such_field]


def clipped_as_numbers(logp, token_advantage):
    return logp * token_advantage, torch.zeros(len(logp))


def without_logp(advantage, layout):
    return advantage


def by_place(logp, /):
    return logp


def anything(logp, **more):
    return logp


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (shape, "shape [1, 18]; it must be [6], one per sequence, or [18], one per token"),
        (scalar, "shape []; it must be [6]"),
        (number, "returned the loss as float; it must be a tensor"),
        (nan, "its loss is nan for finite log-probs and advantages"),
        (nan_gradient, "its gradient is nan for finite"),
        (detached, "a loss without a gradient; compute it from logp"),
        (flat, "gradient 0 at every log-prob"),
        (writes, "changes its input advantage in place"),
        (writes_logp, "changes its input logp in place"),
        (coupled, "depends on the other sequences of its micro-batch"),
        (random, "different losses for the same inputs"),
        (raises, "failed on small tensors: AttributeError: 'TokenLayout' object has no attribute 'no_such_field'"),
        (clipped_as_numbers, "what was clipped as torch.float32; it must be torch.bool"),
        (without_logp, "has no parameter logp"),
        (by_place, "has the parameter logp"),
        (anything, "has the parameter **more"),
        (gspo, "needs eps_clip, eps_clip_higher"),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_what_cannot_be_trained_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=rf"{function.__name__}\b.*" + re.escape(message)):
        probe(function, {})


def test_an_error_of_the_function_shows_its_line():
    with pytest.raises(ValueError, match=re.escape("return logp[layout.no_such_field]")):
        probe(raises, {})


def test_the_probe_leaves_the_random_numbers_of_torch_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    probe(gspo, EPS)
    assert torch.equal(torch.get_rng_state(), before)
